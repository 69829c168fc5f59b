#!/usr/bin/env bash
# manifest.sh SOURCE_TREE: common/scripts/manifest.sh on a scratch copy of the sources that it lists.
set -euo pipefail
tree=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(
  cd "$tree"
  mkdir -p "$work/common/scripts" "$work/reports"
  cp common/scripts/manifest.sh "$work/common/scripts"
  while IFS= read -r path; do
    mkdir -p "$work/$(dirname "$path")"
    cp "$path" "$work/$path"
  done < <(common/scripts/manifest.sh list)
)
cd "$work"
tool=common/scripts/manifest.sh
manifest=reports/manifest.txt
step=$($tool list | grep -m 1 '\.cu$')
other=$($tool list | grep '\.cu$' | sed -n 2p)

expect() {  # EXIT TEXT WHAT: TEXT must be in what check prints; "" takes anything
  local status=0 output
  output=$($tool check reports 2>&1) || status=$?
  if [[ $status -ne $1 || $output != *"$2"* ]]; then
    printf 'FAILED: %s\n  exit %s, not %s; or no "%s" in:\n%s\n' "$3" "$status" "$1" "$2" "$output"
    exit 1
  fi
}
fresh() {  # the manifest as after a measurement
  cp "$work/saved" "$manifest"
}

expect 2 "no such file" "no manifest"
$tool write reports >/dev/null
cp "$manifest" saved
expect 0 " sources, 0 of them unverified" "nothing changed"
$tool write reports >/dev/null
cmp saved "$manifest"  # the same bytes every time

# One byte, and only that file is named.
cp "$step" step.saved
printf ' ' >>"$step"
expect 1 "$step: changed" "one byte changed"
[[ $($tool check reports | grep -c ': changed') -eq 1 ]] || { echo "FAILED: more than one named"; exit 1; }
printf '%s  spaces only\n' "$step" >>"$manifest"
expect 0 "1 of them unverified with a reason" "changed, listed with a reason"
fresh
printf '%s\n' "$step" >>"$manifest"
expect 1 "$step: changed since the measurement, and listed as unverified without a reason" "no reason"
fresh
printf '%s  spaces only\n' "$other" >>"$manifest"
expect 1 "$step: changed" "a reason for another file"

# A full run measures everything: no excuse is left.
fresh
printf '%s  spaces only\n' "$step" >>"$manifest"
$tool write reports >/dev/null
expect 0 "0 of them unverified" "written again"
cp step.saved "$step"
expect 1 "$step: changed" "changed back after that"

# An excuse that is no longer needed.
fresh
printf '%s  spaces only\n' "$step" >>"$manifest"
expect 1 "$step: listed as unverified, but as it was measured" "superfluous"
fresh
printf '01_naive/nosuch.cu  a slip of the pen\n' >>"$manifest"
expect 1 "01_naive/nosuch.cu: listed as unverified" "an excuse for nothing"

# New and removed files.
fresh
cp "$step" 01_naive/v9_new.cu
expect 1 "01_naive/v9_new.cu: new" "a new step"
printf '01_naive/v9_new.cu  no GPU at hand yet\n' >>"$manifest"
expect 0 "1 of them unverified" "a new step, listed with a reason"
rm 01_naive/v9_new.cu
fresh
mkdir 02_more
cp "$step" 02_more/v1_first.cu
expect 1 "02_more/v1_first.cu: new" "a new chapter"
rm -r 02_more
mv "$step" step.gone
expect 1 "$step: gone" "a removed step"
mv step.gone "$step"
expect 0 "" "everything as at first"

# What only the CPU sees does not count.
echo "// another comment" >01_naive/algorithm.h
expect 0 "" "algorithm.h"

# A damaged manifest is no pass.
echo "0123  $step" >"$manifest"
expect 2 "$manifest:1: " "a line that is no hash"
printf 'unverified:\n' >"$manifest"
expect 2 "no source in it" "an empty manifest"
fresh
printf '%s  once\n%s  and again\n' "$step" "$step" >>"$manifest"
expect 2 "twice" "two reasons for one file"
echo "all as expected"
