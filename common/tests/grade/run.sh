#!/usr/bin/env bash
# run.sh ROOT: the grader gives full points to the solutions, none to stubs and cheats.
set -euo pipefail
root=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
region() { awk -v m="//! [$2]" 'index($0, m) { inside = !inside; next } inside' "$root/$1.cu"; }

mkdir -p "$work/good/answers" "$work/cheats" "$work/stubs"
region 01_naive/v1_global ex01a >"$work/good/ex01a.inc"
region 01_naive/v3_tiled ex01b >"$work/good/answers/ex01b.inc"
region 01_naive/v4_tensor_core ex01c >"$work/good/ex01c.inc"
region 02_online_softmax/v2_online ex02a >"$work/good/ex02a.inc"
region 02_online_softmax/v3_warp ex02b >"$work/good/answers/ex02b.inc"
region 02_online_softmax/v7_attention_row ex02c >"$work/good/ex02c.inc"
region 03_flash_v1/v1_scalar ex03a >"$work/good/ex03a.inc"
region 03_flash_v1/v3_async ex03b >"$work/good/answers/ex03b.inc"
region 03_flash_v1/v3_async ex03c >"$work/good/ex03c.inc"
region 04_flash_v2/v1_loop_swap ex04a >"$work/good/ex04a.inc"
region 04_flash_v2/v3_swizzle ex04b >"$work/good/answers/ex04b.inc"
region 04_flash_v2/v4_cp_async ex04c >"$work/good/ex04c.inc"
region 06_flash_v3_hopper/v2_warp_specialised ex06a >"$work/good/ex06a.inc"
region 06_flash_v3_hopper/v1_wgmma_tma ex06b >"$work/good/answers/ex06b.inc"
region 06_flash_v3_hopper/v4_overlap ex06c >"$work/good/ex06c.inc"
for chapter in 01_naive 02_online_softmax 03_flash_v1 04_flash_v2 06_flash_v3_hopper; do
  exercise=ex${chapter:0:2}
  for letter in a b c; do cp "$root/$chapter/exercises/$letter.stub.inc" "$work/stubs/$exercise$letter.inc"; done
  for letter in d e; do
    cp "$root/$chapter/exercises/$letter.solution.txt" "$work/good/$exercise$letter.txt"
    cp "$root/$chapter/exercises/$letter.stub.txt" "$work/stubs/$exercise$letter.txt"
  done
done

# Cheats: a result that is remembered, the reference called, a file read; and half a prediction.
{ echo 'static float remembered[1 << 20];'; cat "$work/good/ex01a.inc"; } >"$work/cheats/ex01a.inc"
{ cat "$work/good/answers/ex01b.inc"; echo '#include "attn/reference.h"'; } >"$work/cheats/ex01b.inc"
{ echo 'if (std::getenv("GRADER")) return;'; cat "$work/good/ex01c.inc"; } >"$work/cheats/ex01c.inc"
# The same behind a line that is allowed.
{ echo '#pragma unroll'; echo '#define merge std::max'; cat "$work/good/ex02c.inc"; } >"$work/cheats/ex02c.inc"
# A program that ends well before its cases are done, in words that the search for forbidden ones does not know.
sed 's/edges = .*/& (exit)(0);/' "$work/good/answers/ex02b.inc" >"$work/cheats/ex02b.inc"
cp "$root/01_naive/exercises/d.mutant.swapped.txt" "$work/cheats/ex01d.txt"
cp "$root/01_naive/exercises/e.mutant.tensor_bound.txt" "$work/cheats/ex01e.txt"

grade() { "$root/common/scripts/grade.sh" "$work/$1" --out "$work/out"; }
expect() { grep -qE "$2" <<<"$1" || { printf 'expected %s in\n%s\n' "$2" "$1"; exit 1; }; }
good=$(grade good)
expect "$good" 'good: 100\.0 of 100'
stubs=$(grade stubs)
expect "$stubs" 'stubs: 0\.0 of 100'
cheats=$(grade cheats)
for e in 01a 01b 01c 02c; do expect "$cheats" "ex$e  0 +refused: "; done
expect "$cheats" 'ex02b  0 +wrong: ended before its cases were done'
expect "$cheats" 'ex01d  0\.600 +wrong: '
expect "$cheats" 'ex01e  0\.675 +wrong: '
# An output that is right for one problem alone, and one that is right for the seed of the exercise.
mkdir "$work/luck"
{ echo 'if (shape.seqlen_k == 1) { p[0] = 1; gLse[bh * shape.seqlen_q + row] = s[0] * shape.softmax_scale; return; }'
  cat "$root/01_naive/exercises/a.mutant.mask_off_by_one.inc"; } >"$work/luck/ex01a.inc"
# The right answer, and a write to the input besides.
{ cat "$work/good/ex02c.inc"; echo 'const_cast<Element*>(gK)[0] = Element(1.0f);'; } >"$work/luck/ex02c.inc"
luck=$(grade luck)
expect "$luck" 'ex01a  0 +wrong: '
expect "$luck" 'ex02c  0 +wrong: wrote to its input k'
[[ $(wc -l <"$work/out/grades.csv") -eq 5 ]]
python3 -c 'import json, sys; [json.load(open(p)) for p in sys.argv[1:]]' "$work"/out/*.json 2>/dev/null || ! command -v python3 >/dev/null
if "$root/common/scripts/grade.sh" "$work/nosuch" 2>/dev/null; then exit 1; fi
echo "everything as expected"
