#!/usr/bin/env bash
# Grades a submission: a folder with the student's files (ex01a.inc ... ex01e.txt, at any depth).
#
#   common/scripts/grade.sh SUBMISSION [--student ID] [--out DIR]
#
# The student's files are copied out of the submission and built into our programs; nothing else in
# the submission is run. exercise_filter.sh refuses files that reach outside their region, here and
# on the student's machine. The program with the student's kernel receives inputs and returns
# tensors. judge_01_naive draws the inputs, computes the reference and the bounds, and its exit
# status is the verdict. It runs three times with seeds drawn now: on the emulator, and on the GPU
# if there is one.
#
# A correct kernel exercise earns 60 % of its points, and on a GPU up to 40 % for speed. For that it
# is timed alternately with the shipped step, on rotating inputs, and every timed output is checked
# (all points up to 1.2 x the time of the shipped step, none from 10 x on). Without a GPU, a correct
# kernel earns all points. If ncu is available too, the counters of one launch are checked
# (attn_report referee): fewer operations than needed, inputs that were not read, a time below the
# roof or a library's kernel earn no points. NCU=/path/to/ncu selects an ncu.
#
# Writes DIR/ID.json, a line in DIR/grades.csv, DIR/ID.html, and logs to DIR/ID/; DIR defaults to
# build/grades. 100 points in total, equally divided among the exercises. Several instances may run
# at once: one builds, the others wait. Student code runs under your account: use a container for
# strangers. Exit status: 0 graded (whatever the points), 1 our own programs cannot be built, 2 the
# submission cannot be used.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
# shellcheck source=common/scripts/build_progress.sh
source "$root/common/scripts/build_progress.sh"
usage() { echo "usage: common/scripts/grade.sh SUBMISSION [--student ID] [--out DIR]" >&2; exit 2; }

