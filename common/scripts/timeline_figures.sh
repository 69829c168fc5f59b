#!/usr/bin/env bash
# Draws the figures that are timelines again: docs/figures/*.svg, from the emulator's model and from
# what a GPU has recorded. The same build writes the same bytes.
#
#   common/scripts/timeline_figures.sh [BIN [OUT]]
#
# BIN: folder of the chapter programs and of attn_report (default: build/release/bin). OUT: where
# the figures go (default: docs/figures).
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
bin=${1:-$root/build/release/bin}
out=${2:-$root/docs/figures}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# record CHAPTER STEP OPTION ...: STEP.json
record() {
  "$bin/$1" --device emulated --check off --step "$2" "${@:3}" --timeline "$work/$2.json" \
    >"$work/stdout" || { cat "$work/stdout"; exit 1; }
}
# draw FIGURE TITLE STEP[,STEP] OPTION ...: of attn_report
draw() {
  local files=()
  for step in ${3//,/ }; do files+=("$work/$step.json"); done
  "$bin/attn_report" timeline "${files[@]}" --svg "$out/$1.svg" --title "$2" "${@:4}"
}
units="tensor core,special-function unit=exponentials"
warpgroups="warp 0=warpgroup 0,warp 4=warpgroup 1"

record 03_flash_v1 v5 --seqlen 128 --heads 1
record 03_flash_v1 v6 --seqlen 128 --heads 1
draw 03_async "One block of v5 and v6: who waits for the next tile of Q" v5,v6 \
  --us 3.2 --lanes "cp.async of warp 0=copies in flight,$units,warp 0"

# The recorded one is a part of what check_recording.sh wrote on an H200.
record 03_flash_v1 v6 --seqlen 512
cp "$root/docs/figures/03_recorded.json" "$work/h200.json"
draw 03_recorded "One warp of 03's v6: the model, and a recorded launch" v6,h200 \
  --us 3.4 --lanes "cp.async of warp 0=copies in flight,warp 0"

record 05_flash_decoding v7 --head-dim 64 --heads 1 --seqlen-k 260 --num-splits 4
draw 05_last_block "Four splits of a sequence: the last block to arrive reduces" v7 \
  --block 0,1,2,3 --from 1.2 --us 1.8 --lanes "warp 0="

one_tile=(--head-dim 128 --heads 1 --seqlen-q 128 --seqlen-k 1024)
for step in v5 v6 v7; do record 06_flash_v3_hopper $step "${one_tile[@]}"; done
draw 06_ring "A pipeline of two stages: copies, reads, and who waits for whom" v5 --us 5 --lanes \
  "warp 8=producer,smem sK[0],smem sK[1],smem sV[0],smem sV[1],$warpgroups"
draw 06_pingpong "Two warpgroups: MMAs, exponentials and waits" v5,v6,v7 \
  --from 1 --us 5 --lanes "$units,$warpgroups"

# Recorded ones are parts of what check_recording.sh wrote on an H200.
for step in v5 v6; do
  record 06_flash_v3_hopper $step --head-dim 128 --seqlen 1024
  cp "$root/docs/figures/06_recorded_$step.json" "$work/h200_$step.json"
done
draw 06_recorded "Two warpgroups in v5 and v6: the model, and recorded launches" \
  v5,h200_v5,v6,h200_v6 --from 1.5 --us 6.5 --lanes "$warpgroups"

for step in v10 v11; do
  record 06_flash_v3_hopper $step --head-dim 128 --heads 1 --seqlen-q 512 --seqlen-k 1024
done
draw 06_cross_tile "The end of a query tile (sQ[0]) and the begin of the next one (sQ[1])" v10,v11 \
  --from 9 --us 4.5 --lanes "smem sQ[0],smem sQ[1],$units,$warpgroups"

for step in b2 b3; do
  record 06_flash_v3_hopper $step --operation backward --head-dim 64 --heads 1 --seqlen 512
done
draw 06_backward "One query tile of the backward pass: five products per warpgroup" b2,b3 \
  --block 4 --from 3.2 --us 2.2 --lanes "$units,$warpgroups"
