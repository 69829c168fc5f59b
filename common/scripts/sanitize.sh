#!/usr/bin/env bash
# Runs every step of a chapter on the GPU under the four tools of compute-sanitizer.
#
#   common/scripts/sanitize.sh [build/release/bin/01_naive ...]
#
# The problems are in gpu_problems.sh: the smallest that cover each step's code paths. A line per
# run lists the steps that ran and the steps that refused the problem; a step that no problem of its
# operation covers is an error. Steps that a tool cannot check are also in gpu_problems.sh
# (tool_cannot); single findings that are known to be false are in sanitizer_exceptions.txt. Both
# are reported with the reason. An exception that matches no finding is an error. ATTN_SANITIZE_JOBS
# runs execute in parallel (default: half the cores, at most 8).
#
# Exit status: 0 all clean, 1 a tool found something or a step was not covered, 77 no GPU or no
# compute-sanitizer.
set -euo pipefail
case ${1:-} in --help) sed -n '2,/^set -/{/^set -/d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"; exit 0 ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bin=build/release/bin
# shellcheck source=common/scripts/gpu_problems.sh
source common/scripts/gpu_problems.sh
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not installed"; exit 77; }
programs=("$@")
[ ${#programs[@]} -gt 0 ] || programs=("$bin"/[0-9][0-9]_*)
jobs=${ATTN_SANITIZE_JOBS:-$(($(nproc) / 2))}
jobs=$((jobs < 1 ? 1 : jobs > 8 && ${ATTN_SANITIZE_JOBS:-0} == 0 ? 8 : jobs))
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The exceptions, one per line: tool, chapter/step, problem, first, second, because; separated by
# tabs.
exceptions=$(awk '
  function finish() {
    if (of["tool"] == "") return
    line = ""
    for (n = 1; n <= 6; ++n) {
      if (of[keys[n]] == "") { print FILENAME ": an entry has no " keys[n] >"/dev/stderr"; exit 1 }
      line = line (n > 1 ? "\t" : "") of[keys[n]]
    }
    print line
    delete of
  }
  BEGIN { split("tool step problem first second because", keys) }
  /^#/ { next }
  NF == 0 { finish(); next }
  { key = $1; sub(/^[a-z]+ /, ""); of[key] = $0 }
  END { finish() }' common/scripts/sanitizer_exceptions.txt)
used=$(mktemp -d)
trap 'rm -rf "$work" "$used"' EXIT

# The findings of a tool, one per line: the step, and the two source positions FILE:LINE, - for
# none. A finding without a position belongs to a step "?".
findings() {  # LOG
  awk '
    function place() {
      return match($0, / in [^ ]+:[0-9]+/) ? substr($0, RSTART + 4, RLENGTH - 4) : "-"
    }
    function finish() { if (found && !told) print step "\t" first "\t-"; found = told = 0 }
    /^========= (COMPUTE-SANITIZER|[A-Z]+ SUMMARY)/ { next }
    /^========= *$/ { finish(); next }
    /^========= [^ ]/ { finish(); found = 1; step = "?"; first = "-" }
    found && /^=========/ {
      if (step == "?" && match($0, /gpu::[a-z]+[0-9]+_[a-z0-9_]+/))
        step = substr($0, RSTART + 5, RLENGTH - 5)
      if (/^========= +and (Read|Write|Atomic) access/) {
        print step "\t" first "\t" place()
        told = 1
      } else if (first == "-") first = place()
    }
    END { finish() }' "$1"
}
# The source line at a position, in the form of an exception: "FILE: TEXT".
source_at() {  # CHAPTER FILE:LINE
  [ "$2" != - ] || { echo -; return; }
  local file
  file=$(find "$1" common -name "$(basename "${2%:*}")" -print -quit)
  [ -z "$file" ] || printf '%s: %s\n' "$(basename "$file")" \
    "$(sed -n "${2##*:}{s/^ *//; s/ *$//; p}" "$file")"
}
# Whether all findings of a run are excused. Prints why, and records the exceptions used.
excused() {  # CHAPTER TOOL PROBLEM LOG
  local step first second entry all
  all=$(findings "$4")
  [ -n "$all" ] || return 1
  while IFS=$'\t' read -r step first second; do
    entry=$(printf '%s\t%s\t%s\t%s\t%s\t' "$2" "$1/$step" "$3" "$(source_at "$1" "$first")" \
      "$(source_at "$1" "$second")")
    entry=$(awk -v start="$entry" 'index($0, start) == 1' <<<"$exceptions")
    [ -n "$entry" ] || return 1
    printf '%s\n' "$entry" >"$used/$(sha256sum <<<"$entry" | cut -c 1-16)"
    printf '  known to be false: %s: %s and %s: %s\n' "$step" "$first" "$second" "${entry##*$'\t'}"
  done <<<"$all"
}

one() {  # NUMBER TOOL PROGRAM OPERATION PROBLEM STEPS
  local verdict=clean ran refused known='' status=0
  # shellcheck disable=SC2086  # a problem is several words
  compute-sanitizer --tool "$2" --error-exitcode 9 \
    "$3" --operation "$4" $5 --step "$6" --require-gpu >"$work/$1.log" 2>&1 || status=$?
  # 3: no step supports the problem. That is expected if steps were left out.
  if [ $status -ne 0 ] && { [ $status -ne 3 ] || [ "$6" = all ]; }; then
    verdict="NOT CLEAN"
    # 9: a tool found something. A failed check does not concern the tool.
    if [ $status -eq 9 ] &&
      ! awk '$2 == "fail" || $2 == "error" { bad = 1 } END { exit !bad }' "$work/$1.log" &&
      known=$(excused "$(basename "$3")" "$2" "$5" "$work/$1.log" | sort -u
        exit "${PIPESTATUS[0]}"); then
      verdict="clean but for findings known to be false"
    fi
  fi
  ran=$(awk '$2 == "pass" || $2 == "unchecked" { printf "%s ", $1 }' "$work/$1.log")
  ran=${ran% }
  refused=$(awk '$2 == "unsupported" { printf "%s ", $1 }' "$work/$1.log")
  refused=${refused% }
  printf '%s\n' "$ran" >"$work/$1.ran"
  {
    printf '%-18s %-12s %-9s %s: %s%s [%s]\n' "$(basename "$3")" "$4" "$2" "$verdict" "${ran:-no step ran}" \
      "${refused:+ (refused: $refused)}" "$5"
    [ -z "$known" ] || printf '%s\n' "$known"
    [ "$verdict" != "NOT CLEAN" ] || tail -n 25 "$work/$1.log"
  } >"$work/$1.said"
  [ "$verdict" != "NOT CLEAN" ]
}

bad=0
for program in "${programs[@]}"; do
  chapter=$(basename "$program")
  status=0
  "$program" --seqlen-q 8 --seqlen-k 8 --require-gpu >/dev/null || status=$?
  if [ $status -ne 0 ]; then
    echo "$chapter: exit $status without a tool$([ $status -ne 77 ] || echo ": no GPU")"
    exit $((status == 77 ? 77 : 1))
  fi
  mapfile -t operations < <("$program" --list |
    awk 'NR > 1 && $1 ~ /^[a-z]+[0-9]/ && $2 ~ /^[a-z_]+$/ { print $2 }' | sort -u)
  for operation in "${operations[@]}"; do
    mapfile -t problems < <(sanitizer_problems "$chapter" "$operation")
    if [ ${#problems[@]} -eq 0 ]; then
      echo "$chapter $operation: gpu_problems.sh has no problem for it"
      bad=1
      continue
    fi
    count=0
    for tool in memcheck racecheck initcheck synccheck; do
      steps=all
      read -r left_out reason <<<"$(tool_cannot "$chapter" "$operation" $tool)"
      if [ -n "$left_out" ]; then
        steps=$(all_steps "$chapter" | while read -r step; do
          [ "$(operation_of "$chapter" "$step")" != "$operation" ] || [[ ,$left_out, == *,$step,* ]] || echo "$step"
        done | paste -sd ,)
        printf '%-18s %-12s %-9s left out: %s: %s\n' "$chapter" "$operation" $tool "$left_out" "$reason"
        [ -n "$steps" ] || continue  # all of them
      fi
      for problem in "${problems[@]}"; do
        count=$((count + 1))
        # Running jobs are counted, not returns of `wait -n`: with those, a log was once removed
        # while its job still ran.
        while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n || true; done
        { one $count $tool "$program" "$operation" "$problem" "$steps" || : >"$work/$count.bad"; } &
      done
    done
    wait
    for ((n = 1; n <= count; ++n)); do
      cat "$work/$n.said"
      [ ! -e "$work/$n.bad" ] || bad=1
    done
    for step in $(all_steps "$chapter"); do
      [ "$(operation_of "$chapter" "$step")" = "$operation" ] || continue
      grep -qw -- "$step" "$work"/*.ran ||
        { echo "$chapter $operation: no problem reaches $step"; bad=1; }
    done
    rm -f "$work"/*
  done
  while IFS=$'\t' read -r tool step problem rest; do
    [ "${step%%/*}" = "$chapter" ] || continue
    id=$(printf '%s\t%s\t%s\t%s\n' "$tool" "$step" "$problem" "$rest" | sha256sum | cut -c 1-16)
    if [ ! -e "$used/$id" ]; then
      echo "sanitizer_exceptions.txt: matches no finding any more: $tool, $step [$problem]"
      bad=1
    fi
  done <<<"$exceptions"
done
exit $bad
