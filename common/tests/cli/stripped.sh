#!/usr/bin/env bash
# stripped.sh PROGRAM: without its symbols the emulator refuses to run, and says why.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
copy=$work/program
cp "$1" "$copy"
strip "$copy"
status=0
said=$("$copy" --device emulated --seqlen 17 2>&1) || status=$?
[[ $status -eq 1 && $said == *"the program has no symbols (strip?)"* ]] ||
  { printf 'status %s, not 1, or another reason:\n%s\n' "$status" "$said"; exit 1; }
