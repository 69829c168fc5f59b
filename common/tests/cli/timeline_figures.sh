#!/usr/bin/env bash
# timeline_figures.sh ROOT BIN PYTHON: the figures that are timelines show what timeline_figures.sh
# of common/scripts draws. Ends with planted faults.
set -euo pipefail
root=$1 bin=$2 python=$3
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# complaints FIGURES: about each that differs from a new one, or that no command draws
complaints() {
  local file
  for file in "$work"/new/*.svg; do
    "$python" "$here/timeline_figures.py" "$1/${file##*/}" "$file" ||
      echo "docs/figures/${file##*/}: differs from what common/scripts/timeline_figures.sh draws"
  done
  grep -lE ">(a model of an H100 or H200, not a measurement|recorded on )" "$1"/*.svg |
    while read -r file; do
      [[ -e $work/new/${file##*/} ]] ||
        echo "docs/figures/${file##*/}: common/scripts/timeline_figures.sh does not draw it"
    done
}

mkdir "$work/new" "$work/old"
bash "$root/common/scripts/timeline_figures.sh" "$bin" "$work/new"
said=$(complaints "$root/docs/figures")
[[ -z $said ]] || { echo "$said"; exit 1; }

cp "$root"/docs/figures/*.svg "$work/old"
sed -i '0,/softmax/s//Softmax/' "$work/old/06_pingpong.svg"  # a label
"${AWK:-awk}" '/<rect class="n p"/ && ++n == 2 { next } 1' "$work/new/06_ring.svg" \
  >"$work/old/06_ring.svg"  # a box is gone
sed -i 's/>block 2</>block 4</' "$work/old/05_last_block.svg"  # a lane
"$python" - "$work/new/03_async.svg" >"$work/old/03_async.svg" <<'PYTHON'  # a box elsewhere
import re, sys
text = open(sys.argv[1], encoding="utf-8").read()
for box in re.finditer(r'<rect class="n p" x="([\d.]+)"', text):
    if 200 < float(box[1]) < 700:
        text = text[: box.start(1)] + str(float(box[1]) + 30) + text[box.end(1) :]
        break
print(text, end="")
PYTHON
sed -i '0,/<rect class="g0"/s//<rect class="g1"/' "$work/old/06_cross_tile.svg"  # a colour
cp "$work/new/06_backward.svg" "$work/old/06_other.svg"
said=$(complaints "$work/old")
for fault in 06_pingpong.svg:\ differs 06_ring.svg:\ differs 05_last_block.svg:\ differs \
  03_async.svg:\ differs 06_cross_tile.svg:\ differs 06_other.svg:\ common; do
  [[ $said == *"$fault"* ]] || { echo "a planted fault is not found: $fault"; exit 1; }
done
[[ $(grep -c '^docs' <<<"$said") -eq 6 ]] || { echo "more than was planted: $said"; exit 1; }
echo "$(ls "$work/new" | wc -l) figures as drawn"
