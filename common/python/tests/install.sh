#!/usr/bin/env bash
# install.sh PYTHON PACKAGE LIBRARY: the package installs with pip into a virtual environment and
# calls a step. Skipped (77) where venv, pip or setuptools are missing.
set -euo pipefail
unset PYTHONPATH
python=$1 package=$2
export ATTN_LIBRARY=$3
for module in venv pip setuptools wheel; do
  "$python" -c "import $module" 2>/dev/null && continue
  echo "skipped: no Python module $module"
  exit 77
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$package" "$work/package"  # pip builds in place
"$python" -m venv --system-site-packages "$work/venv"
"$work/venv/bin/pip" install -q --no-index --no-build-isolation "$work/package"
cd "$work"
"$work/venv/bin/python" - "$work" <<'PY'
import sys
import numpy as np
import attn
assert attn.__file__.startswith(sys.argv[1]), attn.__file__
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 33, 64)).astype(np.float32)
assert np.abs(attn.forward(q, k, v) - attn.reference(q, k, v)).max() < 1e-5
print(f"{len(attn.steps())} steps")
PY
# Without a library the message says what to do, in one line.
export ATTN_LIBRARY=/nonexistent
if "$work/venv/bin/python" -c 'import attn; attn.steps()' 2>"$work/error"; then
  echo "FAILED: no error without the library"; exit 1
fi
grep -q "libattention.so is not at /nonexistent: build the target attention, or set ATTN_LIBRARY" \
  "$work/error" || { cat "$work/error"; exit 1; }
