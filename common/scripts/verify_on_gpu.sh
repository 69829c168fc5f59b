#!/usr/bin/env bash
# Runs everything that CI cannot run without a GPU, and writes the results to docs/reports/<gpu>/.
#
#   common/scripts/verify_on_gpu.sh [--out DIR] [--seconds N] [--changed] [--only PATTERN]
#                                   [PART...] [CHAPTER...]
#   common/scripts/verify_on_gpu.sh times peers 03_flash_v1
#   common/scripts/verify_on_gpu.sh --seconds 900      the stalest first, for at most 15 minutes
#
#   tests      every test tagged [gpu] except the large ones             -> tests.CHAPTER.txt
#   large      those tagged [large]: tensors of more than 2^31 elements  -> large.CHAPTER.txt
#   sanitizer  four tools of compute-sanitizer over every step           -> sanitizer.CHAPTER.txt
#   access     the rules of warp_access.h against the hardware counters  -> warp_access.txt
#   times      every step at the problems of its chapter                 -> CHAPTER.OPERATION.jsonl
#   peers      libraries and the steps, alternating                      -> peers.CHAPTER*.jsonl
#   counters   ncu over one launch of every step                         -> CHAPTER.counters.csv
#   compiler   registers, stack and SASS instructions of every kernel    -> compiler.CHAPTER.txt
#   calls      host time of calls of libattention, from C++ and PyTorch  -> calls.common.txt
#
# Without PART all parts run, without CHAPTER all chapters. Parts that belong to no chapter, the
# tests of common/, access and calls, use the name common. The problems of each chapter are in
# gpu_problems.sh.
#
# Every line records the GPU, the clocks and the code that it was measured with (attn_report
# evidence record, which is the only way to write one). An interrupted run keeps its finished lines.
#
# With --seconds only stale measurements are repeated: first those that never passed, then changed
# kernels, then changed launch code and measurement methods. A part begins only if it fits into the
# remaining time, judging by its last duration. A later call continues where this one stopped.
#
# With --changed, current lines are kept: only stale ones are measured again.
#
# With --only, the part times measures only problems whose names match: --only '^climb_'.
#
# `attn_report evidence check DIR` lists what is still stale. The programs are in build/release
# (common/scripts/start.sh build). Those that are older than their sources are built again, since
# lines get the keys of the sources; a build with other flags than the preset's is refused. Programs
# without a build tree are taken as they are. If the sources are a copy without .git, ATTN_COMMIT
# names their commit.
#
# Exit status: 0, 1 if a part failed, 2 for an error on the command line, 77 if there is no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bin=build/release/bin
report=$bin/attn_report
# shellcheck source=common/scripts/gpu_problems.sh
source common/scripts/gpu_problems.sh
# shellcheck source=common/scripts/ncu_export.sh
source common/scripts/ncu_export.sh

die() {
  printf 'verify_on_gpu.sh: %s\n' "$2" >&2
  exit "$1"
}

all_chapters=()
for path in [0-9][0-9]_*/chapter.cpp; do
  [ ! -f "$path" ] || all_chapters+=("${path%/chapter.cpp}")
done
out=
limit=
changed=
only=
parts=()
chapters=()
while [ $# -gt 0 ]; do
  case $1 in
    --help) sed -n '2,/^set -/{/^set -/d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    --seconds)
      limit=${2:-}
      [[ $limit =~ ^[1-9][0-9]*$ ]] || die 2 "--seconds $limit: must be an integer from 1"
      shift 2 ;;
    --changed) changed=1; shift ;;
    --only) only=${2:-}; [ -n "$only" ] || die 2 "--only: its value is missing"; shift 2 ;;
    --out) out=${2:-}; [ -n "$out" ] || die 2 "--out: its value is missing"; shift 2 ;;
    tests|large|sanitizer|access|times|peers|counters|compiler|calls) parts+=("$1"); shift ;;
    common) chapters+=("$1"); shift ;;
    *)
      chapter=${1%/}
      case " ${all_chapters[*]} " in
        *" $chapter "*) ;;
        *) die 2 "$1: must be --out DIR, --seconds N, --changed, --only PATTERN, a part \
(tests, large, sanitizer, access, times, peers, counters, compiler, calls) or a chapter \
(common, ${all_chapters[*]})" ;;
      esac
      chapters+=("$chapter"); shift ;;
  esac
