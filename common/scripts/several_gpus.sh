#!/usr/bin/env bash
# Measures the steps that work on several GPUs, in one call.
#
#   common/scripts/several_gpus.sh BUILD OUT [SECONDS [PATTERN]]
#   common/scripts/several_gpus.sh build/gpu $OUT 420
#
# BUILD: a build folder with bin/05_flash_decoding for the GPU. OUT: a folder; every result is
# appended to OUT/several_gpus.jsonl at once, so a call that is cut off keeps what it has. SECONDS:
# no measurement begins after so many (420). With 4 or 8 GPUs, all of them come before fewer.
# PATTERN: only checks and measurements whose options match it, to go on with what is missing.
#
# First checks against the reference, and a lost message that must end with exit status 4; then
# links; then time. One GPU and several are measured in the same process.
set -uo pipefail
if [[ ${1:-} == --help || $# -lt 2 ]]; then
  sed -n '2,/^set -/{/^set -/d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"
  exit 2
fi
build=$1 out=$2 seconds=${3:-420} pattern=${4:-}
program=$build/bin/05_flash_decoding log=$out/several_gpus.jsonl
[[ -x $program ]] || { echo "several_gpus.sh: $program: no such program" >&2; exit 2; }
mkdir -p "$out"
begin=$SECONDS bad=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}  # no multicast over NVLink
if [[ -z ${ATTN_NCCL:-} ]]; then  # the library of PyTorch's wheel, if the toolkit has none
  wheel=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0] + "/lib/libnccl.so.2")' \
    2>/dev/null) && [[ -f $wheel ]] && ! ldconfig -p | grep -q libnccl.so.2 &&
    [[ ! -f /usr/local/cuda/lib/libnccl.so.2 && ! -f /usr/local/cuda/lib64/libnccl.so.2 ]] &&
    export ATTN_NCCL=$wheel
fi

note() {  # KEY TEXT: a line of JSON with any text
  python3 -c 'import json, sys; print(json.dumps({"measure": sys.argv[1], "text": sys.argv[2]}))' \
    "$1" "$2" | tee -a "$log"
}
left() { (( SECONDS - begin < seconds )); }
wanted() { [[ -z $pattern || $* =~ $pattern ]]; }
run() {  # TIMEOUT ARGUMENT...: lines of JSON of the program, and its errors
  local limit=$1 errors rc
  shift
  wanted "$@" || return 0
  left || { note skipped "no time: $*"; return; }
  errors=$(mktemp)
  timeout "$limit" "$program" "$@" 2>"$errors" | tee -a "$log"
  rc=${PIPESTATUS[0]}
  [[ $rc == 0 ]] || { bad=1; note failed "exit $rc: $*: $(tail -n 1 "$errors")"; }
  rm -f "$errors"
}
check() {  # EXIT ARGUMENT...: a checked run; its table goes to the log as text
  local expected=$1 text rc
  shift
  wanted "$@" || return 0
  left || { note skipped "no time: $*"; return; }
  text=$(timeout 60 "$program" --device gpu --check full "$@" 2>&1)
  rc=$?
  # A lost message: any other device error would end with 4, too.
  [[ $expected != 4 || $text =~ time-out\ of\ .*rank\ .*\ bytes\ .*\ in\ hop ]] ||
    rc="$rc, no time-out"
  if [[ $rc == "$expected" ]]; then
    note check "ok: exit $rc: $*$(grep -o 'time-out of .*' <<<"$text" | tail -n 1 | sed 's/^/: /')"
  else
    bad=1
    note check "FAILED: exit $rc instead of $expected: $*: $(grep -E '^p|:' <<<"$text" | tail -n 6)"
  fi
}

gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader | wc -l)
note topology "$(nvidia-smi topo -m)"
fields=name,uuid,driver_version,clocks.sm,clocks.max.sm,temperature.gpu
note gpus "$(nvidia-smi --query-gpu=$fields --format=csv,noheader)"
note nccl "ATTN_NCCL=${ATTN_NCCL:-} $(env | grep '^NCCL_' | tr '\n' ' ')"
list() { seq -s, 0 $(($1 - 1)); }
all=$(list "$gpus")

