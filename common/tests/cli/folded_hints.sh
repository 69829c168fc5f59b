#!/usr/bin/env bash
# folded_hints.sh AWK ROOT: on the site every hint and every "Why" of an exercise is folded, each closed again, and lines keep
# their numbers.
set -euo pipefail
awk=$1 root=$2
count=0
for page in "$root"/0*/exercises/[a-e].md; do
  site=$("$awk" -v ROOT="$root" -f "$root/docs/filter_markdown.awk" "$page")
  hints=$(grep -cE '^## (Hint [0-9]|Why)' "$page")
  [[ $hints -ge 2 && $(grep -c '^## Hint' "$page") -eq 3 ]] || { echo "$page: has no three hints"; exit 1; }
  [[ $(grep -o '<details><summary>\(Hint [0-9]\|Why\)</summary>' <<<"$site" | wc -l) -eq $hints ]] || { echo "$page: not all are folded"; exit 1; }
  [[ $(grep -o '</details>' <<<"$site" | wc -l) -eq $hints ]] || { echo "$page: not all are closed"; exit 1; }
  if grep -qE '^## (Hint|Why)' <<<"$site"; then echo "$page: a hint is open"; exit 1; fi
  line=$(grep -nm1 '^## Why' "$page" | cut -d: -f1)
  sed -n "${line}p" <<<"$site" | grep -q '<summary>Why<' || { echo "$page: lines have moved"; exit 1; }
  count=$((count + 1))
done
[[ $count -gt 0 ]] || { echo "no exercises"; exit 1; }
echo "$count pages"
