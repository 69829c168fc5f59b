#!/usr/bin/env bash
# without_gpu.sh PROGRAM ...: expect.sh where PROGRAM finds no GPU; skipped (77) where it finds one.
set -uo pipefail
first_line=$("$1" --check off --seqlen 1 --head-dim 8 | head -n 1)
if [[ $first_line != "device: emulated"* ]]; then
  echo "skipped: there is a GPU ($first_line)"
  exit 77
fi
exec bash "$(dirname -- "${BASH_SOURCE[0]}")/expect.sh" "$@"
