#!/usr/bin/env bash
# many_schedules.sh ROOT: what many_schedules.sh says of stand-ins for a chapter's programs.
set -euo pipefail
script=$1/common/scripts/many_schedules.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/bin"
printf '#!/bin/sh\necho " v1_first  an idea"\n' >"$work/bin/01_naive"
cat >"$work/bin/test_01_naive" <<'PROGRAM'
#!/bin/sh
# Passes but for the schedules in $BAD; notes which it has run.
[ "$1 $2" = '-w NoTests' ] || exit 2
echo "$ATTN_SCHEDULES" >>"$NOTED"
echo "All tests passed: $ATTN_SCHEDULES"
[ "$ATTN_SCHEDULES" != "$BAD" ] || { echo 'race: byte 5'; exit 1; }
PROGRAM
chmod +x "$work"/bin/*
export ATTN_BUILD=$work NOTED=$work/noted BAD=''
log=$work/log
fail() { echo "$1"; cat "$work/said"; exit 1; }

# run STATUS OPTION...
run() {
  local status=0
  : >"$NOTED"
  "$script" --log "$log" "${@:2}" 01_naive >"$work/said" 2>&1 || status=$?
  [[ $status -eq $1 ]] || fail "status $status, not $1: ${*:2}"
}
run 0 --jobs 4
[[ $(sort -n "$NOTED" | tr '\n' ' ') == '1-3 4-6 7-9 '*'97-99 100-100 ' ]] ||
  fail "other schedules: $(cat "$NOTED")"
line=' 01_naive: 1 steps, schedules 1 to 100, [0-9]+ s in 4 processes: no race, no wrong result$'
grep -qE "$line" "$log" || fail "another line: $(cat "$log")"
BAD=91-93 run 1 --jobs 2
grep -q '^schedules 91-93: exit status 1$' "$work/said" && grep -q '^race: byte 5$' "$work/said" ||
  fail "a late failure is not shown"
! grep -q 'All tests passed: 1-3' "$work/said" || fail "what passes is printed, too"
grep -q ': FAIL$' "$log" || fail "no FAIL in the log"
lines=$(wc -l <"$log")
run 2 --jobs 0
grep -q -- '--jobs 0: a number from 1 on' "$work/said" || fail "--jobs 0"
run 2 --schedules 99999999999999999999
status=0
"$script" --jobs >"$work/said" 2>&1 || status=$?
[[ $status -eq 2 ]] && grep -q -- '--jobs: a value is missing' "$work/said" ||
  fail "no value: $status"
log=$work/nowhere/log run 2
grep -q 'nowhere/log: cannot be written' "$work/said" || fail "an unwritable log"
[[ $(wc -l <"$log") -eq $lines ]] || fail "lines of runs that did not begin"
echo "everything as expected"
