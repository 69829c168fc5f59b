#!/usr/bin/env bash
# notebook.sh NOTEBOOK [PYTHON]: executes a notebook with the library $ATTN_LIBRARY; a cell that
# raises is a failure. Exits with 77, which ctest reports as skipped, and names the modules that no
# python3 has. Kernels are those of the same python3: those of the user are not looked at.
set -uo pipefail
notebook=$1
modules='numpy matplotlib nbconvert ipykernel'
missing_of() {  # PYTHON
  "$1" -c "
import importlib.util as u
print(*(name for name in '$modules'.split() if u.find_spec(name) is None))" 2>/dev/null ||
    echo python3
}

least=python3
for python in ${2:+"$2"} python3 /usr/bin/python3; do
  missing=$(missing_of "$python")
  [[ -n $missing ]] || break
  [[ $least != python3 && $(wc -w <<<"$least") -le $(wc -w <<<"$missing") ]] || least=$missing
done
if [[ -n $missing ]]; then
  echo "skipped: no python3 has all modules; missing: $least"
  echo "(Debian, Ubuntu: apt install python3-nbconvert python3-ipykernel python3-matplotlib)"
  exit 77
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export JUPYTER_DATA_DIR=$work JUPYTER_CONFIG_DIR=$work JUPYTER_NO_CONFIG=1
export PYDEVD_DISABLE_FILE_VALIDATION=1 PYTHONDONTWRITEBYTECODE=1
start=$SECONDS
if ! "$python" -m nbconvert --to notebook --execute --stdout "$notebook" \
    >"$work/executed.ipynb" 2>"$work/log"; then
  sed 's/\x1b\[[0-9;]*m//g' "$work/log" | tail -n 40
  echo "FAILED: ${notebook##*/} with $python"
  exit 1
fi
echo "${notebook##*/}: executed with $python in $((SECONDS - start)) s"
