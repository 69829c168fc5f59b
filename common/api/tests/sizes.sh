#!/usr/bin/env bash
# sizes.sh ARCHITECTURES LIBRARY...: a stripped library has at most 40 MiB per GPU architecture, and
# exports attn_* alone.
set -euo pipefail
most=$((40 * ($1 > 1 ? $1 : 1)))
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bad=0
for library; do
  strip -o "$work/stripped" "$library"
  bytes=$(stat -c %s "$work/stripped")
  echo "$((bytes >> 10)) KiB $(basename "$library")"
  [[ $bytes -le $((most << 20)) ]] || { echo "more than $most MiB"; bad=1; }
  exported=$(nm --dynamic --defined-only "$library" | awk '{ print $3 }')
  grep -qx attn_run <<<"$exported" || { echo "does not export attn_run"; bad=1; }
  ! grep -v '^attn_[a-z]' <<<"$exported" || { echo "exports these"; bad=1; }
done
exit $bad