for transport in copies nccl; do
  with=(--devices "$all" --transport "$transport" --timeout 20)
  check 0 --operation forward "${with[@]}" --heads 4 --head-dim 64 --seqlen 391 --causal
  check 0 --operation forward "${with[@]}" --heads 8 --kv-heads 2 --head-dim 128 --seqlen 2100 \
    --causal
  check 0 --operation forward "${with[@]}" --heads 2 --head-dim 128 --seqlen 1000 --window 300,0
  check 0 --operation decode --step p6,p7,p8 "${with[@]}" --heads 32 --kv-heads 8 \
    --head-dim 128 --seqlen-k 20000
  check 0 --operation decode --step p6,p7,p8 "${with[@]}" --heads 8 --kv-heads 2 --head-dim 64 \
    --batch 3 --seqlen-k 5000 --seqused 5000,700,0
  [[ $transport == copies ]] ||
    check 0 --operation decode --step p6 "${with[@]}" --collective all-reduce --heads 32 \
      --kv-heads 8 --head-dim 128 --seqlen-k 20000
  check 0 --operation backward "${with[@]}" --heads 4 --kv-heads 2 --head-dim 128 --seqlen 1000 \
    --causal
  ATTN_LOSE_MESSAGE=0 check 4 --operation forward --step p2 --devices "$all" \
    --transport "$transport" --timeout 5 --seqlen 500
done
# A process per GPU: all must pass the check.
processes() {  # ARGUMENT...
  local rank pids=() wrong=0
  wanted processes "$@" || return 0
  left || { note skipped "no time: processes: $*"; return; }
  rm -f "$work/id"
  for ((rank = 0; rank < gpus; ++rank)); do
    timeout 60 "$program" --check full --device "gpu:$rank" --devices "$rank" --rank "$rank" \
      --world "$gpus" --nccl-id "$work/id" "$@" >"$work/$rank" 2>&1 &
    pids+=($!)
  done
  for rank in "${!pids[@]}"; do
    wait "${pids[$rank]}" && continue
    note check "FAILED: exit $? of process $rank: $*: $(grep -E '^p|:' "$work/$rank" | tail -n 6)"
    bad=1 wrong=1
  done
  [[ $wrong == 1 ]] || note check "ok: $gpus processes: $*"
}
processes --operation forward --heads 8 --kv-heads 4 --head-dim 128 --seqlen 2100 --causal
processes --operation decode --step p6,p8 --heads 32 --kv-heads 8 --head-dim 128 --seqlen-k 20000
processes --operation backward --heads 4 --kv-heads 2 --head-dim 128 --seqlen 1000 --causal
run 60 --measure-links --devices "$all"

forward=(--measure-ranks --operation forward --head-dim 128)
backward=(--measure-ranks --operation backward --head-dim 128)
decode=(--measure-ranks --operation decode --heads 32 --kv-heads 8 --head-dim 128 --repeat 30)
measure() {  # DEVICES COUNT
  local devices=$1 count=$2 n
  run 60 "${forward[@]}" --devices "$devices" --heads 16 --seqlen 65536 --causal --repeat 10
  run 60 "${decode[@]}" --devices "$devices" --seqlen-k 1048576
  run 60 "${forward[@]}" --devices "$devices" --heads 16 --seqlen 65536 --repeat 10 --step p2,p3
  run 60 "${forward[@]}" --devices "$devices" --heads 16 --seqlen $((8192 * count)) --causal \
    --step p2,p3,p4
  run 60 "${forward[@]}" --devices "$devices" --heads 32 --kv-heads 8 --seqlen $((8192 * count)) \
    --causal --step p2,p3,p4
  run 60 "${backward[@]}" --devices "$devices" --heads 16 --seqlen 65536 --causal --repeat 10
  run 60 "${backward[@]}" --devices "$devices" --heads 16 --seqlen $((8192 * count)) --causal
  for n in 8192 16384 32768 65536 131072 262144; do
    run 30 "${decode[@]}" --devices "$devices" --seqlen-k "$n"
  done
  # Sequences of different lengths: pages round-robin, and a cut of the whole cache.
  run 30 "${decode[@]}" --devices "$devices" --step p6,p8 --batch 8 --seqlen-k 131072 --seqused \
    131072,65536,32768,32768,16384,16384,8192,8192
  for n in 16384 1048576; do
    run 30 "${decode[@]}" --devices "$devices" --seqlen-k "$n" --step p6 --transport nccl \
      --collective all-reduce
  done
  run 90 "${forward[@]}" --devices "$devices" --heads 16 --seqlen 262144 --causal --step p3 \
    --repeat 5
  run 90 "${forward[@]}" --devices "$devices" --heads 16 --seqlen 262144 --step p2 --repeat 5
  (( count <= 2 )) || {  # 65,536 tokens a rank
    run 90 "${forward[@]}" --devices "$devices" --heads 16 --seqlen $((65536 * count)) --causal \
      --step p2,p3,p4 --repeat 5
    run 90 "${forward[@]}" --devices "$devices" --heads 32 --kv-heads 8 \
      --seqlen $((65536 * count)) --causal --step p2,p3,p4 --repeat 5
    run 90 "${backward[@]}" --devices "$devices" --heads 16 --seqlen $((65536 * count)) --causal \
      --repeat 3
  }
}
measure "$all" "$gpus"
for count in 4 2; do
  (( count >= gpus )) || measure "$(list "$count")" "$count"
done
note "done" "$((SECONDS - begin)) s"
exit "$bad"
