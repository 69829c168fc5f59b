#!/usr/bin/env bash
# step_diffs_self.sh ROOT: step_diffs.sh notices a step that differs in too much, and budgets
# without a reason, above the limit or too many; comments do not count.
set -euo pipefail
root=$1
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/01"
step() {  # step NAME LINES SALT: a step of so many lines, every one with SALT in it
  { echo "// $1: a header that is not counted"; echo "#include <x>"; echo "namespace $1 {"
    for ((i = 0; i < $2; ++i)); do echo "  line($i, $3);"; done; } >"$work/01/$1.cu"
}
step v1_one 50 a && step v2_two 50 a && step v3_three 50 b
sed -i 's/^  line/    line/; s/(3,/( 3, /; s,$,  // a comment,' "$work/01/v2_two.cu"
expect() {  # expect STATUS REGEX, of the files in $work
  local status=0 said
  said=$("$BASH" "$here/step_diffs.sh" "$work" "$work/diffs" "$work/budgets") || status=$?
  [[ $status -eq $1 && $said =~ $2 ]] ||
    { echo "status $status, not $1, or no '$2' in:"; echo "$said"; exit 1; }
}
printf '80 01/v1_one 01/v2_two\n' >"$work/diffs"
: >"$work/budgets"
expect 0 '0 of 80: 01/v1_one to 01/v2_two'
printf '80 01/v2_two 01/v3_three\n' >>"$work/diffs"
expect 1 'v3_three: differs from 01/v2_two in 100 lines, must be at most 80'
echo '100 01/v3_three it has to' >"$work/budgets"
expect 0 '100 of 100'
echo '100 01/v3_three' >"$work/budgets"
expect 1 'without a reason'
echo '300 01/v3_three it has to' >"$work/budgets"
expect 1 'at most 220'
for ((i = 0; i < 6; ++i)); do echo "100 01/v3_three it has to"; done >"$work/budgets"
expect 1 '01: 6 steps have budgets of their own'
for ((i = 0; i < 21; ++i)); do : >"$work/01/x$i.cu"; done  # a quarter of 24
expect 0 ''
rm "$work"/01/x*.cu
echo '90 01/v9_nine it has to' >"$work/budgets"
expect 1 'v9_nine: has a budget, and is no step with a parent'
: >"$work/budgets"
printf '80 01/v8_none 01/v9_none\n' >>"$work/diffs"
expect 1 'no such files'
sed -i '2,$d' "$work/diffs"
echo '100 01/v2_two it has to' >"$work/budgets"
expect 1 'v2_two: 0 lines need no budget of their own'
: >"$work/budgets"
# Of a step that launches its parent's kernel all lines count; a function for such a step does not.
step v4_four 10 b && sed -i '2a ATTN_ATTENTION_OF(v1_one);' "$work/01/v4_four.cu"
sed -i '3a //! [attend]\nStatus attend();\n//! [attend]' "$work/01/v2_two.cu"
printf '80 01/v1_one 01/v4_four\n80 01/v1_one 01/v2_two\n' >"$work/diffs"
expect 0 '13 of 80: 01/v1_one to 01/v4_four
0 of 80: 01/v1_one to 01/v2_two'
# A step that is far from its parent does not pass.
printf '80 06_flash_v3_hopper/v5_warp_specialised 06_flash_v3_hopper/v14_tuned\n' >"$work/diffs"
status=0
"$BASH" "$here/step_diffs.sh" "$root" "$work/diffs" "$work/budgets" >/dev/null || status=$?
[[ $status -eq 1 ]] || { echo "v5 to v14 of chapter 06 passes"; exit 1; }
