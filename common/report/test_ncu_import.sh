#!/usr/bin/env bash
# test_ncu_import.sh ATTN_REPORT FOLDER NAME
# Writes the export NAME of FOLDER/exports.txt and compares it with two_kernels.ncu.csv by
# attn_report diff: exit status and output must be those of exports.txt. Exports that differ in form
# alone give the counters of two_kernels.ncu.csv; an export that cannot be read reliably gives one
# line with its line number.
set -uo pipefail
export LC_ALL=C
entry() {
  awk -v name="$1" '/^== / { on = $2 == name; next } on && !/^$/' "$folder/exports.txt"
}
report=$1 folder=$2 name=$3
command=$(entry "$name" | sed -n 's/^\$ //p')
wanted=$(entry "$name" | grep -v '^\$ ')
[[ $wanted != 'as two_kernels' ]] ||
  wanted=$(entry two_kernels | sed "/^\\$ /d; s/^\(B: .*(\)two_kernels/\1$name/")
[[ -n $command && -n $wanted ]] || { echo "$name: not in exports.txt"; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$folder"/*.ncu.csv "$work" && cd "$work" || exit 1
bash -c "set -o pipefail; $command" <two_kernels.ncu.csv >export || exit 1
mv export "$name.ncu.csv"
actual=$("$report" diff two_kernels.ncu.csv "$name.ncu.csv" 2>&1; echo "exit: $?")
diff -u <(printf '%s\n' "$wanted") <(grep -v '^$' <<<"$actual")
