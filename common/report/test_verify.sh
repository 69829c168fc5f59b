#!/usr/bin/env bash
# test_verify.sh ATTN_REPORT RESULTS: a page is as it was written until a byte of it changes.
set -euo pipefail
report=$1 results=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { printf 'FAILED: %s\n' "$1"; exit 1; }
verify() {  # EXIT FILE
  local status=0
  "$report" page --verify "$2" >"$work/said" 2>&1 || status=$?
  [[ $status -eq $1 ]] || fail "$2: exit $status, not $1: $(<"$work/said")"
}

printf 'predicted: FP32\n' >"$work/log.md"
"$report" page "$results" --name 'A Student' --log "$work/log.md" -o "$work/page.html"
verify 0 "$work/page.html"
grep -q 'predicted: FP32' "$work/page.html" || fail "the log is missing"

sed 's/predicted: FP32/predicted: HBM/' "$work/page.html" >"$work/content.html"
verify 1 "$work/content.html"
grep -q ALTERED "$work/said" || fail "nothing said of it"
{ cat "$work/page.html"; echo; } >"$work/longer.html"
verify 1 "$work/longer.html"
sed 's/By A Student/By B Student/' "$work/page.html" >"$work/name.html"
verify 1 "$work/name.html"
head -c 3000 "$work/page.html" >"$work/cut.html"
verify 2 "$work/cut.html"
# What is inside is what sha256sum counts.
inside=$(grep -n '^<!-- sha256 ' "$work/page.html" | cut -d: -f1)
sum=$(head -n $((inside - 1)) "$work/page.html" | head -c -1 | sha256sum | cut -d' ' -f1)
grep -q "^<!-- sha256 $sum " "$work/page.html" || fail "sha256sum gives $sum"
echo "everything as expected"
