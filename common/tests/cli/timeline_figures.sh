#!/usr/bin/env bash
# timeline_figures.sh ROOT BIN COMPILER: the figures that are timelines are what
# timeline_figures.sh of common/scripts draws. Ends with planted faults.
set -euo pipefail
root=$1 bin=$2 compiler=$3
# The model counts the reads of arrays that this compiler leaves: others shift the times a little.
drawn_with="GNU 12"
[[ $compiler == "$drawn_with" ]] || { echo "drawn with $drawn_with, not $compiler"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# complaints FIGURES: a line for each that differs from a new one, or that no command draws
complaints() {
  local file
  for file in "$work"/new/*.svg; do
    cmp -s "$file" "$1/${file##*/}" ||
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
sed -i 's/softmax/Softmax/' "$work/old/06_pingpong.svg"
cp "$work/old/06_ring.svg" "$work/old/06_other.svg"
said=$(complaints "$work/old")
[[ $said == *06_pingpong.svg:\ differs* && $said == *06_other.svg:*"not draw it" ]] ||
  { echo "planted faults are not found"; exit 1; }
echo "$(ls "$work/new" | wc -l) figures as drawn"
