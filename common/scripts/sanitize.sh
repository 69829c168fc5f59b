#!/usr/bin/env bash
# Runs every step of a chapter on the GPU under the four tools of compute-sanitizer.
#
#   common/scripts/sanitize.sh [build/release/bin/01_naive ...]
#
# Small problems with tails on every side: the tools slow a kernel down a hundredfold. Exit status: 0 all
# clean, 1 a tool found something, 77 no GPU or no compute-sanitizer.
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not installed"; exit 77; }
programs=("$@")
[ ${#programs[@]} -gt 0 ] || programs=(build/release/bin/[0-9][0-9]_*)

problems=("--seqlen-q 133 --seqlen-k 201 --head-dim 72 --heads 4 --kv-heads 2 --causal --inputs needle"
          "--seqlen 65 --head-dim 64 --dtype fp16 --window 17,3"
          "--seqlen-q 70 --seqlen-k 33 --head-dim 40 --dtype fp32 --causal")
bad=0
for program in "${programs[@]}"; do
  "$program" --require-gpu >/dev/null || { [ $? -eq 77 ] && echo "no GPU" && exit 77; }
  for operation in $("$program" --list | awk 'NR > 1 && $2 ~ /^[a-z]+$/ && $1 ~ /^[a-z]+[0-9]/ {print $2}' | sort -u); do
    for tool in memcheck racecheck initcheck synccheck; do
      for problem in "${problems[@]}"; do
        # shellcheck disable=SC2086  # a problem is several words
        if log=$(compute-sanitizer --tool $tool --error-exitcode 9 \
                 "$program" --operation "$operation" $problem 2>&1); then
          verdict=clean
        else
          verdict="NOT CLEAN (exit $?)"
          bad=1
        fi
        printf '%-24s %-9s %-10s %s  [%s]\n' "$(basename "$program")" "$operation" $tool "$verdict" "$problem"
        [ "$verdict" = clean ] || printf '%s\n' "$log" | tail -25
      done
    done
  done
done
exit $bad
