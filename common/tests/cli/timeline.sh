#!/usr/bin/env bash
# timeline.sh TEST PYTHON ATTN_REPORT 06_FLASH_V3_HOPPER 03_FLASH_V1 05_FLASH_DECODING: --timeline
# and `attn_report timeline`, as a user calls them. TEST is one of the functions below.
set -euo pipefail
test=$1 python=$2 report=$3 hopper=$4 flash=$5 decoding=$6
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() { echo "FAILED: $*"; exit 1; }
# record STEP FILE [OPTION ...]: chapter 06, some tiles of queries and keys
record() {
  "$hopper" --device emulated --step "$1" --seqlen 512 --head-dim 128 --heads 1 --timeline "$2" \
    "${@:3}" >"$work/stdout"
}
events() { "$python" "$here/timeline_events.py" "$@"; }

events_nest() {  # and pair, in steps of each kind of copy
  local step
  for step in v5 v6 v7 v8; do
    record "$step" "$work/$step.json"
    grep -q '^v[5-8]_[a-z_]* *pass' "$work/stdout" || fail "$step: the output is not checked"
    grep -q '^timeline: .* of a model, not a measurement$' "$work/stdout" || fail "$step: no model"
    events "$work/$step.json"
  done
  "$flash" --device emulated --step v6 --seqlen 128 --timeline "$work/03.json" >/dev/null
  events "$work/03.json"
  "$decoding" --device emulated --step v8 --seqlen-k 512 --timeline "$work/05.json" >/dev/null
  events "$work/05.json"
  # Many atomics: threads that yield at each of them do not spin.
  "$hopper" --device emulated --operation backward --step b2 --head-dim 64 --seqlen 192 \
    --timeline "$work/06b2.json" >/dev/null
  events "$work/06b2.json"
}

same_bytes() {
  record v6 "$work/a.json"
  record v6 "$work/b.json"
  cmp "$work/a.json" "$work/b.json" || fail "two runs differ"
  record v6 "$work/c.json" --check off
  cmp "$work/a.json" "$work/c.json" || fail "without checks the file differs"
}

limit() {
  local whole bytes
  record v6 "$work/whole.json"
  whole=$(stat -c %s "$work/whole.json")
  ! grep -q 'left out' "$work/stdout" || fail "something is left out below 5 MB"
  record v6 "$work/blocks.json" --timeline-limit 0.2
  bytes=$(stat -c %s "$work/blocks.json")
  [[ $bytes -le 200000 && $bytes -lt $whole ]] || fail "$bytes bytes, at most 200000"
  grep -q 'left out, .*: [1-3] of 4 blocks$' "$work/stdout" || fail "no line on blocks"
  grep -q '"left_out":"[1-3] of 4 blocks"' "$work/blocks.json" || fail "the file does not say so"
  events "$work/blocks.json"
  # Time and number of blocks are those of the launch, not of the rest.
  "$report" timeline "$work/blocks.json" >"$work/text"
  whole=$(sed -n 's/.* \(4 blocks, [0-9.]* us\) of.*/\1/p' "$work/stdout")
  grep -q "^$whole" "$work/text" || fail "attn_report: $(sed -n 2p "$work/text")"
  grep -q 'left out of the file: .*; times and shares below are of the rest' "$work/text" ||
    fail "attn_report does not say that blocks are left out"
  record v6 "$work/window.json" --timeline-limit 0.04
  bytes=$(stat -c %s "$work/window.json")
  [[ $bytes -le 40000 ]] || fail "$bytes bytes, at most 40000"
  grep -q 'left out, .*: 3 of 4 blocks and what ends after [0-9.]* us$' "$work/stdout" ||
    fail "no line on the window"
  events "$work/window.json"
}

