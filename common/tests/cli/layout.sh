#!/usr/bin/env bash
# layout.sh ROOT: each file lies in its room, no step is too long, and includes run one way: tests
# -> host -> kernels -> common, steps -> kernels -> common; never to another chapter.
set -euo pipefail
cd "$1"
bad=0
wrong() { echo "$1"; bad=1; }

tops='(CMakeLists\.txt|CMakePresets\.json|README\.md|LICENSE)'
if [[ -d .git || -f .git ]]; then
  while read -r file; do
    [[ $file =~ ^($tops$|[.]|0[1-8]_[a-z0-9_]+/|common/|docs/) ]] ||
      wrong "$file: has no place at the top"
  done < <(git ls-files)
fi

chapters=(0[1-8]_*)
step='[vbfqsdacp][0-9]+_[a-z0-9_]+\.cu'
for chapter in "${chapters[@]}"; do
  for file in "$chapter"/*; do
    name=${file##*/}
    if [[ -d $file ]]; then
      [[ $name =~ ^(kernels|host|tests|exercises)$ ]] || wrong "$file/: is no room of a chapter"
    else
      [[ $name =~ ^([A-Z0-9_]+\.md|CMakeLists\.txt|chapter\.cpp|$step)$ ]] ||
        wrong "$file: beside the steps lie pages, chapter.cpp and CMakeLists.txt alone"
    fi
  done
  [[ $(wc -l <"$chapter/CMakeLists.txt") -le 50 ]] ||
    wrong "$chapter/CMakeLists.txt: more than 50 lines"
done

# Lines of code, without comments and blank lines: of a step, and of the longest kernel in its file.
counted=0
while read -r lines kernel file; do
  counted=$((counted + 1))
  [[ $lines -le 450 ]] || wrong "$file: $lines lines of code, at most 450"
  [[ $kernel -le 210 ]] || wrong "$file: a kernel of $kernel lines of code, at most 210"
done < <(awk '
  FNR == 1 && file { print lines, most, file }
  FNR == 1 { file = FILENAME; lines = most = inside = 0 }
  { sub(/\/\/.*/, "") } /[^ ]/ { ++lines } /__global__/ { inside = 1; begin = lines }
  inside && /^}/ { inside = 0; if (lines - begin >= most) most = lines - begin + 1 }
  END { print lines, most, file }' 0[1-8]_*/*.cu)
[[ $counted -gt 100 ]] || wrong "lines of $counted steps were counted"

# includes WHO TO-REGEX FOLDER...: the #includes of the files below lead nowhere else.
includes() {
  local who=$1 to=$2 file include files
  shift 2
  mapfile -t files < <(find "$@" -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' \))
  [[ ${#files[@]} -gt 0 ]] || { wrong "$who: no file was found in $*"; return; }
  while IFS=: read -r file include; do
    include=${include#*\"}
    include=${include%%\"*}
    [[ $include =~ ^($to) && $include != *..* ]] ||
      wrong "$file: includes $include, $who may include $to"
  done < <(grep -HE '^ *# *include *"' "${files[@]}")
}
of_answers='exercises/student/|hidden/'  # in the edition for students
device='kernels/|attn/|device/|emulator/|ptx/|ranks/'
for chapter in "${chapters[@]}"; do
  includes "a step" "$device|$of_answers" "$chapter" -maxdepth 1 ! -name chapter.cpp
  [[ ! -d $chapter/kernels ]] || includes "a kernel header" "$device|$of_answers" "$chapter/kernels"
  includes "the table" 'host/|kernels/|attn/|check/|device/|run/' "$chapter/chapter.cpp"
  includes "a host file" "host/|check/|files/|run/|[vbf][0-9]+_[a-z0-9_]+\.cu|$device|hidden/" \
    "$chapter/host"
  includes "a test" "$chapter/|host/|tests/|check/|exercise/|files/|report/|run/|$device|hidden/" \
    "$chapter/tests"
done
includes "a shared kernel header" \
  'kernels/(decode|hopper)/|attn/|device/|emulator/|ptx/|hidden/' common/kernels
host='api/|attn/|check/|device/|emulator/|exercise/|files/|ptx/|ranks/|report/|run/'
# An installed header finds attention.h next to itself.
includes "a file of common/" "$host|tests/(npy_files|catch|on_page)|attention\.h\$" \
  common/{api,attn,check,device,emulator,exercise,files,ptx,ranks,report,run}
exit $bad
