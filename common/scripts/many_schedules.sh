#!/usr/bin/env bash
# Runs every step of every chapter in the emulator under many schedules, with races looked for, and
# appends a line a chapter to a log.
#
#   common/scripts/many_schedules.sh [--schedules N] [--jobs N] [--log FILE] [CHAPTER...]
#
# Schedules: 100 by default; tests run the first three. Jobs: processes side by side, by default one
# per core. Three of four schedules look for races in global memory, too. The log is
# docs/reports/schedules.txt. A step with a race, or a wrong result, is printed by its test and
# makes the line say FAIL; the exit status is 1. It is 2 for an error on the command line.
# Build the tests first: cmake --build --preset release (build/release, or $ATTN_BUILD).
set -uo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
build=${ATTN_BUILD:-$root/build/release}
die() { echo "$(basename "$0"): $1" >&2; exit 2; }
schedules=100 jobs=$(nproc) log=$root/docs/reports/schedules.txt chapters=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --schedules | --jobs | --log)
      [[ $# -ge 2 ]] || die "$1: a value is missing"
      declare "${1#--}=$2"
      shift 2 ;;
    -h | --help) sed -n '2,/^set/ s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) die "no option $1: --schedules N, --jobs N, --log FILE, chapters" ;;
    *) chapters+=("$1"); shift ;;
  esac
done
for option in schedules jobs; do
  [[ ${!option} =~ ^[1-9][0-9]{0,8}$ ]] || die "--$option ${!option}: a number from 1 on"
done
if [[ ${#chapters[@]} -eq 0 ]]; then
  for folder in "$root"/0[0-9]_*/; do chapters+=("$(basename "$folder")"); done
fi
for chapter in "${chapters[@]}"; do
  [[ -x $build/bin/test_$chapter ]] ||
    die "no $build/bin/test_$chapter: build it first, or give a chapter's folder name"
done
: >>"$log" || die "$log: cannot be written"
commit=${ATTN_COMMIT:-$(git -C "$root" describe --always --dirty 2>/dev/null || echo unknown)}
child=
trap 'kill $child 2>/dev/null; exit 143' TERM HUP
failed=0
for chapter in "${chapters[@]}"; do
  steps=$("$build/bin/$chapter" --list 2>/dev/null | grep -cE '^ *[a-z][0-9]+_')
  begin=$(date +%s) result="no race, no wrong result"
  # Three schedules a process: each step runs at least once.
  for ((n = 1; n <= schedules; n += 3)); do
    echo "$n-$((n + 2 < schedules ? n + 2 : schedules))"
  done | xargs -P "$jobs" -I{} bash -c '
    said=$(ATTN_SCHEDULES=$1 "$2" -w NoTests "[schedules]~[gpu]" 2>&1) && exit
    printf "schedules %s: exit status %s\n%s\n" "$1" $? "$said"
    exit 1' _ {} "$build/bin/test_$chapter" >"$build/schedules.$chapter.txt" &
  child=$!
  wait $child
  case $? in
    0) ;;
    123)  # a process has failed
      result="FAIL" failed=1
      grep -vE '^[-=.]*$' "$build/schedules.$chapter.txt" | head -n 40
      echo "all of it: $build/schedules.$chapter.txt" ;;
    *) echo "$chapter: interrupted" >&2; exit 1 ;;
  esac
  line="$(date +%Y-%m-%d) $commit $chapter: $steps steps, schedules 1 to $schedules,"
  line+=" $(($(date +%s) - begin)) s in $jobs processes: $result"
  echo "$line" | tee -a "$log"
done
exit $failed
