#!/usr/bin/env bash
# environment.sh PROGRAM: a German locale (decimal commas), another time zone and another folder change
# nothing that the program writes.
set -euo pipefail
program=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
options=(--device emulated --seqlen 33 --head-dim 24 --causal --scale 0.375 --gpu a100)

run() { "$program" "${options[@]}" --json "$work/$1.json" --save "$work/$1" >"$work/$1.txt"; }
LC_ALL=C run plain
(
  cd "$work"
  export LC_ALL=de_DE.UTF-8 LANG=de_DE.UTF-8 LANGUAGE=de TZ=Asia/Kathmandu COLUMNS=20 TERM=dumb
  run other
)
cmp "$work/plain.json" "$work/other.json"
diff -r "$work/plain" "$work/other"
# Free memory may differ.
diff <(grep -v '^memory:' "$work/plain.txt") <(grep -v '^memory:' "$work/other.txt")
grep -q '"softmax_scale": 0.375' "$work/plain.json"
echo "the same in both"
