#!/usr/bin/env bash
# memory_view.sh TEST PYTHON MEMORY_CHAPTER: the memory panel of a page of `--timeline FILE.html`.
# TEST is one of the functions below. Those that need a browser are skipped (77) without Chromium.
set -euo pipefail
test=$1 python=$2 program=$3
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# shellcheck source=common/tests/cli/browser.sh
source "$here/browser.sh"

# record STEP FILE [OPTION ...]: exit status in $status
record() {
  status=0
  "$program" --device emulated --dtype fp32 --heads 1 --seqlen 32 --head-dim 32 --step "$1" \
    --timeline "$2" "${@:3}" >"$work/stdout" 2>"$work/stderr" || status=$?
}
line_of() { grep -n "at: $1\$" "$here/../memory_chapter.cpp" | cut -d: -f1; }

# use PAGE WIDTH light|dark EXPECTED: runs memory_view_test.js in the page.
use() {
  {
    echo "const expected = {lines: {copy: $(line_of copy), write: $(line_of write)," \
      "read: $(line_of read)}, $4};"
    cat "$here/memory_view_test.js"
  } >"$work/test.js"
  use_page "$1" "$work/test.js" "$2" 1000 "$3"
}

unpadded() {
  record v1_unpadded "$work/t.html"
  [[ $status -eq 0 ]] || fail "exit $status"
  use "$work/t.html" 1440 light 'wavefronts: 32, stride: 32'
}

padded() {
  record v2_padded "$work/t.html"
  use "$work/t.html" 1440 dark 'wavefronts: 1, stride: 33'
}

swizzled() {
  record v3_swizzled "$work/t.html"
  use "$work/t.html" 1440 light 'wavefronts: 1, stride: 32'
}

narrow() {
  record v1_unpadded "$work/t.html"
  use "$work/t.html" 390 dark 'wavefronts: 32, stride: 32'
}

race() {  # a page is written of the failing launch
  record v4_race "$work/t.html" --races
  [[ $status -eq 1 ]] || fail "exit $status with a race, expected 1"
  use "$work/t.html" 1440 light 'wavefronts: 1, stride: 33, race: true'
  record v2_padded "$work/t.html" --races
  [[ $status -eq 0 ]] || fail "exit $status without a race"
  grep -q '"races":\[\]' "$work/t.html" || fail "a race where there is none"
}

many_spans() {  # the panel is open while the picture of many spans moves
  record v1_unpadded "$work/t.html"
  "$python" "$here/timeline_page.py" synthetic "$work/t.html" 100000 "$work/many.html"
  use "$work/many.html" 1440 light 'wavefronts: 32, stride: 32'
}

same_bytes() {  # and within the limit
  record v1_unpadded "$work/a.html"
  record v1_unpadded "$work/b.html"
  cmp "$work/a.html" "$work/b.html" || fail "two runs differ"
  record v1_unpadded "$work/whole.html" --heads 100
  ! grep -q 'left out' "$work/stdout" || fail "something is left out below 5 MB"
  record v1_unpadded "$work/limit.html" --heads 100 --timeline-limit 0.15
  [[ $(stat -c %s "$work/limit.html") -le 200000 ]] || fail "a page above its limit"
  grep -q 'left out, .*shared memory of [0-9]* of 100 blocks' "$work/stdout" ||
    fail "no line on what is left out: $(cat "$work/stdout")"
  grep -q '"left_out":"shared memory of [0-9]* of 100 blocks"' "$work/limit.html" ||
    fail "the page does not say what is left out"
}

"$test"
echo "everything as expected"
