#!/usr/bin/env bash
# Records timelines on this GPU, and says for each step whether its file holds, and what recording
# costs. Exit status: 0 all hold, 1 some do not, 77 no GPU.
#
#   common/scripts/check_recording.sh [FOLDER [OUT]]
#
# FOLDER contains the chapter programs and attn_report (default: build/release/bin). The files stay
# in OUT (default: a temporary folder): per step the model's, the GPU's, and their comparison.
set -uo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
bin=${1:-$root/build/release/bin}
out=${2:-$(mktemp -d)}
mkdir -p "$out"
events=$root/common/tests/cli/timeline_events.py
failed=0

"$bin/06_flash_v3_hopper" --device gpu --step v6 --seqlen 128 --head-dim 64 >/dev/null
[[ $? -eq 77 ]] && { echo "no GPU"; exit 77; }

# record CHAPTER STEP OPTION ...
record() {
  local chapter=$1 step=$2 name=${1%%_*}_$2
  shift 2
  echo "== $chapter $step"
  "$bin/$chapter" --device emulated --check off --step "$step" "$@" \
    --timeline "$out/$name.model.json" >/dev/null || { failed=1; echo "FAILED: the model"; return; }
  if ! "$bin/$chapter" --device gpu --step "$step" "$@" --timeline "$out/$name.gpu.json" \
    >"$out/$name.txt" 2>&1; then
    failed=1
    echo "FAILED: the recorded launch"
    tail -n 5 "$out/$name.txt"
    return
  fi
  grep -E "^(timeline|$step)" "$out/$name.txt"
  "$bin/$chapter" --device gpu --step "$step" "$@" --timeline "$out/$name.gpu.html" >/dev/null ||
    { failed=1; echo "FAILED: the page"; }
  python3 "$events" "$out/$name.gpu.json" || { failed=1; echo "FAILED: events do not nest"; }
  "$bin/attn_report" timeline "$out/$name.model.json" "$out/$name.gpu.json" \
    >"$out/$name.compared.txt" || { failed=1; echo "FAILED: attn_report"; }
  grep -E '^(wait|two warpgroups)' "$out/$name.compared.txt"  # A: model, B: GPU
}

for step in v5 v6 v7 v8; do
  record 06_flash_v3_hopper $step --head-dim 128 --seqlen 1024
  [[ -e $out/06_$step.gpu.json ]] && python3 "$events" "$out/06_$step.gpu.json" softmax |
    sed 's/$/ % of softmax is in both warpgroups at once/'
done
record 03_flash_v1 v6 --seqlen 512
record 05_flash_decoding v3 --head-dim 128 --seqlen-k 16384
echo "== many blocks: most are left out of the file"
"$bin/06_flash_v3_hopper" --device gpu --check off --step v6 --head-dim 128 --seqlen 8192 \
  --heads 16 --timeline "$out/many.json" | grep '^timeline' && python3 "$events" "$out/many.json" ||
  { failed=1; echo "FAILED: many blocks"; }

echo "== refusals"
"$bin/06_flash_v3_hopper" --device gpu --step v3 --seqlen 128 --head-dim 64 \
  --timeline "$out/refused.json"
[[ $? -eq 2 && ! -e $out/refused.json ]] || { failed=1; echo "FAILED: v3 is not refused"; }

echo "== plain and recorded outputs bit for bit"
for chapter in 06_flash_v3_hopper 03_flash_v1 05_flash_decoding; do
  [[ -x $bin/test_$chapter ]] || { echo "test_$chapter is not built"; continue; }
  "$bin/test_$chapter" "[timeline]" | tail -n 3
  [[ ${PIPESTATUS[0]} -eq 0 ]] || { failed=1; echo "FAILED: test_$chapter"; }
done
echo "files: $out"
exit $failed
