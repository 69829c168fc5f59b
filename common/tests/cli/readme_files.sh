#!/usr/bin/env bash
# readme_files.sh COMMON: every file of COMMON's folders has one line in the tables of its
# README.md, and every file named there exists. A source is named by its header; tests/ is one line.
set -uo pipefail
cd "$1" || exit 1
bad=0

# The names in the first cell of a row, a line each: "files/npy.h".
named=$(sed -n 's/^| \(`[^|]*\) |.*/\1/p' README.md | grep -o '`[^`]*`' | tr -d '`')
folders=(api attn check cmake device emulator exercise files kernels/* ptx report run scripts)
for file in $(printf "%s/* " "${folders[@]}"); do
  [[ -f $file ]] || continue
  case $file in
    *.pyc|api/CMakeLists.txt|report/CMakeLists.txt|report/test_*) continue ;;
    *.cpp|*.cu) [[ ! -f ${file%.*}.h ]] || continue ;;
  esac
  count=$(grep -cxF -- "$file" <<<"$named")
  [[ $count -eq 1 ]] || { echo "$file: named $count times in common/README.md"; bad=1; }
done
while read -r name; do
  [[ -e $name ]] || { echo "common/README.md names $name, which is not there"; bad=1; }
done <<<"$named"
exit $bad
