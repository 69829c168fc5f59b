#!/usr/bin/env bash
# student_edition.sh ROOT: the edition for students has every exercise and no answer, nor a history with one.
set -euo pipefail
shopt -s nullglob
root=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
out=$work/edition
fail() { echo "$1"; exit 1; }

cmake -P "$root/common/cmake/student_edition.cmake" "$out" >/dev/null 2>&1 || fail "the script failed"
if cmake -P "$root/common/cmake/student_edition.cmake" "$out" >/dev/null 2>&1; then fail "a folder that is not empty was taken"; fi
leaks=$(find "$out" -name '*.mutants' -o -name '*.solution.*' -o -name .git -o -name .ci -o -path "$out/build")
[[ -z $leaks ]] || fail "in the edition: $leaks"
if grep -q 'exercises/student' "$out/.gitignore"; then fail "students cannot commit their files"; fi

count=0
for stub in "$root"/0*/exercises/*.stub.inc; do
  chapter=$(basename "$(dirname "$(dirname "$stub")")")
  letter=$(basename "$stub" .stub.inc)
  exercise=ex${chapter:0:2}$letter
  cmp -s "$stub" "$out/$chapter/exercises/student/$exercise.inc" || fail "$exercise does not begin as its stub"
  step=$(grep -lF "//! [$exercise]" "$root/$chapter"/*.cu "$root/$chapter"/kernels/*.h) || fail "$exercise: no step has its region"
  region() { awk -v m="//! [$exercise]" 'index($0, m) { inside = !inside; next } inside && NF' "$1"; }
  [[ $(region "$out/${step#"$root"/}") == "#include \"exercises/student/$exercise.inc\"" ]] ||
    fail "$step: the region of $exercise is still there"
  count=$((count + 1))
done
[[ $count -gt 0 ]] || fail "no exercises"

# What an exercise asks for stands nowhere in the edition, neither in other steps nor in pages or
# tests; nor do the answers to a quiz.
mkdir "$work/answers"
for stub in "$root"/0*/exercises/*.stub.inc; do
  chapter=$(dirname "$(dirname "$stub")")
  letter=$(basename "$stub" .stub.inc)
  exercise=ex$(basename "$chapter" | cut -c 1-2)$letter
  # A function that checks the answer is none.
  awk -v m="//! [$exercise]" 'index($0, m) { inside = !inside; checks = 0; next }
    /free_of_conflicts|static_assert/ { checks = 1 } inside && !checks' \
    "$chapter"/*.cu "$chapter"/kernels/*.h >"$work/answers/$exercise"
  [[ -s $work/answers/$exercise ]] || fail "$exercise: no region"
done
# leaks FOLDER: what stands in its files.
leaks() {
  find "$1" -type f ! -name '*.npy' ! -path '*/exercises/student/*' ! -name '*.stub.inc' \
    ! -path "*/build/*" ! -path "*/.git/*" ! -size +2000k -print0 |
    xargs -0 -n 5000 env LC_ALL=C awk -f "$root/common/tests/grade/leaks.awk" \
    kind=answer "$work"/answers/* kind=given "$root"/0*/exercises/*.stub.inc \
    kind=quiz "$root"/0*/exercises/*.solution.txt kind=text
}
leaks "$out" >"$work/leaks" || fail "in the edition stand answers:
$(cat "$work/leaks")"
if leaks "$root" >"$work/leaks"; then fail "the suite has answers, and none is found"; fi
for exercise in "$work"/answers/*; do
  name=$(basename "$exercise")
  grep -q ": $name: " "$work/leaks" || fail "$name: is not found in the suite"
done
grep -q 'answers.sh: e.solution.txt: ' "$work/leaks" || fail "arithmetic of a quiz is not found"

# A right answer is right there too, whatever the other exercises of its step are.
cmake -DROOT="$root" -DEDITION="$out" -DWORK="$work" -P "$root/common/tests/grade/regions.cmake" ||
  fail "an exercise is not built from the shipped step"
echo "$count exercises, no answers"
