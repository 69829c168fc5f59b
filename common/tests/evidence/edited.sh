#!/usr/bin/env bash
# edited.sh ATTN_REPORT PROJECT: somebody makes a step faster in its line and generates the tables
# again. The tables agree then; the checksums do not.
set -euo pipefail
report=$1 project=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
file=06_flash_v3_hopper.forward.jsonl
mkdir -p "$work/docs/reports"
cp -r "$project/docs/reports/h200" "$work/docs/reports/gpu"
cp "$project/06_flash_v3_hopper/RESULTS.md" "$work/page.md"
reports=$work/docs/reports/gpu

fail() { cat "$work/log"; echo "FAILED: $1"; exit 1; }
check() { "$report" evidence check --root "$project" "$reports" >"$work/log"; }
check || fail "as it is"

sed -i '/^{"name":"06_flash_v3_hopper.forward_d128_n2048"/s/"median_s":0\.000[0-9]/"median_s":0.0001/g' \
  "$reports/$file"
cmp -s "$reports/$file" "$project/docs/reports/h200/$file" && fail "nothing was edited"
"$report" tables --reports "$reports" "$work/page.md"
"$report" tables --check --reports "$reports" "$work/page.md" || fail "the tables are not those"
! check || fail "the edit was not found"
grep -q "^$file: 06_flash_v3_hopper.forward_d128_n2048: was edited" "$work/log" ||
  fail "another reason"
echo "found: $(head -n 1 "$work/log")"
