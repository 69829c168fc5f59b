#!/usr/bin/env bash
# memory.sh PROGRAM: the JSON of a run says what each step needs, as the line "memory:" does.
set -euo pipefail
program=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { printf 'FAILED: %s\n' "$1"; cat "$work/said" "$work/run.json"; exit 1; }
need() { grep -o '"memory_bytes": [0-9.]*' "$work/run.json" | grep -o '[0-9.]*$' | sort -n | tail -n 1; }

"$program" --device emulated --check off --step v1_global --seqlen 128 --json "$work/run.json" >"$work/said"
kib=$(sed -n 's/^memory: v1_global \([0-9.]*\) KiB needed.*/\1/p' "$work/said")
awk -v kib="$kib" -v bytes="$(need)" 'BEGIN { d = bytes - kib * 1024; exit !(kib > 0 && d < 6 && d > -6) }' ||
  fail "memory_bytes is not $kib KiB"

# What does not fit is refused, and still says what it needs.
status=0
"$program" --device emulated --step v1_global --heads 16 --seqlen 131072 --json "$work/run.json" >"$work/said" || status=$?
[[ $status -eq 4 ]] || fail "exit $status, not 4"
[[ $(need) == 2* && $(need) == ????????????*.0 ]] || fail "memory_bytes of what was refused"

# What a step cannot do at all needs nothing.
"$program" --device emulated --check off --step v10_ldmatrix,v13_cublas --head-dim 7 --json "$work/run.json" >"$work/said"
grep -q '"memory_bytes": null' "$work/run.json" || fail "a number for a step that refuses"
echo "everything as expected"
