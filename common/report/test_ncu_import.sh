#!/usr/bin/env bash
# test_ncu_import.sh ATTN_REPORT FOLDER NAME
# Compares NAME.ncu.csv with two_kernels.ncu.csv by attn_report diff: exit status and output must be
# those of FOLDER/expected.txt. Exports that differ in form alone give the counters of
# two_kernels.ncu.csv; what cannot be read for certain gives one line with the number of the line.
set -uo pipefail
cd "$2" || exit 1
expected() { awk -v name="$1" '/^== / { on = $2 == name; next } on && !/^$/' expected.txt; }
wanted=$(expected "$3")
[[ $wanted != 'as two_kernels' ]] || wanted=$(expected two_kernels | sed "s/^\(B: .*(\)two_kernels/\1$3/")
[[ -n $wanted ]] || { echo "$3: not in expected.txt"; exit 1; }
actual=$("$1" diff two_kernels.ncu.csv "$3.ncu.csv" 2>&1; echo "exit: $?")
diff -u <(printf '%s\n' "$wanted") <(grep -v '^$' <<<"$actual")
