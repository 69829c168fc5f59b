#!/usr/bin/env bash
# expect.sh PROGRAM EXIT STREAM REGEX -- ARGUMENT...
# Runs PROGRAM and fails unless it exits with EXIT and STREAM (stdout or stderr) matches the extended
# regular expression. An exit of 2 also means: exactly one line on stderr, and no step was run.
set -uo pipefail

if [[ $# -lt 5 || $5 != -- ]]; then
  echo "usage: expect.sh PROGRAM EXIT STREAM REGEX -- ARGUMENT..." >&2
  exit 2
fi
program=$1 expected=$2 stream=$3 regex=$4
shift 5

folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
"$program" "$@" >"$folder/stdout" 2>"$folder/stderr" </dev/null
status=$?

fail() {
  printf 'FAILED: %s\n  command: %s' "$1" "$program"
  printf ' %q' "${arguments[@]}"
  printf '\n  exit: %d\n--- stdout\n%s\n--- stderr\n%s\n' "$status" "$(<"$folder/stdout")" \
    "$(<"$folder/stderr")"
  exit 1
}
arguments=("$@")

[[ $status -eq $expected ]] || fail "exit status $status, not $expected"
if [[ $expected -eq 2 ]]; then
  [[ $(wc -l <"$folder/stderr") -eq 1 ]] || fail "stderr must hold one line"
  if grep -qE '^[a-z]+[0-9]+[a-z]*_[a-z0-9_]+ +(pass|fail|unchecked|error) ' "$folder/stdout"; then
    fail "a step ran before the mistake was found"
  fi
elif [[ $expected -eq 0 && -s $folder/stderr ]]; then
  fail "something on stderr of a run that went well"
fi
grep -qE -- "$regex" "$folder/$stream" || fail "$stream does not match $regex"
