#!/usr/bin/env bash
# Runs on a GPU machine what CI cannot, and writes what it saw to docs/reports/<gpu>/.
#
#   common/scripts/verify_on_gpu.sh [--out DIR] [PART...]
#
#   tests      every test tagged [gpu]                                   -> tests.txt
#   sanitizer  four tools of compute-sanitizer over every step           -> sanitizer.txt
#   access     the rules of warp_access.h against the hardware counters  -> warp_access.txt
#   times      every step at the problems of its chapter                 -> <chapter>.<problem>.json
#   peers      PyTorch's backends beside the steps, in turns             -> peers.<chapter>.json
#   counters   ncu over one launch of every step                         -> <chapter>.<step>.ncu.csv
#
# Without PART all of them, in this order (about ten minutes on an H200). What ran, and on which sources, is
# kept in parts.txt; when all parts of one run passed, manifest.txt is written (see manifest.sh). The
# program is expected in build/release: build it first with common/scripts/start.sh. Exit status: 0, or 1 if
# a part failed.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=build/release/bin
out=
parts=()
while [ $# -gt 0 ]; do
  case $1 in
    --out) out=$2; shift 2 ;;
    tests|sanitizer|access|times|peers|counters) parts+=("$1"); shift ;;
    *) echo "verify_on_gpu.sh: $1: must be --out DIR, tests, sanitizer, access, times, peers or counters" >&2; exit 2 ;;
  esac
done
[ ${#parts[@]} -gt 0 ] || parts=(tests sanitizer access times peers counters)

device=$("$bin/01_naive" --seqlen 8 --require-gpu | sed -n 's/^device: //p')
case $device in
  none*) echo "$device"; exit 77 ;;
esac
# "NVIDIA H200 (sm_90)" -> h200
gpu=$(sed -E 's/ \(sm.*//; s/^NVIDIA //; s/GeForce //; s/[^A-Za-z0-9]+/-/g' <<<"$device" | tr '[:upper:]' '[:lower:]')
out=${out:-docs/reports/$gpu}
mkdir -p "$out"

# The problems of a chapter: a name for the file, then options. One line each.
problems_of() {
  case $1 in
    01_naive)
      for n in 1024 2048 4096 8192; do
        echo "forward_n$n --operation forward --batch 4 --heads 16 --head-dim 128 --seqlen $n"
        echo "backward_n$n --operation backward --step b2_cublas --batch 4 --heads 16 --head-dim 128 --seqlen $n"
      done
      echo "forward_n16384 --step v4_tensor_core,v5_cublas --heads 16 --head-dim 128 --seqlen 16384"
      echo "forward_causal_n4096 --step v3_tiled,v4_tensor_core,v5_cublas --batch 4 --heads 16 --head-dim 128 --seqlen 4096 --causal"
      echo "forward_fp32_n4096 --step v3_tiled,v5_cublas --batch 4 --heads 16 --head-dim 128 --seqlen 4096 --dtype fp32"
      echo "backward_b1_n2048 --operation backward --batch 4 --heads 16 --head-dim 128 --seqlen 2048" ;;
  esac
}
profiled_problem() {
  case $1 in
    01_naive) echo "--batch 4 --heads 16 --head-dim 128 --seqlen 2048" ;;
  esac
}
metrics=$(awk '/^[a-z]/ && $1 != "section" { printf "%s%s", separator, $1; separator = "," }' \
  common/scripts/metrics.txt)

# parts.txt says which part ran last on which sources: "tests  passed  sources 0123456789abcdef".
record() {  # PART VERDICT
  touch "$out/parts.txt"
  { grep -v "^$1  " "$out/parts.txt" || true; echo "$1  $2  sources $digest"; } >"$out/parts.txt.new"
  mv "$out/parts.txt.new" "$out/parts.txt"
}
digest=$(common/scripts/manifest.sh digest)
any_failed=0

for part in "${parts[@]}"; do
  echo "== $part"
  failed=0
  record "$part" "begun"
  case $part in
    tests)
      for test in "$bin"/test_*; do
        "$test" --list-tests "[gpu]" | grep -q '^  [^ ]' || continue  # has none
        echo "$(basename "$test") [gpu]"
        "$test" "[gpu]" || failed=1
      done 2>&1 | tee "$out/tests.txt"
      # A pipe runs its loop in a shell of its own: ask the file.
      ! grep -qE 'FAILED|failed' "$out/tests.txt" || failed=1 ;;
    sanitizer)
      common/scripts/sanitize.sh 2>&1 | tee "$out/sanitizer.txt" || failed=1 ;;
    access)
      common/scripts/check_warp_access.sh 2>&1 | tee "$out/warp_access.txt" || failed=1 ;;
    times)
      for program in "$bin"/[0-9][0-9]_*; do
        chapter=$(basename "$program")
        while read -r name options; do
          # shellcheck disable=SC2086  # options are several words
          "$program" $options --time --require-gpu --json "$out/$chapter.$name.json" || failed=1
        done < <(problems_of "$chapter")
      done ;;
    peers)
      python3 common/scripts/peers.py --program $bin/01_naive --steps v4_tensor_core,v5_cublas \
        --backends math,flash,cudnn --out "$out/peers.01_naive.json" || failed=1 ;;
    counters)
      for program in "$bin"/[0-9][0-9]_*; do
        chapter=$(basename "$program")
        for step in $("$program" --list | awk 'NR > 1 && $1 ~ /^[a-z]+[0-9]/ {print $1}'); do
          # shellcheck disable=SC2046  # options are several words
          ncu --clock-control none --profile-from-start off --csv --print-units base --metrics "$metrics" \
            "$program" $(profiled_problem "$chapter") --profile "$step" 2>/dev/null |
            grep '^"' > "$out/$chapter.$step.ncu.csv" || failed=1
        done
      done ;;
  esac
  if [ $failed -eq 0 ]; then record "$part" passed; else record "$part" failed; any_failed=1; fi
done

# Only a full run that passed makes the folder true of the sources as they are.
if [ "$(printf '%s\n' "${parts[@]}" | sort -u | wc -l)" -lt 6 ]; then
  echo "not all parts ran: $out/manifest.txt stays as it was"
elif [ $any_failed -ne 0 ]; then
  echo "a part failed: $out/manifest.txt stays as it was"
elif [ "$(common/scripts/manifest.sh digest)" != "$digest" ]; then
  echo "a source changed meanwhile: $out/manifest.txt stays as it was"
  any_failed=1
else
  common/scripts/manifest.sh write "$out"
fi
exit $any_failed
