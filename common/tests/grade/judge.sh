#!/usr/bin/env bash
# judge.sh JUDGE_01_NAIVE: programs that lie, in the place of a student's. None of them is right, and the verdict is
# the judge's.
set -euo pipefail
judge=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "$1"; cat "$work/out"; exit 1; }

# liar NAME WHY CODE: the judge must say why, exit with 1 and write "passed": false, now and a moment later.
liar() {
  # Reads its input, so that the sender does not block.
  printf '#!/usr/bin/env bash\ncat <&0 3>&- >/dev/null &\n%s\n' "$3" >"$work/liar"
  chmod +x "$work/liar"
  local status=0
  RESULT=$work/result.json "$judge" ex01a --program "$work/liar" --seed 4711 --limit "${limit:-60}" \
    --result "$work/result.json" >"$work/out" 2>"$work/err" </dev/null || status=$?
  [[ $status -eq 1 ]] || fail "$1: exit status $status"
  grep -q "^FAIL  emulated: .*seqlen_q=1 .*seed=4711" "$work/out" || fail "$1: no problem is named"
  grep -qE "$2" "$work/out" || fail "$1: does not say $2"
  grep -q 'again: /.*/judge_01_naive ex01a --seed 4711 --case 1' "$work/out" || fail "$1: no way to repeat it"
  [[ -z ${later:-} ]] || sleep "$later"
  grep -q '"passed": false' "$work/result.json" || fail "$1: $(cat "$work/result.json")"
}
truth='{"schema": "attn-exercise-2", "exercise": "ex01a", "seed": 4711, "passed": true}'

liar "ends at once" "ended with status 0 before it had given an answer" 'exit 0'
liar "says that it has passed" "ended with status 0" "echo 'all 27 cases pass'; echo '$truth'; echo '$truth' >&2; exit 0"
liar "writes the verdict itself" "ended with status 0" "echo '$truth' >\"\$RESULT\"; exit 0"
later=2 liar "leaves somebody who writes the verdict later" "gave -*[0-9]+ bytes|no answer|cannot be read|ended with" \
  "(sleep 1; echo '$truth' >\"\$RESULT\") & echo '$truth' >&3; sleep 60"
liar "says that it has passed where numbers are expected" "an answer that cannot be read" "echo '$truth' >&3; sleep 60"
liar "sends zeros without end" "gave 0 bytes where the outputs have 528" 'cat /dev/zero >&3'
# Of the first problem, o has 256 numbers of 2 bytes and lse 4 of 4: no message, no time, 528 bytes, all 0.
liar "sends as many numbers as there are" "expected .*, got 0 " \
  'head -c 16 /dev/zero >&3; printf "\x10\x02\0\0\0\0\0\0" >&3; head -c 528 /dev/zero >&3; sleep 1'
liar "says too little" "ended with status 0" 'head -c 16 /dev/zero >&3; printf "\x10\x02\0\0\0\0\0\0" >&3; head -c 500 /dev/zero >&3'
liar "sends too much" "gave [0-9]+ bytes where the outputs have 528" \
  'head -c 16 /dev/zero >&3; printf "\0\0\0\0\0\1\0\0" >&3; cat /dev/zero >&3'
liar "crashes" "crashed: Segmentation fault" 'kill -SEGV $$'
# The problem is tried again with one thing changed, by a process that is started again each time.
grep -q 'varied: stops likewise with one head; stops likewise with whole tiles (128, 128)$' "$work/out" ||
  fail "does not say that it crashes with one head, too"
limit=1 liar "never answers" "did not end in 1 s" 'sleep 60'
grep -q 'varied: not tried with one head (no time is left); ' "$work/out" || fail "does not say that no time is left"

echo "no lie is believed"
