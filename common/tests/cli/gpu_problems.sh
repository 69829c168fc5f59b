#!/usr/bin/env bash
# Each step of a chapter takes the problem that gpu_problems.sh profiles it with. Nothing is
# launched (--check off).
#   gpu_problems.sh ROOT BIN CHAPTER
set -euo pipefail
cd "$1"
bin=$2
# shellcheck source=common/scripts/gpu_problems.sh
source common/scripts/gpu_problems.sh
failed=0 count=0
accepted() {  # WHAT OPTIONS
  local said
  # The predicted masks of long sequences take the emulator minutes.
  set -- "$1" "$(sed -E '/field:/{s/--seqlen [0-9]+/--seqlen 512/; s/field:[^ ]+/field:2x16x16/
    s/--heads [0-9]+/--heads 1/}' <<<"$2")"
  # shellcheck disable=SC2086  # options are several words
  said=$("$bin/$chapter" $2 --check off --device emulated 2>&1) || true
  count=$((count + 1))
  if grep -q ' unsupported ' <<<"$said" || ! grep -q ' not checked' <<<"$said"; then
    printf '%s: %s\n' "$1" "$2"
    grep -m3 -E ' unsupported |must|needs' <<<"$said" || tail -n 2 <<<"$said"
    failed=1
  fi
}
chapter=$3
for step in $(all_steps "$chapter"); do
  accepted "counters $step" "$(profiled_problem "$chapter" "$step") --step $step \
--operation $(operation_of "$chapter" "$step")"
done
echo "$count problems of $chapter"
[ $count -gt 0 ] && exit $failed
