#!/usr/bin/env bash
# tables.sh ATTN_REPORT REPORTS PAGE: `attn_report tables --check` passes PAGE as it is, and finds one changed
# digit in any of its tables, headlines among them.
set -euo pipefail
report=$1 reports=$2 page=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# A ladder is made of the step files next to its page.
folder=$work/$(basename "$(dirname "$page")")
mkdir "$folder"
find "$(dirname "$page")" -maxdepth 1 -name '*.cu' -exec cp -t "$folder" {} +
copy=$folder/page.md

check() { "$report" tables --check --reports "$reports" "$copy" >"$work/log" 2>&1; }
cp "$page" "$copy"
check || { cat "$work/log"; echo "FAILED: the page as it is"; exit 1; }

tables=$(grep -c '^<!-- table: ' "$page")
[[ $tables -gt 0 ]] || { echo "FAILED: no table in $page"; exit 1; }
for ((n = 1; n <= tables; ++n)); do
  # The last digit of the n-th table becomes another.
  awk -v wanted="$n" '
    /^<!-- table: / { ++table }
    { line[NR] = $0 }
    table == wanted && !ended && /[0-9]/ && !/^<!--/ && !/(Measured|Computed) .*\.$/ { last = NR }
    table == wanted && /^<!-- end table/ { ended = 1 }
    END {
      for (i = 1; i <= NR; ++i) {
        if (i == last) {
          match(line[i], /[0-9][^0-9]*$/)
          digit = substr(line[i], RSTART, 1)
          line[i] = substr(line[i], 1, RSTART - 1) (digit + 1) % 10 substr(line[i], RSTART + 1)
        }
        print line[i]
      }
    }' "$page" >"$copy"
  [[ $(diff "$page" "$copy" | grep -c '^>') -eq 1 ]] || { echo "FAILED: table $n not changed"; exit 1; }
  if check; then
    diff "$page" "$copy" || true
    echo "FAILED: a changed digit in table $n was not found"
    exit 1
  fi
done
echo "$tables changed tables, all found"
