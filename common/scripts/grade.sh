#!/usr/bin/env bash
# Grades one submission: a folder that holds the student's files (ex01a.inc ... ex01e.txt, at any depth).
#
#   common/scripts/grade.sh SUBMISSION [--student ID] [--out DIR]
#
# The student's files are copied out of the submission and built into *our* programs: nothing else of the
# submission is run. Each kernel exercise runs under three seeds that are drawn now, on the emulator, and on
# the GPU if there is one: outputs are poisoned, buffers guarded, inputs compared afterwards. Files that
# reach outside their region (#include, #define, asm, static variables, files, the environment) are refused.
#
# A kernel exercise that is right has 60 % of its points, and on a GPU up to 40 % for speed: it is timed in turns
# with the shipped step, on inputs that rotate, and every timed output is checked (all points up to 1.2 x the
# time of the shipped step, none from 10 x on). Without a GPU, being right is all. Where ncu is there too, the
# counters of one launch are the referee (attn_report referee): fewer operations than needed, inputs that were not
# read, a time below the roof or a library's kernel are no points. NCU=/path/to/ncu names an ncu.
#
# Writes DIR/ID.json, a line in DIR/grades.csv and DIR/ID.html; DIR defaults to build/grades. Points: 100 over
# all exercises, alike. Student code runs as you: use a container for strangers.
# Exit status: 0 graded (whatever the points), 2 a submission that cannot be used.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
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
[[ $student =~ ^[A-Za-z0-9._-]+$ ]] || { echo "grade.sh: --student $student: letters, digits, . _ - only" >&2; exit 2; }
mkdir -p "$out"
out=$(cd -- "$out" && pwd -P)

files=$root/build/grade/files
build=$root/build/grade/build
rm -rf "$files"
mkdir -p "$files"

