#!/usr/bin/env bash
# verify_on_gpu.sh SCRIPTS EXPORT ATTN_REPORT: what verify_on_gpu.sh and sanitize.sh run, and what is recorded then,
# with stand-ins for the chapter programs, nvidia-smi, ncu, compute-sanitizer and Python that write down how they were called. EXPORT
# is what ncu "counted".
# shellcheck disable=SC2016  # the bodies of stand-ins are expanded when they run
set -euo pipefail
scripts=$1
EXPORT=$(realpath "$2")
export EXPORT
report=$(realpath "$3")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export ATTN_PROBLEM_LISTS=$work
tree="$work/a tree"
bin=$tree/build/release/bin
reports=$tree/docs/reports/h200
mkdir -p "$tree/common/scripts" "$tree/common/attn" "$bin" "$work/with"
cp "$report" "$bin/attn_report"
echo "constexpr int kWarp = 32;" >"$tree/common/attn/kernel.h"
cp "$scripts"/*.sh "$scripts/metrics.txt" "$tree/common/scripts"
# Fewer lengths: each problem is a call.
sed -i -e 's/^kMemoryLengths=.*/kMemoryLengths="1024 131072"/' \
  -e 's/for n in 1024 2048 4096 8192 16384; do/for n in 2048 16384; do/' \
  -e 's/for n in 1024 2048 4096 8192; do/for n in 2048; do/' \
  "$tree/common/scripts/gpu_problems.sh"
exceptions=$tree/common/scripts/sanitizer_exceptions.txt
sed '/^tool/,$d' "$scripts/sanitizer_exceptions.txt" >"$exceptions"
for chapter in 01_naive 02_online_softmax 03_flash_v1; do
  mkdir "$tree/$chapter"
  echo "$chapter" >"$tree/$chapter/chapter.cpp"
  case $chapter in
    01_naive) steps=(v1_first b2_second) ;;
    02_online_softmax) steps=(v1_three_pass v4_one_read v6_softmax_topk v7_attention_row) ;;
    03_flash_v1) steps=(v1_scalar v5_mma v10_exp2 b1_scalar b3_constant_tiles b6_async b7_grid) ;;
  esac
  for step in "${steps[@]}"; do
    echo "__global__ void kernel_of_${chapter:0:2}_$step() {}" >"$tree/$chapter/$step.cu"
  done
done

stand_in() {  # PATH BODY
  printf '#!/usr/bin/env bash\nprintf "%%s\\n" "%s $*" >>"$CALLS"\n%s\n' "${1##*/}" "$2" >"$1"
  chmod +x "$1"
}
program='device="NVIDIA H200 (sm_90)"
steps() { printf "v1_first forward an idea\n supports all\nb2_second backward an idea\n" ; }
case $0 in
  *02_*) steps() { printf "v1_three_pass softmax x\nv4_one_read softmax x\nv6_softmax_topk softmax_topk x\nv7_attention_row forward x\n"; } ;;
  *03_*) steps() { printf "v1_scalar forward x\nv5_mma forward x\nv10_exp2 forward x\nb1_scalar backward x\nb3_constant_tiles backward x\nb6_async backward x\nb7_grid backward x\n"; } ;;
esac
if [[ $1 == --list ]]; then echo "a chapter"; steps; exit; fi
operation=forward
case "$* " in
  *"--operation softmax "*) operation=softmax ;;
  *"--operation softmax_topk "*) operation=softmax_topk ;;
  *"--operation backward "*) operation=backward ;;
esac
echo "device: ${DEVICE-$device}"
echo "problem: forward B=4 Hq=16 Hkv=16 seqlen_q=2048 seqlen_k=2048 d=128 bf16 inputs=random seed=1"
refuses=${REFUSES:-none}
steps | while read -r name its rest; do
  [[ $its == "$operation" ]] || continue
  case $name in $refuses*) echo "$name  unsupported  the reason" ;; *) echo "$name  pass  row error" ;; esac
