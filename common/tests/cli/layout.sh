#!/usr/bin/env bash
# layout.sh ROOT: each file lies in its room, and includes run one way: tests -> host -> kernels ->
# common, steps -> kernels -> common; never to another chapter.
set -euo pipefail
cd "$1"
bad=0
wrong() { echo "$1"; bad=1; }

if [[ -d .git || -f .git ]]; then
  while read -r file; do
    [[ $file =~ ^(CMakeLists\.txt|CMakePresets\.json|README\.md|LICENSE|\..*|0[1-8]_[a-z0-9_]+/.*|common/.*|docs/.*)$ ]] ||
      wrong "$file: has no place at the top"
  done < <(git ls-files)
fi

chapters=(0[1-8]_*)
for chapter in "${chapters[@]}"; do
  for file in "$chapter"/*; do
    name=${file##*/}
    if [[ -d $file ]]; then
      [[ $name =~ ^(kernels|host|tests|exercises)$ ]] || wrong "$file/: is no room of a chapter"
    else
      [[ $name =~ ^(README|[A-Z0-9]+)\.md$|^CMakeLists\.txt$|^chapter\.cpp$|^[vbfqsdac][0-9]+_[a-z0-9_]+\.cu$ ]] ||
        wrong "$file: beside the steps lie pages, chapter.cpp and CMakeLists.txt alone"
    fi
  done
  [[ $(wc -l <"$chapter/CMakeLists.txt") -le 40 ]] || wrong "$chapter/CMakeLists.txt: more than 40 lines"
done

# includes FROM-REGEX TO-REGEX: of files of ours that match, no #include leads anywhere else.
includes() {
  local file include
  while IFS=: read -r file include; do
    include=${include#*\"}
    include=${include%\"*}
    [[ $include =~ ^($2) ]] || wrong "$file: includes $include, may include $2"
  done < <(grep -HE '^ *#include "' "${files[@]}")
}
shopt -s nullglob
files=([0-9]*/[a-z]*.cu)
includes steps 'kernels/|attn/|device/|emulator/|ptx/|exercises/student/|hidden/'
files=([0-9]*/kernels/*)
includes kernels 'kernels/|attn/|device/|emulator/|ptx/|exercises/student/|hidden/'
files=(common/kernels/*/*)
includes shared 'kernels/(decode|hopper)/|attn/|device/|emulator/|ptx/|hidden/'
files=([0-9]*/host/*.cpp [0-9]*/host/*.h [0-9]*/chapter.cpp)
includes host 'host/|kernels/|attn/|check/|device/|emulator/|files/|ptx/|run/|hidden/'
for chapter in "${chapters[@]}"; do
  files=("$chapter"/tests/*.cpp "$chapter"/tests/*.h)
  includes tests "$chapter/|host/|kernels/|tests/|attn/|check/|device/|emulator/|exercise/|files/|ptx/|report/|run/|hidden/"
done
files=(common/{attn,check,device,emulator,exercise,files,ptx,report,run}/*.{h,cpp,cu})
includes common 'attn/|check/|device/|emulator/|exercise/|files/|ptx/|report/|run/|tests/'
exit $bad
