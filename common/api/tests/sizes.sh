#!/usr/bin/env bash
# sizes.sh LIBRARY...: a stripped library has at most 40 MiB, and exports attn_* alone.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bad=0
for library; do
  strip -o "$work/stripped" "$library"
  bytes=$(stat -c %s "$work/stripped")
  echo "$((bytes >> 10)) KiB $(basename "$library")"
  [[ $bytes -le $((40 << 20)) ]] || { echo "more than 40 MiB"; bad=1; }
  exported=$(nm --dynamic --defined-only "$library" | awk '{ print $3 }')
  grep -qx attn_run <<<"$exported" || { echo "does not export attn_run"; bad=1; }
  ! grep -v '^attn_[a-z]' <<<"$exported" || { echo "exports these"; bad=1; }
done
exit $bad
