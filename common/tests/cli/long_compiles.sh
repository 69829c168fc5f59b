#!/usr/bin/env bash
# long_compiles.sh SCRIPT: what the script of that name says of a build log.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
{
  echo '# ninja log v5'
  printf '%s\t%s\t1\t%s\thash\n' 0 61000 a/CMakeFiles/x.dir/b.cu.o 0 99000 bin/a_program \
    0 70000 a/CMakeFiles/x.dir/c.cpp.o 0 90000 once_long.cpp.o 100 2100 once_long.cpp.o 0 60000 a_minute.cpp.o
} >"$work/.ninja_log"
expected='    70 s  a/c.cpp
    61 s  a/b.cu
4 compilations, 193 s in all'
said=$("$1" "$work")
[[ $said == "$expected" ]] || { printf 'said:\n%s\nmust be:\n%s\n' "$said" "$expected"; exit 1; }
if "$1" "$work/none" 2>"$work/error"; then echo 'a folder without a log: exit 0'; exit 1; fi
grep -q 'none/.ninja_log: no such file' "$work/error"