refusals() {
  local message
  # refused MESSAGE OPTION ...: one line, exit 2, no file
  refused() {
    message=$1
    shift
    bash "$here/expect.sh" "$hopper" 2 stderr "$message" -- --seqlen 128 --head-dim 64 "$@"
    [[ ! -e $work/t.json && ! -e $work/t.json.part ]] || fail "a file after: $*"
  }
  local t=$work/t.json
  refused 'records one step: --step NAME' --timeline "$t"
  refused 'records one step: --step NAME' --timeline "$t" --step v5,v6
  if ! "$hopper" --device gpu --step v6 --seqlen 128 --head-dim 64 >/dev/null; then  # no GPU
    bash "$here/expect.sh" "$hopper" 77 stdout 'a GPU is required' -- --seqlen 128 --head-dim 64 \
      --timeline "$t" --step v6 --device gpu
    [[ ! -e $t && ! -e $t.part ]] || fail "a file without a GPU"
  else
    refused 'v3_wgmma has no marks .*: v5_warp_specialised, v6_pingpong, .* can' \
      --timeline "$t" --step v3 --device gpu
  fi
  refused 'not together with --time: ' --timeline "$t" --step v6 --time
  refused 'not together with --profile: ' --timeline "$t" --profile v6
  refused 'not together with --schedule: ' --timeline "$t" --step v6 --schedule 3
  refused '--timeline-limit: needs --timeline FILE' --step v6 --timeline-limit 1
  refused '--timeline-limit' --timeline "$t" --step v6 --timeline-limit none
  refused '--timeline-limit 0.05: must be at least 0.1 for a page' --timeline "$work/t.html" \
    --step v6 --timeline-limit 0.05
  refused '--timeline .*: must end with .html, .* or .json' --timeline "$work/t.txt" --step v6
  refused '--timeline .*: must end with .html, .* or .json' --timeline "$work/json" --step v6
  refused '--timeline .*: not the file of --json' --timeline "$t" --json "$t" --step v6
  mkdir "$work/folder.json"
  refused '--timeline .*: cannot be written' --timeline "$work/folder.json" --step v6
  refused '--timeline .*: cannot be written' --timeline "$work/nowhere/t.json" --step v6
  # A disk that is full: a file may not grow, and an older one stays.
  echo old >"$work/full.json"
  local status=0
  (trap '' XFSZ; ulimit -f 8; record v6 "$work/full.json") 2>"$work/stderr" || status=$?
  [[ $status -eq 2 ]] || fail "exit $status on a full disk, expected 2"
  [[ $(wc -l <"$work/stderr") -eq 1 ]] || fail "not one line: $(cat "$work/stderr")"
  grep -q -- '--timeline .*: could not be written completely' "$work/stderr" || fail "another line"
  [[ $(cat "$work/full.json") == old ]] || fail "the older file is gone"
  [[ ! -e $work/full.json.part ]] || fail "something half-written stays"
}

marks() {  # what a recorded build must know of them
  printf '%s\n' '  ATTN_SPAN("a, b")' '' '  ATTN_SPAN_END("a, b")' '  ATTN_SPAN("c")' \
    '  ATTN_SPAN("a, b")' 'x  // ATTN_SPAN("d")' >"$work/step.cu"
  "${AWK:-awk}" -f "$here/../../cmake/recorded.awk" "$work/step.cu" >"$work/defines"
  printf '%s\n' '#define ATTN_RECORD_MARKS {"a, b", "c"}' '#define ATTN_RECORD_ENDED , 1' |
    cmp - "$work/defines" || fail "$(cat "$work/defines")"
  echo 'a step without marks' >"$work/step.cu"
  [[ -z $("${AWK:-awk}" -f "$here/../../cmake/recorded.awk" "$work/step.cu") ]] ||
    fail "marks in a step without any"
}

alternation() {  # two warpgroups compute their softmax at the same time in v5, hardly in v6
  local v5 v6
  record v5 "$work/v5.json" --seqlen 1024
  record v6 "$work/v6.json" --seqlen 1024
  v5=$(events "$work/v5.json" softmax)
  v6=$(events "$work/v6.json" softmax)
  echo "softmax in both warpgroups at once: v5 $v5 %, v6 $v6 % of its time"
  awk -v a="$v5" -v b="$v6" 'BEGIN { exit !(a > 25 && b < 10) }' || fail "v6 does not alternate"
  # attn_report counts the same.
  "$report" timeline "$work/v6.json" >"$work/summary"
  awk -v b="$v6" '$1 == "softmax" { d = $4 - b; exit !(d < 0.2 && d > -0.2) }' "$work/summary" ||
    fail "attn_report: $(grep '^ *softmax' "$work/summary")"
}