done
[ ${#parts[@]} -gt 0 ] || parts=(tests large sanitizer access times peers counters compiler calls)
[ ${#chapters[@]} -gt 0 ] || chapters=(common "${all_chapters[@]}")

# The parts that a chapter has.
parts_of() {
  case $1 in
    common) echo "tests access calls" ;;
    *) echo "tests large sanitizer times peers counters compiler" ;;
  esac
}
units=()
for part in "${parts[@]}"; do
  for chapter in "${chapters[@]}"; do
    case " $(parts_of "$chapter") " in *" $part "*) units+=("$part $chapter") ;; esac
  done
done
[ ${#units[@]} -gt 0 ] || die 2 "${chapters[*]}: has no ${parts[*]}"

needed=()
for chapter in "${chapters[@]}"; do [ "$chapter" = common ] || needed+=("$chapter"); done
[ ${#needed[@]} -gt 0 ] || needed=("${all_chapters[0]}")  # any program can report the GPU
for chapter in "${needed[@]}" attn_report; do
  [ -x "$bin/$chapter" ] || die 2 "$bin/$chapter: not built; common/scripts/start.sh build"
done
device=$("$bin/${needed[0]}" --seqlen 8 --require-gpu | sed -n 's/^device: //p') || true
case $device in
  none*|'') echo "${device:-no device}"; exit 77 ;;
esac
cache=build/release/CMakeCache.txt
if [ -f $cache ]; then
  for flag in CMAKE_BUILD_TYPE=Release CMAKE_CUDA_FLAGS= "CMAKE_CUDA_FLAGS_RELEASE=-O3 -DNDEBUG"; do
    grep -qE "^${flag%%=*}:[A-Z]+=${flag#*=}\$" $cache ||
      die 2 "$cache: ${flag%%=*} must be '${flag#*=}', as in the preset"
  done
  targets=("${needed[@]}" attn_report)
  for unit in "${units[@]}"; do
    case $unit in
      'tests common') targets+=(all) ;;
      tests*|large*) targets+=("test_${unit#* }") ;;
      calls*) targets+=(attention bench_api) ;;
    esac
  done
  cmake --build build/release --target "${targets[@]}" >&2 || die 2 "build/release: not built"
fi
# "NVIDIA H200 (sm_90)" -> h200
gpu=$(sed -E 's/ \(sm.*//; s/^NVIDIA //; s/GeForce //; s/[^A-Za-z0-9]+/-/g' <<<"$device" |
  tr '[:upper:]' '[:lower:]')
out=${out:-docs/reports/$gpu}
mkdir -p "$out"
# Each unit with its duration in seconds in the last run.
all=--all
[ -z "$limit$changed" ] || all=
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# shellcheck disable=SC2086  # $all is a word or none
"$report" evidence stale $all "$out" "${units[@]}" >"$work/units" ||
  die 1 "no evidence was read from $out"
mapfile -t units <"$work/units"

# The host allocates and copies inputs and outputs of gigabytes. With huge pages and a heap that
# keeps freed memory, allocating and copying 1.2 GB took 0.3 s instead of 2.2 s (glibc 2.36).
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0
GLIBC_TUNABLES+=:glibc.malloc.trim_threshold=0x1000000000

gpus=${CUDA_VISIBLE_DEVICES:-0}
# Queries nvidia-smi about the GPU in use: sets uuid, driver, power, sm, memory and temperature, to
# "unknown" if there is no nvidia-smi or no value.
ask() {
  local field said
  said=$(nvidia-smi --id="${gpus%%,*}" --format=csv,noheader,nounits \
    --query-gpu=uuid,driver_version,power.limit,clocks.sm,clocks.mem,temperature.gpu 2>/dev/null) ||
    said=
  IFS=, read -r uuid driver power sm memory temperature <<<"${said%%$'\n'*}"
  for field in uuid driver power sm memory temperature; do
    case ${!field} in
      ''|*N/A*|*rror*) declare -g $field=unknown ;;
      *) declare -g $field="${!field# }" ;;
    esac
  done
}
as_json() {  # a number, or a text
  if [[ $1 =~ ^[0-9]+(\.[0-9]+)?$ ]]; then echo "$1"; else echo "\"${1//[\"\\]/}\""; fi
}
commit=$(git rev-parse --short=12 HEAD 2>/dev/null || echo "${ATTN_COMMIT:-unknown}")
# Marks uncommitted changes in the sources: "+".
if git rev-parse HEAD >/dev/null 2>&1; then
  git diff --quiet HEAD -- . ':!docs' 2>/dev/null || commit=$commit+
