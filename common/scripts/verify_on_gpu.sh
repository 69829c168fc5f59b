#!/usr/bin/env bash
# Runs on a GPU machine what CI cannot, and writes what it saw to docs/reports/<gpu>/.
#
#   common/scripts/verify_on_gpu.sh [--out DIR] [--seconds N] [--changed] [PART...] [CHAPTER...]
#   common/scripts/verify_on_gpu.sh times peers 03_flash_v1
#   common/scripts/verify_on_gpu.sh --seconds 900      what is stalest first, for at most 15 minutes
#
#   tests      every test tagged [gpu] but for the large ones            -> tests.CHAPTER.txt
#   large      those tagged [large]: tensors of more than 2^31 elements  -> large.CHAPTER.txt
#   sanitizer  four tools of compute-sanitizer over every step           -> sanitizer.CHAPTER.txt
#   access     the rules of warp_access.h against the hardware counters  -> warp_access.txt
#   times      every step at the problems of its chapter                 -> CHAPTER.PROBLEM.json
#   peers      PyTorch's backends beside the steps, in turns             -> peers.CHAPTER*.json
#   counters   ncu over one launch of every step                         -> CHAPTER.STEP.ncu.csv
#   compiler   registers, stack and machine instructions of every kernel   -> compiler.CHAPTER.txt
#   manifest   nothing: only says what the folder is true of; needs no GPU, but --out
#
# Without PART all of them, without CHAPTER all chapters. What belongs to no chapter, the tests of common/ and
# access, goes by the name common. The problems of each chapter are in gpu_problems.sh.
#
# With --seconds only what is stale is measured: first what never passed, then what was measured on other kernels, then
# what was measured by an older method of timing. A part begins only if it fits, going by how long it took the last
# time. Called again, it goes on where it stopped.
#
# With --changed files stay that are of the kernels as they are: only what has changed since is
# measured.
#
# manifest.txt keeps the checksum of each file and the keys of the kernels in it, parts.txt for each part and chapter
# whether it passed and how many seconds it took (attn_report evidence). The programs are expected in build/release:
# build them first with common/scripts/start.sh.
#
# Exit status: 0, 1 if a part failed, 2 for a mistake on the command line, 77 where there is no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bin=build/release/bin
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
parts=()
chapters=()
while [ $# -gt 0 ]; do
  case $1 in
    --help) sed -n '2,/^set -/{/^set -/d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    --seconds)
      limit=${2:-}
      [[ $limit =~ ^[1-9][0-9]*$ ]] || die 2 "--seconds $limit: must be a whole number from 1"
      shift 2 ;;
    --changed) changed=1; shift ;;
    --out) out=${2:-}; [ -n "$out" ] || die 2 "--out: its value is missing"; shift 2 ;;
    tests|large|sanitizer|access|times|peers|counters|compiler|manifest) parts+=("$1"); shift ;;
    common) chapters+=("$1"); shift ;;
    *)
      chapter=${1%/}
      case " ${all_chapters[*]} " in
        *" $chapter "*) ;;
        *) die 2 "$1: must be --out DIR, --seconds N, --changed, a part (tests, large, sanitizer, access, times, peers, counters, compiler, manifest) or a \
chapter (common, ${all_chapters[*]})" ;;
      esac
      chapters+=("$chapter"); shift ;;
  esac
