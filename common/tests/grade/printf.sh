#!/usr/bin/env bash
# printf.sh JUDGE_01_NAIVE CHECK_EX01A: what a student's kernel prints is there, whatever the output
# is: a pipe or a file. The program is killed or crashes soon after, and a line may have no end.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "$1"; exit 1; }
judge() { "$1" ex01a --program "$2" --variant prints --case 1; }
seen() {
  [[ $(grep -c '^row 0 of 1 keys$' "$1") -ge 1 ]] || fail "$2: a line is lost: $(cat "$1")"
  grep -q 'and no end of the line' "$1" || fail "$2: a line without an end is lost: $(cat "$1")"
}
judge "$1" "$2" >"$work/out" 2>"$work/err" || true
seen "$work/err" "a file"
# The variations that follow a failure print nothing: of 4 heads each row 0 once.
[[ $(grep -c 'row 0 of' "$work/err") -le 4 ]] || fail "variations print, too: $(cat "$work/err")"
judge "$1" "$2" 2>&1 >/dev/null | cat >"$work/pipe" || true
seen "$work/pipe" "a pipe"
judge "$1" "$2" >"$work/both" 2>&1 || true
seen "$work/both" "one file for both"
[[ $(head -n 1 "$work/both") == "ex01a (fill, v1_global)" ]] || fail "the title is not first"
echo "everything that was printed is there"
