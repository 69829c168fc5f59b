#!/usr/bin/env bash
# Runs every step of every chapter in the emulator under many schedules, with races looked for, and
# appends a line a chapter to a log.
#
#   common/scripts/many_schedules.sh [--schedules N] [--jobs N] [--log FILE] [CHAPTER...]
#
# Schedules: 100 by default; tests run the first three. Jobs: processes side by side, by default one
# per core. Three of four schedules look for races in global memory, too. The log is
# docs/reports/schedules.txt. A step with a race, or a wrong result, is printed by its test and makes
# the line say FAIL; the exit status is 1.
# Build the tests first: cmake --build --preset release (build/release, or $ATTN_BUILD).
set -uo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
build=${ATTN_BUILD:-$root/build/release}
schedules=100 jobs=$(nproc) log=$root/docs/reports/schedules.txt chapters=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --schedules) schedules=${2:?--schedules N}; shift 2 ;;
    --jobs) jobs=${2:?--jobs N}; shift 2 ;;
    --log) log=${2:?--log FILE}; shift 2 ;;
    -h | --help) sed -n '2,/^set/ s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) echo "$(basename "$0"): no option $1: --schedules N, --jobs N, --log FILE, chapters" >&2; exit 2 ;;
    *) chapters+=("$1"); shift ;;
  esac
done
for option in schedules jobs; do
  [[ ${!option} =~ ^[1-9][0-9]*$ ]] && continue
  echo "$(basename "$0"): --$option ${!option}: a number from 1 on" >&2
  exit 2
done
if [[ ${#chapters[@]} -eq 0 ]]; then
  for folder in "$root"/0[0-9]_*/; do chapters+=("$(basename "$folder")"); done
fi
commit=${ATTN_COMMIT:-$(git -C "$root" describe --always --dirty 2>/dev/null || echo unknown)}
failed=0
for chapter in "${chapters[@]}"; do
  program=$build/bin/test_$chapter
  if [[ ! -x $program ]]; then
    echo "$(basename "$0"): no $program: build it first, or give a chapter's folder name" >&2
    exit 2
  fi
  steps=$("$build/bin/$chapter" --list 2>/dev/null | grep -cE '^ *[a-z][0-9]+_')
  begin=$(date +%s) result="no race, no wrong result"
  # Three schedules a process: each step runs at least once.
  for ((n = 1; n <= schedules; n += 3)); do
    echo "$n-$((n + 2 < schedules ? n + 2 : schedules))"
  done | xargs -P "$jobs" -I{} bash -c 'ATTN_SCHEDULES=$1 "$2" "[schedules]~[gpu]" 2>&1 ||
    { echo "schedules $1: exit status $?"; exit 1; }' _ {} "$program" \
    >"$build/schedules.$chapter.txt" || {
    result="FAIL" failed=1
    grep -vE '^[-=.]*$' "$build/schedules.$chapter.txt" | head -n 40
  }
  line="$(date +%Y-%m-%d) $commit $chapter: $steps steps, schedules 1 to $schedules,"
  line+=" $(($(date +%s) - begin)) s in $jobs processes: $result"
  echo "$line" | tee -a "$log"
done
exit $failed
