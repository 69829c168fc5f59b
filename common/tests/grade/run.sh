#!/usr/bin/env bash
# run.sh ROOT: the grader gives full points to right answers, none to cheats, also when two of them run at once. One exercise
# of each kind; what the filter refuses as text is in filter.sh, programs that lie in judge.sh.
set -euo pipefail
root=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
region() { awk -v m="//! [$2]" 'index($0, m) { inside = !inside; next } inside' "$root/01_naive/$1.cu"; }
wrong() {  # LETTER NAME TEXT: a planted wrong answer (edit.awk)
  awk -v out="$work/wrong_" -f "$root/common/cmake/edit.awk" "$root/01_naive/exercises/$1.mutants" "$3" >/dev/null
  cat "$work/wrong_$2"
}
expect() { grep -qE "$2" <<<"$1" || { printf 'expected %s in\n%s\n' "$2" "$1"; cat "$work"/out/*/*.log | tail -n 40; exit 1; }; }

mkdir -p "$work/good/answers" "$work/lies" "$work/calls" "$work/luck"
region v1_global ex01a >"$work/good/ex01a.inc"
region v5_register_tiles ex01b >"$work/good/answers/ex01b.inc"
region v12_cp_async ex01c >"$work/good/ex01c.inc"
for letter in d e; do cp "$root/01_naive/exercises/$letter.solution.txt" "$work/good/ex01$letter.txt"; done

# Says that it has passed, and writes nothing.
{ echo 'if (row == 0) printf("{\"passed\": true, \"seed\": 1}\nall 27 cases pass\n");'; echo 'if (row >= 0) return;'
  region v1_global ex01a; } >"$work/lies/ex01a.inc"
# Says of a layout with conflicts that it has none: to whoever asks in its own program.
{ echo 'struct NoConflicts { static constexpr int conflicts() { return 0; } };'
  echo 'template <class F> constexpr NoConflicts shared_access(F, int) { return {}; }'
  cat "$root/01_naive/exercises/b.stub.inc"; } >"$work/lies/ex01b.inc"
# A string that looks like a comment, and behind it the end of the program.
{ echo '(void)"//"; (exit)(0);'; region v12_cp_async ex01c; } >"$work/lies/ex01c.inc"
wrong d swapped "$root/01_naive/exercises/d.solution.txt" >"$work/lies/ex01d.txt"
wrong e tensor_bound "$root/01_naive/exercises/e.solution.txt" >"$work/lies/ex01e.txt"

# Functions of the system under any name: a program, a file of the judge's, the solution in the build folder.
{ echo 'if (row == 0) popen("cp ../v1_global.cu .", "r");'; region v1_global ex01a; } >"$work/calls/ex01a.inc"
{ region v5_register_tiles ex01b
  echo 'const auto solution = (fopen)("build/release/01_naive/exercises/ex01b/solution.cu", "r");'
} >"$work/calls/ex01b.inc"
{ echo 'emulated::v12_cp_async::launch(*args);'; region v12_cp_async ex01c; } >"$work/calls/ex01c.inc"

# An output that is right for one problem alone; the right answer and a write to another place besides.
{ echo 'if (shape.seqlen_k == 1) { p[0] = 1; gLse[bh * shape.seqlen_q + row] = s[0] * shape.softmax_scale; return; }'
  wrong a mask_off_by_one "$work/good/ex01a.inc"; } >"$work/luck/ex01a.inc"
{ region v1_global ex01a; echo 'gLse[-3] = 0;'; } >"$work/luck/ex01a_guard"

# Its progress, too.
grade() { "$root/common/scripts/grade.sh" "$work/$1" --out "$work/out" 2>&1; }
grade good >"$work/good.txt" &
good=$!
lies=$(grade lies)
wait "$good"
good=$(<"$work/good.txt")
each=$(sed -nE 's/.*"points_per_exercise": ([0-9.]+).*/\1/p' "$work/out/good.json")
for e in a b c d e; do expect "$good" "ex01$e  $each +right$"; done
expect "$lies" 'ex01a  0\.00 +wrong: emulated: .*seqlen_q=1 .*seed=.*got -?nan'
expect "$lies" 'ex01b  0\.00 +wrong: 16 threads that read one column have 15 bank conflicts'
expect "$lies" 'ex01c  0\.00 +refused: it calls exit, '
expect "$lies" 'ex01d  .* +wrong: 4 of 6 right'
expect "$lies" 'ex01e  .* +wrong: score 3\.00 of 4'
again=$(sed -nE 's/.*"ex01a".*"again": "build\/release\/bin\/(judge_01_naive ex01a --seed [0-9]+ --case 1)".*/\1/p' "$work/out/lies.json")
[[ -n $again ]] || { echo "no command shows the failure again:"; cat "$work/out/lies.json"; exit 1; }

calls=$(grade calls)
expect "$calls" 'ex01a  0\.00 +refused: it calls popen, '
expect "$calls" 'ex01b  0\.00 +refused: it calls fopen, '
expect "$calls" 'ex01c  0\.00 +refused: line 1: emulated '
luck=$(grade luck)
expect "$luck" 'ex01a  0\.00 +wrong: '
mv "$work/luck/ex01a_guard" "$work/luck/ex01a.inc"
expect "$(grade luck)" 'ex01a  0\.00 +wrong: .*(guard|outside|before)'

[[ $(wc -l <"$work/out/grades.csv") -eq 6 ]]
grep -qE "^good,[0-9.]+,$each,$each,$each,$each,$each," "$work/out/grades.csv"  # the same points as in the JSON
python3 -c 'import json, sys; [json.load(open(p)) for p in sys.argv[1:]]' "$work"/out/*.json 2>/dev/null || ! command -v python3 >/dev/null
# A page is read elsewhere: it names the tasks, and nothing of this machine.
expect "$(<"$work/out/good.html")" '<td>ex01a: .*<td class="good">right'
for page in "$work"/out/*.html "$work"/out/*.json "$work"/out/*.csv; do
  if grep -nE "href=|$root|$work" "$page"; then echo "$page: of this machine"; exit 1; fi
done
# Whoever waits is told what is built, how far it is, and each verdict.
expect "$good" '^grade.sh: good: 5 of [0-9]+ exercises are handed in$'
expect "$good" '^grade.sh: good: build 5 programs: ex01a_student judge_01_naive .*\(log: '
expect "$good" '^grade.sh: good: judge 3 kernels, each under three seeds$'
expect "$good" '^grade.sh: good: ex01b: right$'
if "$root/common/scripts/grade.sh" "$work/nosuch" 2>/dev/null; then exit 1; fi
echo "everything as expected"