done
json= asked=
while [[ $# -gt 0 ]]; do
  [[ $1 != --json ]] || json=$2
  [[ $1 != --step ]] || asked=,$2,
  shift
done
# Of the steps that are asked for those that there are; else all.
mine=$(steps | awk -v its="$operation" -v asked="$asked" "
  \$2 == its { all = all \" \" \$1; if (index(asked, \",\" \$1 \",\")) some = some \" \" \$1 }
  END { print some == \"\" ? all : some }")
for step in $mine; do
  results+=${results:+,}"{\"name\": \"$step\", \"outcome\": \"pass\", \"time\": {}}"
done
[[ -z $json ]] ||
  echo "{\"timing_method\": 4, \"operation\": \"$operation\", \"steps\": [$results]}" >"$json"
exit "${PROGRAM_EXIT:-0}"'
for chapter in 01_naive 02_online_softmax 03_flash_v1; do
  stand_in "$bin/$chapter" "$program"
  stand_in "$bin/test_$chapter" 'case $1 in --list-tests) seq -f "  case %g" 40000 ;; *) echo "All tests passed"; exit ${TEST_EXIT:-0} ;; esac'
done
stand_in "$bin/test_kernels" 'case $1 in --list-tests) echo "  a case" ;; *) echo "All tests passed" ;; esac'
stand_in "$bin/test_check" 'echo "0 cases"'  # has none for a GPU
stand_in "$tree/common/scripts/check_warp_access.sh" 'echo "33 of 33 patterns as predicted"'
stand_in "$tree/common/scripts/compiler_report.sh" 'echo "registers  kernel"'
stand_in "$work/with/python3" 'if [[ $1 == -c && -n ${LACKS:-} ]]; then
  echo "No module named $LACKS" >&2
  exit 1
fi
while [[ $# -gt 0 ]]; do
  case $1 in
    --out) printf "{\"timing_method\": 4, \"problems\": [%s]}\n" "$problems" >"$2" ;;
    --steps) steps=$(sed "s/[^,]*/{\"name\": \"&\", \"outcome\": \"unchecked\", \"time\": {}}/g" <<<"$2") ;;
    --problems)
      cat "$2" >>"$CALLS"
      while read -r _; do
        problems+=${problems:+,}"{\"runs\": [{\"steps\": [$steps]}]}"
      done <"$2" ;;
  esac; shift; done'
stand_in "$work/with/nvidia-smi" 'echo "GPU-1234, 570.1, 700.00, 1980, 3201, 41"'
sed -i 2d "$work/with/nvidia-smi"  # it is called too often to be written down
stand_in "$work/with/ncu" '[[ -z ${NCU_EXIT:-} ]] || exit $NCU_EXIT
while [[ $1 != */bin/* ]]; do shift; done
echo "==PROF== a message"; "$@" | grep "^problem"; cat "$EXPORT"'
stand_in "$work/with/compute-sanitizer" 'shift 4; "$@" && { [[ -z ${FINDS:-} || $* != *$FINDS* ]] || exit 9; }'

run() {  # ARGUMENT...: sets status, output, calls
  status=0
  export CALLS=$work/calls
  : >"$CALLS"
  output=$(PATH=$work/with:$PATH ATTN_SANITIZE_JOBS=2 "$tree/common/scripts/$script" "$@" 2>&1 </dev/null) || status=$?
  calls=$(<"$CALLS")
}
fail() {
  printf 'FAILED: %s\n--- exit %s\n%s\n--- calls\n%s\n' "$1" "$status" "$output" "$(cut -c 1-160 <<<"$calls")"
  exit 1
}
exits() { [[ $status -eq $1 ]] || fail "exit status, not $1"; }
has() { [[ $2 == *"$1"* ]] || fail "no '$1'"; }
has_not() { [[ $2 != *"$1"* ]] || fail "'$1'"; }
script=verify_on_gpu.sh

# ---- the command line -------------------------------------------------------------------------
run --help
exits 0
has "common/scripts/verify_on_gpu.sh times peers 03_flash_v1" "$output"
has_not "set -euo" "$output"
[[ -z $calls ]] || fail "something was called"
for mistake in "nosuch" "04_flash_v2" "--nosuch" "docs" "--out" "access 03_flash_v1"; do
  # shellcheck disable=SC2086
  run $mistake
  exits 2
  [[ $(wc -l <<<"$output") -eq 1 ]] || fail "not one line"
done
run nosuch
has "(common, 01_naive 02_online_softmax 03_flash_v1)" "$output"
# Programs are built first, with the flags of the preset.
stand_in "$work/with/cmake" 'exit ${CMAKE_EXIT:-0}'
cached() {  # FLAGS
  printf 'CMAKE_%s\n' "BUILD_TYPE:STRING=Release" "CUDA_FLAGS:STRING=$1" \
    "CUDA_FLAGS_RELEASE:STRING=-O3 -DNDEBUG" >"$tree/build/release/CMakeCache.txt"
}
cached -Ofc=max
run large 01_naive
exits 2
has "build/release/CMakeCache.txt: CMAKE_CUDA_FLAGS must be '', as in the preset" "$output"
has_not "cmake" "$calls"
cached ""
CMAKE_EXIT=1 run large 01_naive
exits 2
has "cmake --build build/release --target 01_naive attn_report test_01_naive" "$calls"
has_not "test_01_naive [large]" "$calls"
run large 01_naive --out "$work/built"
exits 0
has "test_01_naive [large]" "$calls"
rm "$tree/build/release/CMakeCache.txt"

DEVICE="none (cudaErrorNoDevice): a GPU is required" run tests
exits 77
mv "$bin/02_online_softmax" "$work/saved"
run tests
exits 2
has "02_online_softmax: not built" "$output"
run times 03_flash_v1 --out "$work/other"  # that needs no other chapter's program
exits 0
mv "$work/saved" "$bin/02_online_softmax"
[[ ! -e $reports/parts.jsonl ]] || fail "something was recorded"

# ---- one part of one chapter ------------------------------------------------------------------
run times 03_flash_v1
exits 0
has "03_flash_v1 --step v7_grid,v8_warp_pair_barriers,v9_rows_per_warp,v10_exp2 --batch 1 --heads 32 --head-dim 64 --seqlen 16384 --causal --time" "$calls"
has_line() { grep -q -e "$1" "$2" || fail "no $1 in $2"; }
has "--operation backward --step b6_async,b7_grid --batch 8 --heads 16 --head-dim 128" "$calls"
has "--step v10_exp2 --heads 16 --head-dim 128 --seqlen 131072 --check off --require-gpu" "$calls"
grep -v -e '--seqlen 8 ' -e --list <<<"$calls" | grep -q '01_naive\|02_online' && fail "another chapter"
lines=$reports/03_flash_v1.forward.jsonl
has_line '^{"name":"03_flash_v1.forward_d64_causal_n16384",.*"name":"v10_exp2"' "$lines"
has_line '"options":"--batch 1 --heads 32 --head-dim 64 --seqlen 16384 --causal"' "$lines"
has_line '"measured":{"checked":true,"clocks":"SM 1980 MHz, memory 3201 MHz","commit":"unknown",' "$lines"
has_line '"gpu":"NVIDIA H200","power_limit_w":700.00*,"temperature_c":\[41,41\],"uuid":"GPU-1234"}' "$lines"
has_line '"date":"20[0-9-]*T[0-9:]*Z"' "$lines"
parts=$reports/parts.jsonl
has_line '^{"name":"times 03_flash_v1","files":{.*"seconds":[0-9]*,"verdict":"passed","sum":"[0-9a-f]*"}$' "$parts"
has "01_naive: has no times, counters, tests, sanitizer, large, peers" "$output"
has_not "stale" "$output"

run times 02_online_softmax
exits 0
has "--operation softmax --rows 4096 --cols 65536 --dtype bf16 --time" "$calls"
has "--operation softmax --rows 2048 --cols 65536 --dtype fp32 --time" "$calls"
[[ $(wc -l <"$parts") -eq 2 ]] || fail "parts: $(<"$parts")"

# ---- a part that fails, and the exports -------------------------------------------------------
NCU_EXIT=1 run counters 01_naive
exits 1
has_line '^{"name":"counters 01_naive",.*"verdict":"failed"' "$parts"
run counters
exits 0
has "ncu --clock-control none --profile-from-start off --csv" "$calls"
has "bin/01_naive --batch 8 --heads 16 --head-dim 128 --seqlen 2048 --profile v1_first --require-gpu" "$calls"
has "bin/03_flash_v1 --heads 16 --head-dim 64 --seqlen 1024 --dtype fp32 --profile b1_scalar --require-gpu" "$calls"
has "bin/03_flash_v1 --batch 8 --heads 16 --head-dim 128 --seqlen 2048 --profile b7_grid --require-gpu" "$calls"
csv=$reports/01_naive.counters.csv
[[ $(head -n 1 "$csv") == '"Step","ID",'*'"Metric Value"' ]] || fail "no header"
has_line '^# {"name":"01_naive.v1_first","clocks":"none","keys":{.*"problem":"forward B=4 ' "$csv"
has_line '^"v1_first","0","' "$csv"
TEST_EXIT=1 run tests 01_naive
exits 1
has_line '^{"name":"tests 01_naive",.*"verdict":"failed"' "$parts"
PROGRAM_EXIT=1 run times 01_naive
[[ $status -ne 0 ]] || fail "a step that failed"

# ---- several calls add up ---------------------------------------------------------------------
run tests large access calls
exits 0
has "test_kernels [gpu]~[large]" "$calls"
has "test_01_naive [large]" "$calls"
has "test_03_flash_v1 [large]" "$calls"
has_not "test_check [gpu]" "$calls"
[[ -s $reports/tests.common.txt && -s $reports/tests.03_flash_v1.txt && -s $reports/large.01_naive.txt && -s $reports/warp_access.txt ]] || fail "no file"
run sanitizer peers compiler
exits 0
has "--rows 8 --cols 16777216 --dtype fp32" "$calls"
has "--steps b6_async,b7_grid --backends 01_naive:b2_cublas,flash,cudnn" "$calls"
has_line '^{"name":"peers.03_flash_v1.backward",.*"options":"--operation backward --backends' \
  "$reports/peers.03_flash_v1.backward.jsonl"
check() { "$bin/attn_report" evidence check --root "$tree" "$reports" >"$work/check" || return 1; }
check && fail "a part failed, and the check passed"
has "parts.jsonl: times 01_naive: failed" "$(<"$work/check")"
run times 01_naive
exits 0
check || fail "check: $(<"$work/check")"
has_not "stale" "$(<"$work/check")"
# --only measures the problems whose names match; the others stay.
run --only '^forward_n2048$' times 01_naive
exits 0
has "--operation forward --batch 4" "$calls"
has_not "--operation backward" "$calls"
check || fail "check: $(<"$work/check")"
has_not "stale" "$(<"$work/check")"
# Lines of a problem that is not listed any more are gone when the part has passed again.
problems=$tree/common/scripts/gpu_problems.sh
sed -i 's/echo "forward_n131072 /echo "forward_longest /' "$problems"
run times 03_flash_v1
exits 0
grep -q '"03_flash_v1.forward_n131072"' "$lines" && fail "a line of a problem that there is not"
has_line '"03_flash_v1.forward_longest"' "$lines"

# ---- other kernels, and what is stale ---------------------------------------------------------
step=$tree/03_flash_v1/b7_grid.cu
echo "// a comment" >>"$step"
run --seconds 1000
exits 0
has_not "== " "$output"  # nothing is stale
echo "__global__ void more() {}" >>"$step"
run --seconds 1000 tests times
exits 0
has "== tests 03_flash_v1: passed" "$output"
has "== times 03_flash_v1: passed" "$output"
has_not "== tests 01_naive" "$output"
has 'counters 03_flash_v1: 1 of 7 lines stale: `b7_grid` has changed since' "$output"
sed -i 's/^\({"name":"counters 03_flash_v1",.*"seconds":\)[0-9]*/\1500/' "$parts"
run --seconds 60 counters
exits 0
has "not begun for want of time: counters 03_flash_v1" "$output"
[[ -z $(grep ncu <<<"$calls" || true) ]] || fail "begun"
for mistake in 0 x -3 ""; do
  run --seconds "$mistake"
  exits 2
done
stand_in "$bin/test_03_flash_v1" 'case $1 in --list-tests) echo "  a case" ;; *) echo "__global__ void again() {}" >>03_flash_v1/b7_grid.cu ;; esac'
run tests 03_flash_v1
exits 1
has "the code changed meanwhile" "$output"
stand_in "$bin/test_03_flash_v1" 'case $1 in --list-tests) echo "  a case" ;; *) echo "All tests passed" ;; esac'
run  # everything, in one call
exits 0
has_not "stale" "$output"
has "== access common: passed" "$output"

# ---- what has changed, alone ------------------------------------------------------------------
echo "__global__ void third() {}" >>"$step"
run --changed counters tests times peers
exits 0
has "--profile b7_grid" "$calls"
has "03_flash_v1.v1_scalar: current, not measured again" "$output"
has_not "--profile v1_scalar" "$calls"
has "== tests 03_flash_v1: passed" "$output"
has_not "== counters 01_naive" "$output"
has "--operation backward --step b7_grid --batch 8" "$calls"  # of b6_async,b7_grid
has "03_flash_v1.memory_n1024: current, not measured again" "$output"
has_line '"03_flash_v1.backward_d64_n2048",.*"name":"b6_async"' "$reports/03_flash_v1.backward.jsonl"
has "peers.03_flash_v1.forward: current, not measured again" "$output"
has_line '"name":"03_flash_v1.v1_scalar"' "$reports/03_flash_v1.counters.csv"
# A problem with changed options is measured again, the next one is not.
sed -i 's/--seqlen 131072 --warmup 1/--seqlen 131072 --warmup 2/' "$problems"
run --changed times
exits 0
has "--seqlen 131072 --warmup 2" "$calls"
has_not "--operation backward" "$calls"
run --changed
exits 0
run --changed
exits 0
has_not "== " "$output"

# ---- a library that is not installed: the other files are measured, and the part fails -----------
cp "$problems" "$work/problems.sh"
sed -i 's/--backends 01_naive:v13_cublas,math/--backends fa3,math/' "$problems"
LACKS=flash_attn_interface run peers 03_flash_v1
exits 1
has "peers.03_flash_v1.forward: No module named flash_attn_interface: not measured" "$output"
has "--steps b6_async,b7_grid --backends" "$calls"
has_not "--backends fa3" "$calls"
run peers 03_flash_v1
exits 0
has "--backends fa3,math" "$calls"
cp "$work/problems.sh" "$problems"
run --changed
exits 0

# ---- the sanitizer ----------------------------------------------------------------------------
script=sanitize.sh
run build/release/bin/02_online_softmax
exits 0
has "02_online_softmax  softmax_topk racecheck clean: v6_softmax_topk [--rows 7 --cols 33 --top-k 32 --dtype fp32 --causal]" "$output"
[[ $(grep -c ' softmax  *initcheck clean: v1_three_pass v4_one_read ' <<<"$output") -eq 4 ]] || fail "not four problems"
FINDS="--head-dim 128" run build/release/bin/03_flash_v1
exits 1
[[ $(grep -c 'NOT CLEAN' <<<"$output") -eq 8 ]] || fail "not eight findings"
REFUSES=v10 run build/release/bin/03_flash_v1
exits 1
has "clean: v1_scalar v5_mma (refused: v10_exp2) [" "$output"
has "03_flash_v1 forward: no problem reaches v10_exp2" "$output"
# What a tool cannot judge is left out there and named.
sed -i 's,04_flash_v2/backward/synccheck),03_flash_v1/backward/synccheck),; s/b3_warp_pairs,.*,b8_deterministic the/b6_async,b7_grid the/' \
  "$tree/common/scripts/gpu_problems.sh"
run build/release/bin/03_flash_v1
exits 0
has "03_flash_v1        backward     synccheck left out: b6_async,b7_grid: the two warps" "$output"
has "--dropout 0.25 --step b1_scalar,b3_constant_tiles --require-gpu" "$calls"
[[ $(grep -c '^03_.*--step all' <<<"$calls") -eq 28 ]] || fail "not 28 runs of all steps"
run --help
exits 0
has "ATTN_SANITIZE_JOBS" "$output"

# ---- findings that are known to be false ------------------------------------------------------
# With two of the tools, which are enough here.
sed -i 's/for tool in memcheck racecheck .*; do/for tool in memcheck racecheck; do/' \
  "$tree/common/scripts/sanitize.sh"
# racecheck of one problem reports a race of two lines of v1_three_pass; RACE is the report.
printf 'a\n  smem.scale[stage] = 1;\nb\n    x * smem.scale[i];\n' \
  >"$tree/02_online_softmax/v1_three_pass.cu"
problems_of() { (bin=$bin; source "$scripts/gpu_problems.sh"; sanitizer_problems "$@"); }
mapfile -t of_softmax < <(problems_of 02_online_softmax softmax)
of_softmax=${of_softmax[0]}
stand_in "$work/with/compute-sanitizer" '
[[ $2 == "${TOOL:-racecheck}" && "$* " == *"'"$of_softmax"' "* ]] && found=1
shift 4; "$@" || exit; [[ -z ${found:-} || -z ${RACE:-} ]] || { printf "%s\n" "$RACE"; exit 9; }'
race() {  # FIRST_LINE SECOND_LINE...: a report as racecheck writes it
  local kernel="void gpu::v1_three_pass::kernel<(int)64>(T1 &)+0x10590 in v1_three_pass.cu"
  echo "========= COMPUTE-SANITIZER"
  echo "========= Error: Race reported between Write access at $kernel:$1"
  shift
  for line in "$@"; do echo "=========     and Read access at $kernel:$line [8 hazards]"; done
  echo "========= "
  echo "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"
}
entry() {  # TOOL STEP PROBLEM FIRST SECOND
  printf '\ntool %s\nstep %s\nproblem %s\nfirst %s\nsecond %s\nbecause a kernel shows it\n' "$@" \
    >"$exceptions"
}
lines=("v1_three_pass.cu: smem.scale[stage] = 1;" "v1_three_pass.cu: x * smem.scale[i];")
known() { entry racecheck 02_online_softmax/v1_three_pass "$of_softmax" "${lines[@]}"; }
finds() { RACE=$1 run build/release/bin/02_online_softmax; }
known
finds "$(race 2 4 4)"
exits 0
has "softmax      racecheck clean but for findings known to be false: v1_three_pass" "$output"
has "  known to be false: v1_three_pass: v1_three_pass.cu:2 and v1_three_pass.cu:4: a" "$output"
# Lines that moved are found by their text.
sed -i '1i another line' "$tree/02_online_softmax/v1_three_pass.cu"
finds "$(race 3 5)"
exits 0
sed -i 1d "$tree/02_online_softmax/v1_three_pass.cu"
# Anything else fails: another line, a second finding, a finding without a place, another tool.
for other in "$(race 2 3)" "$(race 1 4)" "$(race 2 4; race 2 3)" \
  "$(race 2 4; echo "========= 3 errors were not printed")"; do
  finds "$other"
  exits 1
  has "racecheck NOT CLEAN: v1_three_pass" "$output"
done
TOOL=memcheck finds "$(race 2 4)"
exits 1
# An entry that matches nothing fails, and so does one that lacks a part.
finds ""
exits 1
has "no finding any more: racecheck, 02_online_softmax/v1_three_pass [$of_softmax]" "$output"
run build/release/bin/03_flash_v1  # another chapter's
exits 0
for wrong in "memcheck 02_online_softmax/v1_three_pass" "racecheck 02_online_softmax/v4_one_read"
do
  # shellcheck disable=SC2086
  entry $wrong "$of_softmax" "${lines[@]}"
  finds "$(race 2 4)"
  exits 1
  has "NOT CLEAN" "$output"
done
known
sed -i '/^because/d' "$exceptions"
finds "$(race 2 4)"
[[ $status -ne 0 ]] || fail "an entry without a reason is taken"
has "an entry has no because" "$output"
# The entries of the project: their lines are in the sources, their problems in gpu_problems.sh.
while read -r key text; do
  case $key in
    step) chapter=${text%%/*} ;;
    problem) [[ $'\n'$(problems_of "$chapter" forward)$'\n' == *$'\n'"$text"$'\n'* ]] ||
      fail "sanitizer_exceptions.txt: $chapter has no such problem: $text" ;;
    first | second) grep -rqF --include="${text%%: *}" -- "${text#*: }" \
      "$scripts/../../$chapter" "$scripts/../ptx" ||
      fail "sanitizer_exceptions.txt: not in ${text%%: *} of $chapter or common/ptx: ${text#*: }" ;;
  esac
done <"$scripts/sanitizer_exceptions.txt"
# The pages of 06 explain the findings in the kernels of f6, which f7 launches, too, and of f8.
for step in f6_smooth_v_chunks f8_q_in_registers; do
  for line in k_descale 'chunk\[4'; do
    grep -q "^second $step.cu: .*$line" "$scripts/sanitizer_exceptions.txt" ||
      fail "sanitizer_exceptions.txt: no entry for $step and $line"
  done
done
echo "everything as expected"
