#!/usr/bin/env bash
# edited.sh ATTN_REPORT PROJECT: somebody makes a step faster in its result file and generates the tables anew. The tables
# agree then; the manifest does not.
set -euo pipefail
report=$1 project=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
name=06_flash_v3_hopper.forward_d128_n2048
mkdir -p "$work/docs/reports"
cp -r "$project/docs/reports/h200" "$work/docs/reports/gpu"
cp "$project/06_flash_v3_hopper/RESULTS.md" "$work/page.md"
reports=$work/docs/reports/gpu

"$report" evidence check --root "$project" "$reports" >"$work/log" || { cat "$work/log"; echo "FAILED: as it is"; exit 1; }
sed -i '0,/"median_s": 0\.000\([0-9]\)/s//"median_s": 0.0001/' "$reports/$name.json"
cmp -s "$reports/$name.json" "$project/docs/reports/h200/$name.json" && { echo "FAILED: nothing was edited"; exit 1; }
"$report" tables --reports "$reports" "$work/page.md"
"$report" tables --check --reports "$reports" "$work/page.md" || { echo "FAILED: the tables were not made anew"; exit 1; }
if "$report" evidence check --root "$project" "$reports" >"$work/log"; then echo "FAILED: the edit was not found"; exit 1; fi
grep -q "^$name.json: not as it was measured" "$work/log" || { cat "$work/log"; echo "FAILED: another reason"; exit 1; }
echo "found: $(head -n 1 "$work/log")"
