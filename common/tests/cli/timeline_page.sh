#!/usr/bin/env bash
# timeline_page.sh TEST PYTHON 06_FLASH_V3_HOPPER: the page of `--timeline FILE.html`. TEST is one
# of the functions below. Those that need a browser are skipped (77) without Chromium.
set -euo pipefail
test=$1 python=$2 hopper=$3
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# shellcheck source=common/tests/cli/browser.sh
source "$here/browser.sh"

# record FILE [OPTION ...]
record() {
  "$hopper" --device emulated --step v6 --seqlen 512 --head-dim 128 --heads 1 --timeline "$@" \
    >"$work/stdout"
}
edit() { "$python" "$here/timeline_page.py" "$@"; }

# use PAGE WIDTH light|dark
use() { use_page "$1" "$here/timeline_page_test.js" "$2" 900 "$3"; }

same_data() {  # as the JSON file of the same run, and a limit counts the whole page
  record "$work/t.html"
  grep -q '^timeline: .*t.html, .* of a model, not a measurement$' "$work/stdout" ||
    fail "no line on the page"
  record "$work/t.json"
  edit same "$work/t.html" "$work/t.json"
  record "$work/limit.html" --timeline-limit 0.2
  [[ $(stat -c %s "$work/limit.html") -le 200000 ]] || fail "a page above its limit"
  grep -q '"left_out":"[1-3] of 4 blocks"' "$work/limit.html" || fail "left_out is missing"
}

used() {
  need_browser
  record "$work/t.html"
  record "$work/t.json"
  use "$work/t.html" 1440 light
  local spans
  spans=$(grep '^{"ph":"[Xb]"' "$work/t.json" | grep -vc '"cat":"exit"')
  grep -q "^spans $spans," "$work/result" || fail "$spans spans in the file"
}

narrow() {  # a telephone, at night
  need_browser
  record "$work/t.html"
  use "$work/t.html" 390 dark
}

many_spans() {
  need_browser
  record "$work/t.html"
  edit synthetic "$work/t.html" 100000 "$work/many.html"
  use "$work/many.html" 1440 light
}

"$test"
echo "everything as expected"