done
[ ${#parts[@]} -gt 0 ] || parts=(tests large sanitizer access times peers counters compiler)
[ ${#chapters[@]} -gt 0 ] || chapters=(common "${all_chapters[@]}")

# The parts that a chapter has.
parts_of() {
  case $1 in
    common) echo "tests access" ;;
    *) echo "tests large sanitizer times peers counters compiler" ;;
  esac
}
units=()
for part in "${parts[@]}"; do
  for chapter in "${chapters[@]}"; do
    case " $(parts_of "$chapter") " in *" $part "*) units+=("$part $chapter") ;; esac
  done
done
if [ ${#units[@]} -eq 0 ] && [ "${parts[*]}" != manifest ]; then
  die 2 "${chapters[*]}: has no ${parts[*]}"
fi

if [ ${#units[@]} -gt 0 ]; then
  needed=()
  for chapter in "${chapters[@]}"; do [ "$chapter" = common ] || needed+=("$chapter"); done
  [ ${#needed[@]} -gt 0 ] || needed=("${all_chapters[0]}")  # it says which GPU there is
  for chapter in "${needed[@]}" attn_report; do
    [ -x "$bin/$chapter" ] || die 2 "$bin/$chapter: not built; common/scripts/start.sh build"
  done
  device=$("$bin/${needed[0]}" --seqlen 8 --require-gpu | sed -n 's/^device: //p') || true
  case $device in
    none*|'') echo "${device:-no device}"; exit 77 ;;
  esac
  # "NVIDIA H200 (sm_90)" -> h200
  gpu=$(sed -E 's/ \(sm.*//; s/^NVIDIA //; s/GeForce //; s/[^A-Za-z0-9]+/-/g' <<<"$device" | tr '[:upper:]' '[:lower:]')
  out=${out:-docs/reports/$gpu}
  mkdir -p "$out"
fi
[ -d "$out" ] || die 2 "manifest: --out DIR is needed, the folder of the reports"
if [ -n "$limit$changed" ]; then
  mapfile -t units < <("$bin/attn_report" evidence stale "$out" "${units[@]}")
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Whether a file can stay as it is: it counts as written by this run then.
stays() {  # PART CHAPTER FILE
  [ -n "$changed" ] || return 1
  "$bin/attn_report" evidence current "$out" "$1" "$2" | grep -qxF -- "$3" || return 1
  touch "$out/$3"
  echo "$3: as it was"
}
# The files that a part writes for a chapter, those that are there.
files_of() {  # PART CHAPTER
  (
    cd "$out"
    shopt -s nullglob
    case $1 in
      times) files=("$2".*.json) ;;
      peers) files=("peers.$2.json" "peers.$2".*.json) ;;
      counters) files=("$2".*.ncu.csv) ;;
      access) files=(warp_access.txt) ;;
      *) files=("$1.$2.txt") ;;
    esac
    for file in "${files[@]}"; do [ ! -f "$file" ] || echo "$file"; done
  )
}
record() {  # PART CHAPTER VERDICT SECONDS
  local file fresh=()
  while read -r file; do
    # What a part that passed did not write is of a problem that it has no more.
    if [ "$out/$file" -nt "$work/begun" ]; then fresh+=("$file"); elif [ "$3" = passed ]; then rm "$out/$file"; fi
  done < <(files_of "$1" "$2")
  "$bin/attn_report" evidence record "$out" "$@" "${fresh[@]}"
}
last_seconds() {  # PART CHAPTER; a minute where it never ran
  sed -n "s/^$1 $2  .*  \([0-9]*\) s\$/\1/p" "$out/parts.txt" 2>/dev/null | grep . || echo 60
}

# ---- the parts: each takes a chapter and returns 1 if something failed -------------------------

# The tests that a tag expression selects; where there is none, that is a failure.
tagged() {  # CHAPTER TAGS
  local test name listed count=0 status=0
  for test in "$bin"/test_*; do
    name=$(basename "$test")
    case $1/$name in
      common/test_[0-9][0-9]_*) continue ;;
      common/*|"$1/test_$1") ;;
      *) continue ;;
    esac
    # Listed first, looked at then: grep -q would end the pipe under a program that still writes.
    listed=$("$test" --list-tests "$2" || true)
    grep -q '^  [^ ]' <<<"$listed" || continue  # has none
    echo "$name $2"
    "$test" "$2" || status=1
    count=$((count + 1))
  done
  [ $count -gt 0 ] || { echo "$1: no test is tagged $2"; return 1; }
  return $status
}
tests_of() { tagged "$1" "[gpu]~[large]"; }
large_of() { tagged "$1" "[large]"; }

times_of() {
  local name options status=0
  problems_of "$1" >"$work/problems"
  [ -s "$work/problems" ] || { echo "$1: gpu_problems.sh has no problem for it"; return 1; }
  while read -r name options; do
    ! stays times "$1" "$1.$name.json" || continue
    case $name in
      memory_*) options="$options --check off" ;;
      *) options="$options --time --check sample" ;;  # nothing is timed that is not checked
    esac
    # shellcheck disable=SC2086  # options are several words
    "$bin/$1" $options --require-gpu --json "$out/$1.$name.json" </dev/null || status=1
  done <"$work/problems"
  return $status
}

peers_of_chapter() {
  local name options status=0
  peers_of "$1" >"$work/peers"
  [ -s "$work/peers" ] || { echo "$1: gpu_problems.sh has no peers for it"; return 1; }
  while read -r name options; do
    ! stays peers "$1" "$name.json" || continue
    peer_problems "$name" >"$work/problems"
    # shellcheck disable=SC2086
    python3 common/scripts/peers.py --program "$bin/$1" $options --problems "$work/problems" \
      --out "$out/$name.json" </dev/null || status=1
  done <"$work/peers"
  return $status
}

counters_of() {
  local ncu metrics step options csv status=0
  ncu=$(find_ncu) || { echo "NCU=$ncu: no such program"; return 1; }
  [ -n "$ncu" ] || { echo "no ncu"; return 1; }
  metrics=$(ncu_metrics common/scripts/metrics.txt)
  for step in $(all_steps "$1"); do
    csv=$out/$1.$step.ncu.csv
    ! stays counters "$1" "$1.$step.ncu.csv" || continue
    options=$(profiled_problem "$1" "$step")
    [ -n "$options" ] || { echo "$1 $step: gpu_problems.sh has no problem for it"; status=1; continue; }
    # shellcheck disable=SC2086
    if "$ncu" --clock-control none --profile-from-start off --csv --print-units base --metrics "$metrics" \
        "$bin/$1" $options --profile "$step" --require-gpu >"$work/said" 2>"$work/errors" &&
        ncu_export none "$(<"$work/said")" <"$work/said" >"$work/csv"; then
      mv "$work/csv" "$csv"
      echo "$csv"
    else
      rm -f "$csv"  # an older one is not of these sources
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
  read -r part chapter <<<"$unit"
  if [ -n "$limit" ] && [ $((SECONDS + $(last_seconds "$part" "$chapter"))) -gt "$limit" ]; then
    left+=("$unit")
    continue
  fi
  echo "== $unit"
  failed=0
  begun=$SECONDS
  touch "$work/begun"
  sleep 0.02  # so that what is written is newer
  keys=$("$bin/attn_report" evidence keys)
  case $part in
    tests) tests_of "$chapter" 2>&1 | tee "$out/tests.$chapter.txt" || failed=1 ;;
    large) large_of "$chapter" 2>&1 | tee "$out/large.$chapter.txt" || failed=1 ;;
    sanitizer) common/scripts/sanitize.sh "$bin/$chapter" 2>&1 | tee "$out/sanitizer.$chapter.txt" || failed=1 ;;
    access) common/scripts/check_warp_access.sh 2>&1 | tee "$out/warp_access.txt" || failed=1 ;;
    times) times_of "$chapter" || failed=1 ;;
    peers) peers_of_chapter "$chapter" || failed=1 ;;
    counters) counters_of "$chapter" || failed=1 ;;
    compiler) common/scripts/compiler_report.sh "$bin/$chapter" >"$out/compiler.$chapter.txt" || failed=1 ;;
  esac
  verdict=passed
  [ $failed -eq 0 ] || verdict=failed
  if [ "$("$bin/attn_report" evidence keys)" != "$keys" ]; then
    echo "a kernel changed meanwhile"
    verdict=failed
  fi
  [ $verdict = passed ] || any_failed=1
  record "$part" "$chapter" $verdict $((SECONDS - begun))
  echo "== $unit: $verdict, $((SECONDS - begun)) s"
done
if [ ${#left[@]} -gt 0 ]; then printf 'not begun for want of time: %s\n' "${left[@]}"; fi
"$bin/attn_report" evidence check "$out" || true
exit $any_failed