# ---- the exercises there are, and the student's file for each --------------------------------
exercises=()
declare -A chapter_of verdict points speed
for stub in "$root"/0*/exercises/*.stub.*; do
  chapter=$(basename "$(dirname "$(dirname "$stub")")")
  name=$(basename "$stub")
  exercise=ex${chapter:0:2}${name%%.*}
  extension=${name##*.}
  exercises+=("$exercise")
  chapter_of[$exercise]=$chapter
  verdict[$exercise]="" points[$exercise]=0 speed[$exercise]=""
  mapfile -t found < <(find "$submission" -type f -name "$exercise.$extension" | sort)
  if [[ ${#found[@]} -ne 1 ]]; then
    verdict[$exercise]=$([[ ${#found[@]} -eq 0 ]] && echo "not handed in" || echo "handed in more than once")
  elif [[ $(stat -c %s "${found[0]}") -gt 65536 ]]; then
    verdict[$exercise]="refused: larger than 64 KiB"
  elif [[ $extension = inc ]] && reach=$(sed 's@//.*@@' "${found[0]}" | grep -nE \
      '^[[:space:]]*#|%:|\?\?=|__asm|[^_[:alnum:]]asm[^_[:alnum:]]|(^|[^_[:alnum:]])static[[:space:]]|thread_local|extern|fopen|stream|getenv|system|printf|puts|(^|[^_[:alnum:]])(exit|_exit|_Exit|quick_exit|abort|open|write|fork|syscall|clock|clock64)[[:space:]]*\(|dlopen|mmap|std::|attn::|emulator|(^|[^_[:alnum:]])Block::|reference' |
      grep -vE '^[0-9]+:[[:space:]]*#pragma unroll[[:space:]0-9]*$' | sed -n 1p | grep .); then
    verdict[$exercise]="refused: line ${reach%%:*} reaches outside the exercise:${reach#*:}"
  fi
  # Without a file of its own an exercise is built as its stub.
  if [[ -z ${verdict[$exercise]} ]]; then cp "${found[0]}" "$files/$exercise.$extension"; fi
done

# The counters of one launch; prints why it is no honest one. Silent where there is no ncu.
ncu=${NCU:-$(command -v ncu || true)}
referee() {  # EXERCISE SEED RESULT
  local csv=$out/$student.$1.ncu.csv metrics
  [[ -n $ncu ]] || return 0
  cmake --build "$build" --target attn_report >/dev/null
  metrics=$(awk '/^[a-z]/ && $1 != "section" { printf "%s,", $1 }' "$root/common/scripts/metrics.txt")
  for op in ffma fadd fmul; do metrics+=smsp__sass_thread_inst_executed_op_${op}_pred_on.sum,; done
  "$ncu" --profile-from-start off --csv --print-units base --print-kernel-base mangled --metrics "${metrics%,}" \
    "$build/bin/$1_student" --profile --seed "$2" 2>/dev/null | grep '^"' >"$csv" || return 0
  "$build/bin/attn_report" referee "$3" "$csv" --own _student | paste -sd ';' || true
}

# ---- our programs with these files -----------------------------------------------------------
cuda=()
command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 || cuda=(-DATTN_CUDA=OFF)
# shellcheck disable=SC2086  # several words
cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release "${cuda[@]}" ${ATTN_CMAKE_ARGS:-} \
  -DATTN_STUDENT_DIR="$files" >"$out/$student.log" 2>&1 ||
  { echo "grade.sh: the build could not be configured: $out/$student.log" >&2; exit 1; }

for exercise in "${exercises[@]}"; do
  [[ -z ${verdict[$exercise]} ]] || continue
  chapter=${chapter_of[$exercise]}
  folder=$root/$chapter/exercises
  letter=${exercise: -1}
  if [[ -f $files/$exercise.inc ]]; then
    if ! cmake --build "$build" --target "${exercise}_student" >"$out/$student.$exercise.log" 2>&1; then
      verdict[$exercise]="does not compile: $(grep -m1 -oE 'error: .*' "$out/$student.$exercise.log" || echo "see the log")"
      continue
    fi
    verdict[$exercise]=right points[$exercise]=1
    # The verdict is a file that the program writes when all cases have passed: an exit status can be had early.
    result=$out/$student.$exercise.result.json
    for _ in 1 2 3; do
      rm -f "$result"
      seed=$(od -An -N6 -tu8 /dev/urandom | tr -d ' ')
      status=0
      timeout 300 "$build/bin/${exercise}_student" --seed "$seed" --result "$result" >"$out/$student.$exercise.log" 2>&1 || status=$?
      if [[ $status -ne 0 ]]; then
        why=$(grep -A1 -m1 '^FAIL' "$out/$student.$exercise.log" | tail -n 1 | sed 's/^ *//; s/^FAIL *//')
        [[ $status -ne 124 ]] || why="did not end in 300 s"
        verdict[$exercise]="wrong: ${why:-exit status $status}" points[$exercise]=0
        break
      fi
      if ! grep -q '"passed": true' "$result" 2>/dev/null || ! grep -qE "\"seed\": $seed,?\$" "$result"; then
        verdict[$exercise]="wrong: ended before its cases were done" points[$exercise]=0
        break
      fi
    done
    if [[ ${verdict[$exercise]} = right ]] && grep -q '"speed"' "$result"; then
      objection=$(referee "$exercise" "$seed" "$result")
      if [[ -n $objection ]]; then
        verdict[$exercise]="rejected by the counters: $objection" points[$exercise]=0
      else
        speed[$exercise]=$(sed -nE 's/^ *"ratio": ([0-9.e+-]+),?$/\1/p' "$result")
        points[$exercise]=$(sed -nE 's/^ *"points": ([0-9.e+-]+),?$/\1/p' "$result" | awk '{ printf "%.3f", 0.6 + 0.4 * $1 }')
        verdict[$exercise]=$(awk -v r="${speed[$exercise]}" 'BEGIN { printf "right, %.2f x the time of the shipped step", r }')
      fi
    fi
  else
    cmake --build "$build" --target "quiz_$chapter" >"$out/$student.$exercise.log" 2>&1
    judge=(--task "$folder/$letter.task")
    [[ -f $folder/$letter.key ]] && judge=(--key "$folder/$letter.key")
    status=0
    "$build/bin/quiz_$chapter" --answers "$files/$exercise.txt" "${judge[@]}" \
      >"$out/$student.$exercise.log" 2>&1 || status=$?
    case $status in
      0) verdict[$exercise]=right points[$exercise]=1 ;;
      1) verdict[$exercise]="wrong: $(tail -n 1 "$out/$student.$exercise.log")"
         # Part of the points: "3 of 6 right" or "score 2.5 of 4".
         points[$exercise]=$(sed -nE 's/^(score )?([0-9.]+) of ([0-9]+).*/\2 \3/p' "$out/$student.$exercise.log" |
                             awk 'END { printf "%.3f", ($2 > 0 ? 0.9 * $1 / $2 : 0) }') ;;
      *) verdict[$exercise]="unusable: $(tail -n 1 "$out/$student.$exercise.log")" ;;
    esac
  fi