fi
cuda=$(nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p') || true
before=unknown
begins() {  # what is measured next
  ask
  before=$temperature
}
# Writes time, machine and GPU to $work/measured.
provenance() {
  local key value text=
  ask
  while IFS='=' read -r key value; do text+=${text:+,}"\"$key\":$(as_json "$value")"; done <<END
commit=$commit
date=$(date -u +%Y-%m-%dT%H:%M:%SZ)
gpu=${device% (sm*}
uuid=$uuid
driver=$driver
cuda=${cuda:-unknown}
clocks=SM $sm MHz, memory $memory MHz
power_limit_w=$power
END
  echo "{$text,\"temperature_c\":[$(as_json "$before"),$(as_json "$temperature")]}" \
    >"$work/measured"
}
record() {  # PART CHAPTER NAME FILE [--options OPTIONS]...
  provenance
  "$report" evidence record "$out" "$@" --measured "$work/measured" --unchanged-since "$work/keys"
}
# The measurements to repeat: "all", some steps, or nothing. With - as NAME the answers for the
# "NAME [STEPS]" on stdin.
todo() {  # PART CHAPTER NAME
  if [ -n "$changed" ]; then "$report" evidence todo "$out" "$@"
  elif [ "$3" = - ]; then sed 's/ .*//; s/$/ all/'
  else echo all; fi
}
steps_of() { sed -n 's/.*--step \([^ ]*\).*/\1/p' <<<"$1"; }  # OPTIONS

# ---- the parts: each takes a chapter and returns 1 if something failed -------------------------

# The tests that a tag expression selects; it is a failure if there are none.
tagged() {  # CHAPTER TAGS
  local test name listed count=0 status=0
  for test in "$bin"/test_*; do
    name=$(basename "$test")
    case $1/$name in
      common/test_[0-9][0-9]_*) continue ;;
      common/*|"$1/test_$1") ;;
      *) continue ;;
    esac
    # Stored first, then searched: grep -q would close the pipe while the program still writes.
    listed=$("$test" --list-tests "$2" || true)
    grep -q '^  [^ ]' <<<"$listed" || continue  # has none
    echo "$name $2"
    "$test" "$2" || status=1
    count=$((count + 1))
  done
  [ $count -gt 0 ] || { echo "$1: no test is tagged $2"; return 1; }
  return $status
}
without_root() { sed "s#$PWD/##g"; }  # places in the sources, not on this machine
tests_of() { tagged "$1" "[gpu]~[large]"; }
large_of() { tagged "$1" "[large]"; }

times_of() {
  local name options check again status=0
  problems_of "$1" >"$work/problems"
  [ -s "$work/problems" ] || { echo "$1: gpu_problems.sh has no problem for it"; return 1; }
  while read -r name options; do echo "$1.$name $(steps_of "$options")"; done <"$work/problems" |
    todo times "$1" - >"$work/again" || return 1
  while read -r name options; do
    [[ -z $only || $name =~ $only ]] || continue
    again=$(sed -n "s/^${1}\.$name //p" "$work/again")
    [ -n "$again" ] || { echo "$1.$name: current, not measured again"; continue; }
    case $name in
      memory_*) check="--check off" ;;
      *) check="--time --check sample" ;;  # nothing is timed that is not checked
    esac
    case $options/$again in
      */all) ;;
      *--step*) options=${options/--step $(steps_of "$options")/--step $again} ;;
      *) options="$options --step $again" ;;
    esac
    begins
    # shellcheck disable=SC2086  # options are several words
    "$bin/$1" $options $check --require-gpu --json "$work/result.json" </dev/null || status=1
    record times "$1" "$1.$name" "$work/result.json" --options="$options" || status=1
    rm -f "$work/result.json"
  done <"$work/problems"
  return $status
}

