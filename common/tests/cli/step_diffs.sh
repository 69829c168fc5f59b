#!/usr/bin/env bash
# step_diffs.sh ROOT DIFFS BUDGETS: a step differs from its parent in one idea. DIFFS has a line per
# pair, "80 chapter/parent chapter/step"; BUDGETS a line per step with a budget of its own,
# "120 chapter/step its reason". Changed lines are those of `diff`, removed and added; comments,
# white space, the step's name and marks of timelines (attn/span.h) do not count, nor does the
# snippet [attend], a host function for a child. A step that launches its parent's attention kernel
# (ATTN_ATTENTION_OF) is not compared: all of its lines count.
set -euo pipefail
export LC_ALL=C
root=$1 diffs=$2 budgets=$3
most_named=5 most_lines=220  # budgets per chapter, or a quarter of its steps; lines of one

text() {  # of a step, without what does not count
  sed -e '/\/\/! \[attend\]/,/\/\/! \[attend\]/d' -e 's://.*::' -e "s/${1##*/}/STEP/g" \
    -e 's/[[:space:]]//g' "$root/$1.cu" | grep -v -e '^$' -e '^ATTN_SPAN' -e 'attn/span.h'
}
declare -A budget_of=() named=()
bad=0
complain() { echo "$*"; bad=1; }
while read -r lines step reason; do
  [[ -n $lines ]] || continue
  budget_of[$step]=$lines
  named[${step%%/*}]=$((${named[${step%%/*}]:-0} + 1))
  [[ -n $reason ]] || complain "$step: a budget of $lines lines without a reason"
  [[ $lines -le $most_lines ]] || complain "$step: a budget of $lines lines, at most $most_lines"
done <"$budgets"
for chapter in "${!named[@]}"; do
  files=("$root/$chapter"/*.cu)
  quarter=$(((${#files[@]} + 3) / 4))
  most=$((quarter > most_named ? quarter : most_named))
  [[ ${named[$chapter]} -le $most ]] ||
    complain "$chapter: ${named[$chapter]} steps have budgets of their own, at most $most may"
done

while read -r budget parent step; do
  [[ -n $budget ]] || continue
  if [[ ! -f $root/$parent.cu || ! -f $root/$step.cu ]]; then
    complain "$parent to $step: no such files"
    continue
  fi
  if grep -q '^ATTN_ATTENTION_OF(' "$root/$step.cu"; then
    count=$(text "$step" | wc -l)
  else
    count=$(diff <(text "$parent") <(text "$step") | grep -c '^[<>]' || true)
  fi
  [[ -z ${budget_of[$step]:-} || $count -gt $budget ]] ||
    complain "$step: $count lines need no budget of their own"
  budget=${budget_of[$step]:-$budget}
  unset "budget_of[$step]"
  echo "$count of $budget: $parent to $step"
  [[ $count -le $budget ]] ||
    complain "$step: differs from $parent in $count lines, must be at most $budget"
done <"$diffs"
for step in "${!budget_of[@]}"; do
  complain "$step: has a budget, and is no step with a parent"
done
exit "$bad"
