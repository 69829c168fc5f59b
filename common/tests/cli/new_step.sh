#!/usr/bin/env bash
# new_step.sh ROOT CXX EIGEN: a step that new_step.sh adds to a copy of the chapters compiles, is in
# their lists and does not differ from its parent; what cannot be added is refused.
set -euo pipefail
root=$1 cxx=$2 eigen=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for chapter in "$root"/0[1-8]_*; do
  mkdir -p "$work/${chapter##*/}/exercises"
  cp -r "$chapter"/{*.cu,*.cpp,CMakeLists.txt} "$work/${chapter##*/}"
  for room in kernels host; do
    [[ ! -d $chapter/$room ]] || cp -r "$chapter/$room" "$work/${chapter##*/}"
  done
done
mkdir -p "$work/common"
cp -r "$root/common/scripts" "$work/common"
add() { bash "$work/common/scripts/new_step.sh" "$@"; }
compiles() {  # CHAPTER FILE
  "$cxx" -std=c++20 -fsyntax-only -w -DATTN_EMULATED -DFMT_SHARED \
    -I"$work/$1" -I"$root/common" -I"$root" -isystem "$eigen" -x c++ "$work/$1/$2"
}
step() {  # CHAPTER NAME PARENT TABLE COUNT: COUNT times in CMakeLists.txt
  add "$1" "$2" --parent "${3%%_*}" >"$work/said"
  grep -q "diff_${1%%_*}_${3%%_*}_${2%%_*}" "$work/said"
  local list=$work/$1/CMakeLists.txt
  [[ $(grep -ow "$2" "$list" | wc -l) -eq $5 ]] || { echo "$2: CMakeLists.txt"; exit 1; }
  [[ $(grep -ow "\"$2\"" "$work/$1/$4" | wc -l) -eq 1 ]] || { echo "$2: $4"; exit 1; }
  if grep -w "$2" "$list" | grep '.\{101\}'; then echo "$2: a long line"; exit 1; fi
  diff <(sed '/^\/\//d' "$work/$1/$3.cu") <(sed "/^\/\//d; s/\b$2\b/$3/g" "$work/$1/$2.cu")
  grep -q "^// parent    $3$" "$work/$1/$2.cu"
  compiles "$1" "$2.cu"
  compiles "$1" "$4"
}
step 04_flash_v2 v14_name v11_wide_stores chapter.cpp 1
step 04_flash_v2 v15_name v13_tuned chapter.cpp 1
step 06_flash_v3_hopper f9_name f8_q_in_registers host/fp8.cpp 1
step 08_quant_sparse s11_name s9_tuned host/sparse.cpp 2
step 01_naive v14_name v12_cp_async chapter.cpp 1

refused() {  # WORDS ARGUMENT...
  local words=$1 said
  shift
  if said=$(add "$@" 2>&1); then echo "not refused: $*"; exit 1; fi
  [[ $(wc -l <<<"$said") -eq 1 && $said == *"$words"* ]] || { printf '%s\n' "$said"; exit 1; }
}
written='05_flash_decoding/v17_name.cu is written and in CMakeLists.txt'
refused "$written, its declaration is there; its row is yours" \
  05_flash_decoding v17_name --parent v16
refused 'usage' 04_flash_v2 v16_name
refused '09_more: no such chapter' 09_more v1_x --parent v1
refused 'v13_again: 04_flash_v2/v13_tuned.cu has this number' 04_flash_v2 v13_again --parent v11
refused '--parent v99: 04_flash_v2 has no such step' 04_flash_v2 v16_name --parent v99
refused 'must be a letter, a number and words' 04_flash_v2 name --parent v11
echo "everything as expected"