peers_of_chapter() {
  local name options problem status=0 known script
  peers_of "$1" >"$work/peers"
  [ -s "$work/peers" ] || { echo "$1: gpu_problems.sh has no peers for it"; return 1; }
  while read -r name options; do
    peer_problems "$name" | sed "s/^/$options /" >"$work/problems"
    if [ -n "$changed" ]; then
      "$report" evidence todo "$out" peers "$1" "$name" <"$work/problems" >"$work/again" ||
        { status=1; continue; }
      mv "$work/again" "$work/problems"
    fi
    [ -s "$work/problems" ] || { echo "$name: current, not measured again"; continue; }
    case $name in
      *.fa3|*.fp8|*.pages) script=peers_formats.py ;;
      *) script=peers.py ;;
    esac
    case $options in
      *sage*)
        python3 -c 'import torch, sageattention' 2>"$work/errors" ||
          { echo "$name: $(tail -n 1 "$work/errors"): not measured"; status=1; continue; } ;;
    esac
    case $options in
      *fa3*)
        python3 -c 'import torch, flash_attn_interface' 2>"$work/errors" ||
          { echo "$name: $(tail -n 1 "$work/errors"): not measured"; status=1; continue; } ;;
    esac
    known=()
    while read -r problem; do known+=(--options="$problem"); done <"$work/problems"
    sed "s/^$options //" "$work/problems" >"$work/list"
    begins
    # shellcheck disable=SC2086
    python3 "common/scripts/$script" --program "$bin/$1" $options --problems "$work/list" \
      --out "$work/peers.json" </dev/null || status=1
    record peers "$1" "$name" "$work/peers.json" "${known[@]}" || status=1
    rm -f "$work/peers.json"
  done <"$work/peers"
  return $status
}

counters_of() {
  local ncu metrics step options again status=0
  ncu=$(find_ncu) || { echo "NCU=$ncu: no such program"; return 1; }
  [ -n "$ncu" ] || { echo "no ncu"; return 1; }
  metrics=$(ncu_metrics common/scripts/metrics.txt)
  for step in $(all_steps "$1"); do
    again=$(todo counters "$1" "$1.$step") || { status=1; continue; }
    [ -n "$again" ] || { echo "$1.$step: current, not measured again"; continue; }
    options=$(profiled_problem "$1" "$step")
    if [ -z "$options" ]; then
      echo "$1 $step: gpu_problems.sh has no problem for it"
      status=1
      continue
    fi
    begins
    # shellcheck disable=SC2086
    if "$ncu" --clock-control none --profile-from-start off --csv --print-units base \
        --metrics "$metrics" "$bin/$1" $options --profile "$step" --require-gpu \
        >"$work/said" 2>"$work/errors" &&
        ncu_export none "$(<"$work/said")" <"$work/said" >"$work/csv"; then
      record counters "$1" "$1.$step" "$work/csv" --options="$options" || status=1
    else
      echo "$1 $step: no counters"
      tail -n 5 "$work/said" "$work/errors"
      status=1
    fi
  done
  return $status
}

# ---- running them ----------------------------------------------------------------------------

any_failed=0 left=()
for unit in "${units[@]}"; do
  read -r part chapter last <<<"$unit"
  if [ -n "$limit" ] && [ $((SECONDS + last)) -gt "$limit" ]; then
    left+=("$part $chapter")
    continue
  fi
  echo "== $part $chapter"
  failed=0
  begun=$SECONDS
  "$report" evidence keys "$chapter" >"$work/keys"
  begins
  unit_begun=$before
  log=$part.$chapter.txt
  case $part in
    tests) tests_of "$chapter" 2>&1 | without_root | tee "$out/$log" || failed=1 ;;
    large) large_of "$chapter" 2>&1 | without_root | tee "$out/$log" || failed=1 ;;
    sanitizer)
      common/scripts/sanitize.sh "$bin/$chapter" 2>&1 | tee "$out/$log" || failed=1 ;;
    access)
      log=warp_access.txt
      common/scripts/check_warp_access.sh 2>&1 | tee "$out/$log" || failed=1 ;;
    times) log=; times_of "$chapter" || failed=1 ;;
    peers) log=; peers_of_chapter "$chapter" || failed=1 ;;
    counters) log=; counters_of "$chapter" || failed=1 ;;
    calls)
      ATTN_LIBRARY=build/release/lib/libattention.so python3 -B common/scripts/call_overhead.py \
        --bench "$bin/bench_api" 2>&1 | tee "$out/$log" || failed=1 ;;
    compiler) common/scripts/compiler_report.sh "$bin/$chapter" >"$out/$log" || failed=1 ;;
  esac
  verdict=passed
  [ $failed -eq 0 ] || verdict=failed
  before=$unit_begun
  provenance
  took=$((SECONDS - begun))
  [ -z "$only" ] || took=$last  # of the whole part
  "$report" evidence finish "$out" "$part" "$chapter" $verdict $took ${log:+"$log"} \
    --measured "$work/measured" --unchanged-since "$work/keys" || verdict=failed
  [ $verdict = passed ] || any_failed=1
  echo "== $part $chapter: $verdict, $((SECONDS - begun)) s"
done
if [ ${#left[@]} -gt 0 ]; then printf 'not begun for want of time: %s\n' "${left[@]}"; fi
"$report" evidence check "$out" || true
exit $any_failed
