#!/usr/bin/env bash
# unwritable.sh PROGRAM: a place that cannot be written is found before the work, not after it.
set -euo pipefail
program=$1
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
: >"$work/file"
# expect.sh fails an exit of 2 after a step line.
refused() { bash "$here/expect.sh" "$program" 2 stderr "$1" -- --seqlen 16 "${@:2}"; }
refused '--json .*/nowhere/x\.json: cannot be written' --json "$work/nowhere/x.json"
refused '--json .*: cannot be written' --json "$work"
refused '--json .*: cannot be written' --json "$work/file/x.json"
refused '--save .*/file: ' --save "$work/file"
refused '--save .*/file/x: ' --save "$work/file/x"
if [[ $(id -u) -ne 0 ]]; then  # root may write regardless of permissions
  mkdir "$work/locked" && chmod a-w "$work/locked"
  refused '--json .*: cannot be written' --json "$work/locked/x.json"
  refused '--save .*: ' --save "$work/locked/x"
fi
echo "everything as expected"
