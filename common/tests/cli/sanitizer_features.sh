#!/usr/bin/env bash
# sanitizer_features.sh SCRIPTS PROGRAM...: every feature that a step says it supports is in one of the
# sanitizer's problems of its operation (gpu_problems.sh), and no problem is refused by all steps.
set -euo pipefail
scripts=$1
shift
bin=
# shellcheck source=common/scripts/gpu_problems.sh
source "$scripts/gpu_problems.sh"
bad=0

# supported PROGRAM OPERATION: what its steps say, a line each.
supported() {
  "$1" --list | awk -v operation="$2" '
    NR > 1 && $1 ~ /^[a-z]+[0-9]/ { its = $2 }
    $1 == "supports" && its == operation'
}

for program in "$@"; do
  chapter=$(basename "$program")
  for operation in $("$program" --list | awk 'NR > 1 && $1 ~ /^[a-z]+[0-9]/ { print $2 }' | sort -u); do
    problems=$(sanitizer_problems "$chapter" "$operation")
    said=$(supported "$program" "$operation")
    while read -r words option; do
      if grep -q "${words//_/ }" <<<"$said" && ! grep -q -e "$option" <<<"$problems"; then
        echo "$chapter $operation: steps support ${words//_/ }, and no problem has $option"
        bad=1
      fi
    done <<<"dropout --dropout
softcap --softcap
ALiBi --alibi
packed_sequences --varlen"
    while read -r problem; do
      # shellcheck disable=SC2086  # a problem is several words
      "$program" --operation "$operation" $problem --device emulated --check off >/dev/null || {
        echo "$chapter $operation: refused: $problem"
        bad=1
      }
    done <<<"$problems"
  done
done
exit $bad
