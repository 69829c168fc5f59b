#!/usr/bin/env bash
# edit_awk.sh ROOT: what edit.awk changes, what it refuses.
set -euo pipefail
edit=$1/common/cmake/edit.awk
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

printf '%s\n' 'a();  // first' '// about b' 'b(1,   2);' 'c();' 'b(3);' 'c();' 'd();' >text
apply() { awk -v out=got. -f "$edit" edits text; }
same() {  # NAME LINE...
  local name=$1
  shift
  diff <(printf '%s\n' "$@") "got.$name" || { echo "in $name"; exit 1; }
}
refused() {  # WORDS LINE...
  local words=$1 said
  shift
  printf '%s\n' "$@" >edits
  if said=$(apply 2>&1); then echo "not refused: $*"; exit 1; fi
  [[ $said == *"$words"* ]] || { echo "'$words' is not in '$said'"; exit 1; }
}

# Comments and blanks do not matter; lines without code stay; both places are of the text as it was.
printf '%s\n' '# wrong answers' '' '== no_b' '! says: b' '-b(1, 2);  // gone' '' '== swapped' ' a();' '+b(1, 2);' '@@' \
  '-b(1, 2);' '' '== no_d of no_b' '-d();' >edits
[[ $(apply) == $'no_b\tsays: b\nswapped\t\nno_d\t' ]]
same no_b '// says: b' 'a();  // first' '// about b' 'c();' 'b(3);' 'c();' 'd();'
same swapped 'a();  // first' 'b(1, 2);' '// about b' 'c();' 'b(3);' 'c();' 'd();'
same no_d 'a();  // first' '// about b' 'c();' 'b(3);' 'c();'
# Lines that come before the first.
printf '%s\n' '== ahead' '+z();' ' a();' >edits
apply >/dev/null
same ahead 'z();' 'a();  // first' '// about b' 'b(1,   2);' 'c();' 'b(3);' 'c();' 'd();'
# Marks of timelines may stand between lines.
cp text unmarked
sed '2a ATTN_SPAN("b")' unmarked >text
printf '%s\n' '== marked' ' a();' '-b(1, 2);' >edits
apply >/dev/null
same marked 'a();  // first' '// about b' 'ATTN_SPAN("b")' 'c();' 'b(3);' 'c();' 'd();'
mv unmarked text
# By numbers, with what is said as the title; a file that is right already is not written again.
printf '%s\n' '== reads a register of the accumulators' '-d();' >edits
[[ $(awk -v numbered=1 -v out=n. -f "$edit" edits text) == $'1\treads a register of the accumulators' ]]
touch -d '2001-01-01' n.1
awk -v numbered=1 -v out=n. -f "$edit" edits text >/dev/null
[[ n.1 -ot text ]] || { echo "written again"; exit 1; }

refused 'edits:1: does not occur: e();' '== x' '-e();'
refused 'edits:3: occurs more than once: c();' '== fine' '-d();' '== x' '-c();'
refused 'does not occur: b(1, 2);' '== x' ' b(1, 2);' '-b(3);'
refused 'a place without a line that finds it' '== x' '+e();'
refused 'edits:1: no earlier entry y' '== x of y' '-d();'
refused 'no earlier entry x' '== x of x' '-d();'
refused 'edits:3: a second entry x' '== x' '-d();' '== x' '-a();'
refused 'must be "== name"' '==x' '-d();'
refused 'begins with none of' 'x();' '== x' '-d();'
refused 'no entry' '# nothing'
refused 'changes nothing' '== x' ' d();'
refused 'of an entry' '== x' '!says: x' '-d();'
refused 'of an entry' '== x' '! a' '! b' '-d();'
refused 'edits:2: begins with none of' '== x' 'd();'
echo "everything as expected"
