#!/usr/bin/env bash
# symbols.sh LIBRARY STATIC_LIBRARY PART.o ...: chapters share nothing in the library but what is
# meant to be shared, and the library exports nothing but attn_*.
set -euo pipefail
shared=$1 static=$2
shift 2
fail() { echo "$1"; exit 1; }

exported=$(nm --dynamic --defined-only "$shared" | awk '{ print $3 }')
grep -qx attn_forward <<<"$exported" || fail "$shared does not export attn_forward"
! grep -v '^attn_[a-z]' <<<"$exported" || fail "$shared exports these, which are not attn_*"
! nm --extern-only --defined-only "$static" | awk 'NF == 3 { print $3 }' | grep -v '^attn_[a-z]' ||
  fail "$static has these global symbols, which are not attn_*"

# A symbol that two parts define weakly would be one function or variable in the library: that of
# the part that is linked first, whatever the others say. Only the emulator's variables are one.
for part; do
  readelf --wide --symbols "$part" | awk -v part="${part##*/}" '
    $5 ~ /^(GLOBAL|WEAK|UNIQUE)$/ && $7 != "UND" && $8 !~ /^chapter_table_/ &&
    !(($4 == "OBJECT" || $4 == "TLS") && $8 ~ /^_ZN4attn8emulator[0-9]/) {
      print part, $4, $8
      bad = 1
    }
    $8 ~ /^chapter_table_/ && $7 != "UND" { found = 1 }
    END { if (!found) print part, "has no table"; exit bad || !found }' ||
    fail "shared by accident"
done
echo "$# chapters"
