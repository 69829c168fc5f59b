#!/usr/bin/env bash
# join.sh <objcopy> <ld> <out.o> <pattern> <object or archive> ...: links the objects into one, in
# which only symbols that match the pattern (an extended regular expression) stay global.
#
# Chapters define different kernels and helpers with the same names: `hopper::Tiles` of two chapters
# would become one function in a library. After this every chapter has its own. What must remain one
# object for all chapters is the emulator's state: variables of attn::emulator.
set -euo pipefail
objcopy=$1 ld=$2 out=$3 pattern=$4
shift 4
trap 'rm -f "$out.all" "$out.names"' EXIT
# Without groups a function that is local to a chapter cannot be replaced by another chapter's.
"$ld" -r --force-group-allocation -o "$out.all" --start-group "$@" --end-group
readelf --wide --symbols "$out.all" |
  awk -v pattern="$pattern" '$5 != "LOCAL" && $7 != "UND" &&
    ($8 ~ pattern || (pattern ~ /chapter_table/ && ($4 == "OBJECT" || $4 == "TLS") &&
                      $8 ~ /^_ZN4attn8emulator[0-9]/)) { print $8 }' >"$out.names"
"$objcopy" --keep-global-symbols="$out.names" "$out.all" "$out"