done

# ---- the results -----------------------------------------------------------------------------
json_text() { printf '%s' "$1" | tr -d '\000-\037' | sed 's/\\/\\\\/g; s/"/\\"/g'; }
html_text() { printf '%s' "$1" | sed 's/&/\&amp;/g; s/</\&lt;/g; s/>/\&gt;/g'; }
count=${#exercises[@]}
total=$(for e in "${exercises[@]}"; do echo "${points[$e]}"; done | awk -v n="$count" '{ s += $1 } END { printf "%.1f", 100 * s / n }')
{
  printf '{"schema": "attn-grade-1", "student": "%s", "points": %s, "exercises": [' "$student" "$total"
  comma=""
  for e in "${exercises[@]}"; do
    printf '%s\n {"name": "%s", "points": %s, "time_over_shipped": %s, "verdict": "%s"}' "$comma" "$e" \
      "$(awk -v p="${points[$e]}" -v n="$count" 'BEGIN { printf "%.2f", 100 * p / n }')" "${speed[$e]:-null}" \
      "$(json_text "${verdict[$e]}")"
    comma=,
  done
  printf '\n]}\n'
} >"$out/$student.json"
[[ -f $out/grades.csv ]] || { printf 'student,points'; printf ',%s' "${exercises[@]}"; echo; } >"$out/grades.csv"
{ printf '%s,%s' "$student" "$total"; for e in "${exercises[@]}"; do printf ',%s' "${points[$e]}"; done; echo; } >>"$out/grades.csv"
{
  cat <<HTML
<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>$student: $total of 100</title>
<style>
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .4rem .8rem; border-bottom: 1px solid #8884; vertical-align: top }
td:nth-child(2) { text-align: right; font-variant-numeric: tabular-nums }
meter { width: 100%; height: 1.2rem }
</style>
<h1>$student: $total of 100</h1>
<meter min="0" max="100" value="$total">$total of 100</meter>
<p>Graded on $(date -u +%Y-%m-%d), $([[ ${#cuda[@]} -eq 0 ]] && echo "on the emulator and on a GPU" || echo "on the emulator: there was no GPU, speed is not graded").
<table>
<tr><th>exercise<th>points<th>verdict
HTML
  for e in "${exercises[@]}"; do
    printf '<tr><td><a href="%s">%s</a><td>%s<td>%s\n' "../../${chapter_of[$e]}/exercises/${e: -1}.md" "$e" \
      "$(awk -v p="${points[$e]}" -v n="$count" 'BEGIN { printf "%.1f of %.1f", 100 * p / n, 100 / n }')" "$(html_text "${verdict[$e]}")"
  done
  echo '</table>'
} >"$out/$student.html"
for e in "${exercises[@]}"; do printf '%s  %-5s %s\n' "$e" "${points[$e]}" "${verdict[$e]}"; done
echo "$student: $total of 100"