submission="" student="" out=$root/build/grades
while [[ $# -gt 0 ]]; do
  case $1 in
    --student) [[ $# -ge 2 ]] || usage; student=$2; shift 2 ;;
    --out) [[ $# -ge 2 ]] || usage; out=$2; shift 2 ;;
    -*) usage ;;
    *) [[ -z $submission ]] || usage; submission=$1; shift ;;
  esac
done
[[ -n $submission ]] || usage
[[ -d $submission ]] || { echo "grade.sh: $submission: no such folder" >&2; exit 2; }
student=${student:-$(basename -- "$submission")}
[[ $student =~ ^[A-Za-z0-9_-][A-Za-z0-9._-]*$ ]] ||
  { echo "grade.sh: --student $student: letters, digits, . _ - only, and no . first" >&2; exit 2; }
# Without these tools the filter would accept everything.
for tool in nm g++; do
  command -v "$tool" >/dev/null || { echo "grade.sh: $tool: not found, and the filter needs it" >&2; exit 1; }
done
mkdir -p "$out/$student" "$root/build/grade"
out=$(cd -- "$out" && pwd -P)
# As deep as build/release: ccache hashes paths relative to the build folder (CCACHE_BASEDIR).
build=$root/build/grade
# One path for all submissions avoids reconfiguring; guarded by the lock.
built_from=$build/files

# Each name has its own folder, and graders of the same name wait for each other.
work=$out/$student
exec 8>"$work/lock"
flock 8
rm -rf "${work:?}/files" "$work/bin" "$work"/*.log "$work"/*.csv "$work"/*.json
mkdir "$work/files" "$work/bin"
trap 'rm -rf "$work/bin"' EXIT

# ---- the exercises, and the student's file for each ----------------------------------------------
exercises=() kernels=() quizzes=() targets=()
declare -A chapter_of verdict points speed again
for page in "$root"/0*/exercises/[a-z].md; do
  chapter=$(basename "$(dirname "$(dirname "$page")")")
  exercise=ex${chapter:0:2}$(basename "$page" .md)
  extension=txt
  [[ ! -f ${page%.md}.stub.inc ]] || extension=inc
  exercises+=("$exercise")
  chapter_of[$exercise]=$chapter
  verdict[$exercise]="" points[$exercise]=0 speed[$exercise]="" again[$exercise]=""
  mapfile -t found < <(find "$submission" -type f -name "$exercise.$extension" | sort)
  if [[ ${#found[@]} -ne 1 ]]; then
    verdict[$exercise]=$([[ ${#found[@]} -eq 0 ]] && echo "not handed in" || echo "handed in more than once")
  elif [[ $(stat -c %s "${found[0]}") -gt 65536 ]]; then
    verdict[$exercise]="refused: larger than 64 KiB"
  elif cp "${found[0]}" "$work/files/$exercise.$extension" && [[ $extension = inc ]]; then
    kernels+=("$exercise") targets+=("${exercise}_student" "judge_$chapter")
  else
    quizzes+=("$exercise") targets+=("quiz_$chapter")
  fi
done

# Progress, to standard error.
say() { echo "grade.sh: $student: $1" >&2; }
say "$((${#kernels[@]} + ${#quizzes[@]})) of ${#exercises[@]} exercises are handed in"

# ---- our programs with these files: one submission at a time -----------------------------------
gpu=0
command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 && gpu=1
ncu=""
[[ $gpu -eq 0 ]] || ncu=${NCU:-$(command -v ncu || true)}
[[ -z $ncu ]] || targets+=(attn_report)
fail() { echo "grade.sh: $1" >&2; exit 1; }
build_programs() {
  rm -rf "$built_from" "$build"/bin/ex*_student
  cp -r "$work/files" "$built_from"
  local cuda=()
  [[ $gpu -eq 1 ]] || cuda=(-DATTN_CUDA=OFF)
  # shellcheck disable=SC2086  # several words
  cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release "${cuda[@]}" ${ATTN_CMAKE_ARGS:-} \
    -DATTN_STUDENT_DIR="$built_from" >"$work/build.log" 2>&1 || fail "the build could not be configured: $work/build.log"
  mapfile -t targets < <(printf '%s\n' "${targets[@]}" | awk '!seen[$0]++')
  say "build ${#targets[@]} programs: ${targets[*]}$(time_to_build "$build" "$(nproc)" \
    "${targets[@]}") (log: $work/build.log)"
  # Builds everything possible at once; then each missing target alone, for its own messages.
  local shown=(say_progress 20)
  [[ ! -t 2 ]] || shown=(show_progress)
  cmake --build "$build" --target "${targets[@]}" -- -k 0 2>&1 | tee -a "$work/build.log" |
    "${shown[@]}" >&2 || true
  local e program
  for e in ${kernels[@]+"${kernels[@]}"}; do
    [[ -x $build/bin/${e}_student ]] || cmake --build "$build" --target "${e}_student" >"$work/$e.build.log" 2>&1 || true
  done
  for program in "${targets[@]}"; do
    if [[ -x $build/bin/$program ]]; then
      ln -f "$build/bin/$program" "$work/bin/" 2>/dev/null || cp -f "$build/bin/$program" "$work/bin/"
    elif [[ $program != *_student ]]; then
      fail "$program could not be built: $work/build.log"
    fi
  done
}
if [[ ${#targets[@]} -gt 0 ]]; then
  exec 9>"$build/lock"
  flock -n 9 || { say "waits: another submission is being built"; flock 9; }
  build_programs 8>&-
  flock -u 9
fi

for e in ${kernels[@]+"${kernels[@]}"}; do
  if [[ ! -x $work/bin/${e}_student ]]; then
    log=$work/$e.build.log
    verdict[$e]=$(sed -n "s/^$e: refused: /refused: /p" "$log" | sed -n 1p)
    [[ -n ${verdict[$e]} ]] ||
      verdict[$e]="does not compile: $(grep -m1 -oE 'error: .*|undefined reference to .*' "$log" || echo "see $student/$e.build.log")"
  fi
done

# ---- kernels: three seeds; their judges run in parallel
# ------------------------------------------- The judge's output is kept apart from the output of
# the student's program.
judge() {  # EXERCISE SEED RUN OPTION...
  "$work/bin/judge_${chapter_of[$1]}" "$1" --seed "$2" "${@:4}" >"$work/$1.$3.log" 2>"$work/$1.$3.err.log" </dev/null 8>&-
}
failed() {  # EXERCISE RUN: the first failure, and the command that shows it again
  local log=$work/$1.$2.log
  verdict[$1]="wrong: $(grep -A1 -m1 '^FAIL' "$log" | sed 's/^FAIL *//; s/^ *//' | grep -v -e '^again: ' -e '^see it: ' | paste -sd ' ')"
  [[ ${verdict[$1]} != "wrong: " ]] || verdict[$1]="wrong: $(tail -n 1 "$work/$1.$2.err.log")"
  # With the student's paths, not those of the grader.
  again[$1]=$(sed -n 's,^ *again: .*/judge_,build/release/bin/judge_,p' "$log" | sed -n 1p)
  points[$1]=0
}
new_seed() { od -An -N6 -tu8 /dev/urandom | tr -d ' '; }
cores=$(nproc)
declare -A process
to_judge=0
for e in ${kernels[@]+"${kernels[@]}"}; do
  [[ -n ${verdict[$e]} ]] || to_judge=$((to_judge + 1))
done
[[ $to_judge -eq 0 ]] || say "judge $to_judge kernels, each under three seeds"
runs="1 2 3"
[[ $gpu -eq 0 ]] || runs="1 2"  # the third run is timed, alone
for e in ${kernels[@]+"${kernels[@]}"}; do
  [[ -z ${verdict[$e]} ]] || continue
  for run in $runs; do
    while (($(jobs -rp | wc -l) >= cores)); do sleep 0.05; done
    judge "$e" "$(new_seed)" "$run" &
    process[$e.$run]=$!
  done
done
for e in ${kernels[@]+"${kernels[@]}"}; do
  [[ -z ${verdict[$e]} ]] || continue
  verdict[$e]=right points[$e]=1
  for run in $runs; do
    status=0
    wait "${process[$e.$run]}" || status=$?
    if [[ $status -ne 0 && ${verdict[$e]} = right ]]; then failed "$e" "$run"; fi
  done
  say "$e: ${verdict[$e]%%:*}"
done

# The counters of one launch; prints why it is not an honest one. Prints nothing without ncu.
referee() {  # EXERCISE SEED RESULT
  local csv=$work/$1.ncu.csv metrics
  [[ -n $ncu ]] || return 0
  metrics=$(awk '/^[a-z]/ && $1 != "section" { printf "%s,", $1 }' "$root/common/scripts/metrics.txt")
  for op in ffma fadd fmul; do metrics+=smsp__sass_thread_inst_executed_op_${op}_pred_on.sum,; done
  "$ncu" --target-processes all --profile-from-start off --csv --print-units base --print-kernel-base mangled \
    --metrics "${metrics%,}" "$work/bin/judge_${chapter_of[$1]}" "$1" --profile --seed "$2" 2>/dev/null | grep '^"' >"$csv" || return 0
  "$work/bin/attn_report" referee "$3" "$csv" --own _student | paste -sd ';' || true
}
for e in ${kernels[@]+"${kernels[@]}"}; do
  [[ $gpu -eq 1 && ${verdict[$e]} = right ]] || continue
  seed=$(new_seed)
  result=$work/$e.json
  exec 9>"$build/gpu.lock"  # no other kernels run while one is timed
  flock 9
  if ! judge "$e" "$seed" 3 --speed --result "$result"; then
    failed "$e" 3
  elif grep -q '"speed"' "$result"; then
    objection=$(referee "$e" "$seed" "$result")
    if [[ -n $objection ]]; then
      verdict[$e]="rejected by the counters: $objection" points[$e]=0
    else
      speed[$e]=$(sed -nE 's/^ *"ratio": ([0-9.e+-]+),?$/\1/p' "$result")
      points[$e]=$(sed -nE 's/^ *"points": ([0-9.e+-]+),?$/\1/p' "$result" | awk '{ printf "%.4f", 0.6 + 0.4 * $1 }')
      verdict[$e]=$(awk -v r="${speed[$e]}" 'BEGIN { printf "right, %.2f x the time of the shipped step", r }')
    fi
  fi
  flock -u 9
done

# ---- answers and predictions ---------------------------------------------------------------------
for e in ${quizzes[@]+"${quizzes[@]}"}; do
  folder=$root/${chapter_of[$e]}/exercises letter=${e: -1} log=$work/$e.log
  question=(--task "$folder/$letter.task")
  [[ ! -f $folder/$letter.key ]] || question=(--key "$folder/$letter.key")
  status=0
  "$work/bin/quiz_${chapter_of[$e]}" --answers "$work/files/$e.txt" "${question[@]}" >"$log" 2>&1 </dev/null || status=$?
  case $status in
    0) verdict[$e]=right points[$e]=1 ;;
    1) verdict[$e]="wrong: $(tail -n 1 "$log")"
       # Partial points: "3 of 6 right" or "score 2.5 of 4".
       points[$e]=$(sed -nE 's/^(score )?([0-9.]+) of ([0-9]+).*/\2 \3/p' "$log" |
                    awk 'END { printf "%.4f", ($2 > 0 ? 0.9 * $1 / $2 : 0) }') ;;
    *) verdict[$e]="unusable: $(tail -n 1 "$log" | sed "s@$work/files/@@g")" ;;
  esac
done

# ---- the results: points out of 100 everywhere
# -----------------------------------------------------
json_text() { printf '%s' "$1" | tr -d '\000-\037' | sed 's/\\/\\\\/g; s/"/\\"/g'; }
html_text() { printf '%s' "$1" | sed 's/&/\&amp;/g; s/</\&lt;/g; s/>/\&gt;/g; s/"/\&quot;/g'; }
count=${#exercises[@]}
total=$(for e in "${exercises[@]}"; do echo "${points[$e]}"; done | awk -v n="$count" '{ s += $1 } END { printf "%.1f", 100 * s / n }')
for e in "${exercises[@]}"; do points[$e]=$(awk -v p="${points[$e]}" -v n="$count" 'BEGIN { printf "%.2f", 100 * p / n }'); done
each=$(awk -v n="$count" 'BEGIN { printf "%.2f", 100 / n }')
{
  printf '{"schema": "attn-grade-2", "student": "%s", "points": %s, "points_per_exercise": %s, "exercises": [' "$student" "$total" "$each"
  comma=""
  for e in "${exercises[@]}"; do
    printf '%s\n {"name": "%s", "points": %s, "time_over_shipped": %s, "verdict": "%s", "again": "%s"}' "$comma" "$e" \
      "${points[$e]}" "${speed[$e]:-null}" "$(json_text "${verdict[$e]}")" "$(json_text "${again[$e]}")"
    comma=,
  done
  printf '\n]}\n'
} >"$out/$student.json"
{
  flock 7
  [[ -s $out/grades.csv ]] || { printf 'student,points'; printf ',%s' "${exercises[@]}"; echo; } >&7
  { printf '%s,%s' "$student" "$total"; for e in "${exercises[@]}"; do printf ',%s' "${points[$e]}"; done; echo; } >&7
} 7>>"$out/grades.csv"
{
  cat <<HTML
<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>$student: $total of 100</title>
<style>
:root { color-scheme: light dark; --good: #2c6e40; --bad: #a3271b; --part: #8a5a00 }
@media (prefers-color-scheme: dark) { :root { --good: #97d8aa; --bad: #ff9d8f; --part: #f0c36d } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .4rem .8rem; border-bottom: 1px solid #8884; vertical-align: top }
td:nth-child(2) { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
td:nth-child(3) { overflow-wrap: anywhere }
.good { color: var(--good) } .bad { color: var(--bad) } .part { color: var(--part) } .none { opacity: .6 }
meter { width: 100%; height: 1.2rem }
</style>
<h1>$student: $total of 100</h1>
<meter min="0" max="100" value="$total">$total of 100</meter>
<p>Graded on $(date -u +%Y-%m-%d), $([[ $gpu -eq 1 ]] && echo "on the emulator and on a GPU" || echo "on the emulator: there was no GPU, speed is not graded").
<table>
<tr><th>exercise<th>points<th>verdict
HTML
  for e in "${exercises[@]}"; do
    style=bad
    case ${verdict[$e]} in
      right*) style=good ;;
      "not handed in") style=none ;;
      *) [[ ${points[$e]} = 0.00 ]] || style=part ;;
    esac
    # The task is named but not linked: the page is read elsewhere.
    title=$(sed -n '1s/^# //p' "$root/${chapter_of[$e]}/exercises/${e: -1}.md")
    printf '<tr><td>%s<td>%s of %s<td class="%s">%s%s\n' "$(html_text "${title:-$e}")" \
      "${points[$e]}" "$each" "$style" "$(html_text "${verdict[$e]}")" \
      "${again[$e]:+<br><code>$(html_text "${again[$e]}")</code>}"
  done
  echo '</table>'
} >"$out/$student.html"
for e in "${exercises[@]}"; do printf '%s  %-5s %s\n' "$e" "${points[$e]}" "${verdict[$e]}"; done
echo "$student: $total of 100"