compare() {
  record v5 "$work/v5.json" --seqlen 1024
  record v6 "$work/v6.json" --seqlen 1024
  "$report" timeline "$work/v5.json" "$work/v6.json" >"$work/text"
  cat "$work/text"
  local line
  for line in 'a model of an H100 or H200, not measurements' \
    '^A block takes .* 0\.8[0-9] of the time\.$' \
    '^The tensor core is busy for more of the time: ' \
    '^special-function unit and tensor core are busy at the same time for more of it: ' \
    '^Warps that wait at wgmma_wait do so for less of their time: ' \
    '^Two warpgroups are in softmax at once for less of its time: ' \
    '^The longest chain is mostly ' \
    '^wait: named barrier 1  *-  *[0-9]* %$'; do
    grep -q "$line" "$work/text" || fail "no line $line"
  done
  record v6 "$work/v6.html" --seqlen 1024  # a page has the same data
  cmp <("$report" timeline "$work/v6.html" | sed 's/v6\.html/v6.json/') \
    <("$report" timeline "$work/v6.json") || fail "attn_report finds other data in a page"
  "$report" timeline "$work/v5.json" "$work/v5.json" >"$work/text"
  ! grep -q -e 'for more' -e 'for less' "$work/text" || fail "a file differs from itself"
  sed '2s/"chapter"/"failed":"race: x",&/' "$work/v6.json" >"$work/failed.json"
  "$report" timeline "$work/failed.json" | grep -q '^The launch failed: race: x$' ||
    fail "a failed launch"
  # No timelines: a folder, and an arrow from a block without spans.
  local event='"tid":1,"id":1,"name":"n","cat":"wait"'
  {
    printf '{"otherData":{"what":"x","chapter":"c","step":"s","problem":"p"},"traceEvents":['
    printf '{"ph":"X","pid":1,"ts":0,"dur":1,%s},{"ph":"s","pid":9,"ts":0.5,%s},' "$event" "$event"
    printf '{"ph":"f","pid":1,"ts":1,%s}]}' "$event"
  } >"$work/arrow.json"
  bash "$here/expect.sh" "$report" 2 stderr 'cannot be read' -- timeline "$work"
  bash "$here/expect.sh" "$report" 2 stderr 'of a block without spans' -- \
    timeline "$work/arrow.json"
  # A file that says that it was measured. None of a GPU is here: this is the model's.
  sed -e '2s/"what":"[^"]*"/"what":"measured on NVIDIA X1 (docs)"/' \
    -e '2s/"what"/"warning":"Recording costs 9 %",&/' \
    -e '2s/"chapter"/"sms":{"busy":0.5,"waiting":0.3,"idle":0.2},&/' \
    "$work/v6.json" >"$work/gpu.json"
  "$report" timeline "$work/gpu.json" >"$work/text"
  for line in '^[0-9]* blocks, .* us, measured on NVIDIA X1$' '^Recording costs 9 %.$' \
    '^  waiting  *30\.0 %$'; do
    grep -q "$line" "$work/text" || fail "no line $line of a measured file"
  done
  "$report" timeline "$work/v6.json" "$work/gpu.json" >"$work/text"
  for line in '^A is a model of an H100 or H200, B is measured on NVIDIA X1: compare shares, ' \
    '^B: Recording costs 9 %.$' '^wait: wgmma_wait  *\([0-9]*\) %  *\1 %$'; do
    grep -q "$line" "$work/text" || fail "no line $line of a model and a measured file"
  done
  "$report" timeline "$work/gpu.json" "$work/gpu.json" >"$work/text"
  grep -q '^Both are measured on NVIDIA X1\.$' "$work/text" || fail "not both are measured"
  echo '{}' >"$work/none.json"
  bash "$here/expect.sh" "$report" 2 stderr 'is no timeline: must be' -- timeline "$work/none.json"
  bash "$here/expect.sh" "$report" 2 stderr 'cannot be read' -- timeline "$work/nowhere.json"
}

answers() {  # of ex06i and ex05f, which somebody else reads in a picture
  local step
  # holds FILE CONDITION: awk's, on the lines of the summary; `us` is the whole time.
  holds() {
    "$report" timeline "$work/$1.json" | awk "/ of a model/ { us = \$3 } $2 { found = 1 }
      END { exit !found }" || fail "$1: $2"
  }
  for step in v5 v6 v7; do record "$step" "$work/$step.json" --seqlen 1024 --heads 2; done
  holds v6 '$1 == "v_empty" && $2 > 50'
  holds v6 '$1 == "k_empty" && $2 < 50'
  holds v5 '$1 == "softmax" && $4 > 20'
  holds v6 '$1 == "softmax" && $4 < 20'
  holds v7 '$1 == "softmax" && $4 < 20'
  holds v6 '/^ *wgmma of .* in flight/ && $(NF - 4) > us / 3'
  holds v6 '/^ *instructions in softmax/ && $(NF - 4) > us / 3'
  for step in v2 v3; do
    "$decoding" --device emulated --step "$step" --head-dim 128 --seqlen-k 16384 --check off \
      --timeline "$work/$step.json" >/dev/null
  done
  holds v2 '/^ *global loads .*%/ && $3 > 50'
  holds v3 '/^ *cp_async_wait .*%/ && $2 > 20'
}

"$test"
echo "everything as expected"
