#!/usr/bin/env bash
# memory_view_exercise.sh PYTHON JUDGE_01_NAIVE CHECK_EX01B CHECK_EX01A: a failing exercise names
# the command that writes a page of its launch, and that command does.
set -euo pipefail
python=$1 judge=$2 ex01b=$3 ex01a=$4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

fail() { echo "FAILED: $*"; exit 1; }
# fails EXERCISE PROGRAM VARIANT: runs the command of the judge's last line
fails() {
  "$judge" "$1" --program "$2" --variant "$3" >judged && fail "$1 $3 passes"
  local command
  command=$(tail -n 1 judged | sed -n "s/^ *see it: //p")
  [[ $command == "$judge $1 --seed 1 --case "*" --timeline $1.html" ]] ||
    fail "the last line is: $(tail -n 1 judged)"
  $command --program "$2" --variant "$3" >seen 2>&1 ||
    [[ $? -eq 1 ]] || fail "$command: $(cat seen)"
  grep -q "^timeline: .*$1.html, " seen || fail "no page: $(cat seen)"
  grep -q 'id="memory">' "$1.html" || fail "no shared memory in $1.html"
}

fails ex01b "$ex01b" stub
grep -q '"problem":"[^"]* inputs=needle seed=1"' ex01b.html || fail "another problem in ex01b.html"
# The worst read of the stub has 16 wavefronts, that of the solution 1.
worst() {
  "$python" - "$1" <<'PYTHON'
import json
import sys

text = open(sys.argv[1], encoding="utf-8").read()
begin = text.index('id="memory">') + len('id="memory">')
memory = json.loads(text[begin : text.index("</script>", begin)])
reads = [n for n, site in enumerate(memory["sites"]) if "v5_register_tiles" in site[0] and
         site[1] == "read"]
block = memory["blocks"][0]
print(max(memory["shapes"][q][1] for s, q in zip(block["s"], block["q"]) if s in reads))
PYTHON
}
[[ $(worst ex01b.html) == 16 ]] || fail "the stub's worst read has $(worst ex01b.html) wavefronts"
"$judge" ex01b --program "$ex01b" --variant solution --case 1 --timeline solution.html >seen
[[ $(worst solution.html) == 1 ]] ||
  fail "the solution's worst read has $(worst solution.html) wavefronts"
grep -q '^case 1: pass$' seen || fail "the case is not judged: $(cat seen)"
! "$judge" ex01b --timeline t.json 2>refused || fail "a page that ends with .json"
grep -q -- '--timeline t.json: must end with .html' refused || fail "$(cat refused)"
"$judge" ex01a --program "$ex01a" --variant stub >judged && fail "the stub of ex01a passes"
tail -n 1 judged | grep -q '^ *see it: .* ex01a --seed 1 --case 1 --timeline ex01a.html$' ||
  fail "the last line is: $(tail -n 1 judged)"
echo "everything as expected"
