#!/usr/bin/env bash
# Collects the hardware counters of one launch of one step.
#
#   common/scripts/profile.sh [--lock-clocks] CHAPTER STEP [problem options]
#   common/scripts/profile.sh 01_naive v2_coalesced --batch 4 --heads 16 --head-dim 128 --seqlen 2048
#
# Runs the chapter program of build/release with --profile STEP under ncu, collects the metrics in
# metrics.txt, and writes to build/release/results:
#
#   CHAPTER.STEP.ncu.csv     a line per kernel and counter, for attn_report and for the digest printed
#                            here; the first lines hold the problem and the clock control
#   CHAPTER.STEP.ncu-rep     the same and some sections, for Nsight Compute (ncu-ui)
#
# Clocks are not controlled, so that times are comparable with those of --time. With --lock-clocks
# ncu locks them at their base value, for better repeatability. If there is no ncu, or the driver
# denies access to the counters, the step is timed instead (--time).
#
# Environment: NCU=/path/to/ncu selects an ncu. Otherwise the first one in PATH is used, then one in
# ATTN_NCU_FOLDERS (folders separated by blanks; default: /usr/local/cuda/bin and Nsight Compute's
# folders in /opt/nvidia).
#
# Exit status: that of the chapter program if it refuses (2 invalid option, 3 unsupported, 4 out of
# memory, 77 no GPU); 1 ncu failed; 0 otherwise, also if only times were measured.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
build=$root/build/release
# shellcheck source=common/scripts/ncu_export.sh
source "$root/common/scripts/ncu_export.sh"

die() {
  printf 'profile.sh: %s\n' "$2" >&2
  exit "$1"
}

clocks=none
while [[ ${1:-} == --* ]]; do
  case $1 in
    --lock-clocks) clocks=base; shift ;;
    --help) sed -n '2,/^set -/{/^set -/d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) die 2 "$1: must be --lock-clocks, --help or a chapter; problem options come after the step" ;;
  esac
done
[[ $# -ge 2 ]] || die 2 "CHAPTER and STEP are needed, as in: profile.sh 01_naive v2_coalesced --seqlen 1024"
chapter=${1%/} step=$2
shift 2
program=$build/bin/$chapter
[[ -f $root/$chapter/chapter.cpp ]] || die 2 "no chapter $chapter: $(cd "$root" && echo [0-9][0-9]_*)"
[[ -x $program ]] || die 2 "$program: not built; common/scripts/start.sh build"

# ---- without ncu first ------------------------------------------------------------------------
# First runs without ncu: the program's error messages are better than ncu's.

status=0
said=$("$program" "$@" --profile "$step" --require-gpu 2>&1) || status=$?
if [[ $status -ne 0 ]]; then
  printf '%s\n' "$said" >&2
  [[ $status -ne 77 ]] || echo "profile.sh: there is nothing to profile without a GPU (no emulated figure" \
    "is a measurement). The committed exports are in docs/reports." >&2
  exit "$status"
fi
printf '%s\n' "$said" | grep -E '^(device|problem): ' || true

with_times_only() {
  local operation
  operation=$("$program" --list | awk -v step="$step" '$1 == step { print $2; exit }')
  printf '\nGoing on with times only:\n'
  "$program" "$@" ${operation:+--operation "$operation"} --step "$step" --time --require-gpu
}

# ---- ncu --------------------------------------------------------------------------------------

ncu=$(find_ncu) || die 2 "NCU=$ncu: no such program"
if [[ -z $ncu ]]; then
  echo "no ncu: it comes with the CUDA Toolkit, or as NVIDIA Nsight Compute. NCU=/path/to/ncu names one."
  with_times_only "$@"
  exit
fi

list=$root/common/scripts/metrics.txt
metrics=$(ncu_metrics "$list")
mapfile -t sections < <(awk '$1 == "section" { print "--section"; print $2 }' "$list")
results=$build/results
csv=$results/$chapter.$step.ncu.csv
report=$results/$chapter.$step.ncu-rep
mkdir -p "$results"
rm -f "$csv" "$report"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

status=0
"$ncu" --clock-control "$clocks" --profile-from-start off -f -o "${report%.ncu-rep}" "${sections[@]}" \
  --metrics "$metrics" "$program" "$@" --profile "$step" >"$work/log" 2>&1 || status=$?
if grep -q ERR_NVGPUCTRPERM "$work/log"; then
  cat <<'TEXT'

ncu may not read the counters (ERR_NVGPUCTRPERM). The driver shows them to administrators only, because one
user's counters can tell about another's work. Two ways out:
  - run this script as root:      sudo -E common/scripts/profile.sh ...
    (in a container: start it with --cap-add SYS_ADMIN)
  - open the counters to all users of the machine, once, as root:
      echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' > /etc/modprobe.d/nvidia-profiling.conf
    then rebuild the initramfs (Debian, Ubuntu: update-initramfs -u) and reboot.
TEXT
  with_times_only "$@"
  exit
fi
if [[ $status -ne 0 || ! -s $report ]]; then
  cat "$work/log" >&2
  die 1 "ncu failed (exit $status)"
fi
if ! "$ncu" --import "$report" --csv --page details --print-units base 2>"$work/log" |
    ncu_export "$clocks" "$said" >"$work/csv"; then
  cat "$work/log" >&2
  die 1 "ncu wrote no counters: was a kernel launched?"
fi
mv "$work/csv" "$csv"

# ---- the digest -------------------------------------------------------------------------------

awk '
  function number(name) { return (kernel, name) in value ? value[kernel, name] : "n/a" }
  function ratio(a, b, format) { return a == "n/a" || b == "n/a" || b == 0 ? "n/a" : sprintf(format, a / b) }
  function show(label, text, note) { if (text != "n/a") note = "  " note; else note = ""; \
                                     printf "  %-28s %12s%s\n", label, text, note }
  function scaled(x, by, format) { return x == "n/a" ? x : sprintf(format, x / by) }
  function plus(a, b) { return a == "n/a" || b == "n/a" ? "n/a" : a + b }
  function stall(name,   x) {
    x = number("smsp__average_warps_issue_stalled_" name "_per_issue_active.ratio")
    if (x != "n/a" && x > worst) { worst = x; why = name }
  }
  /^"ID"/ { next }
  {
    # "a","b","c": commas inside a field are not between quotes.
    line = $0
    sub(/^"/, "", line); sub(/"\r?$/, "", line)
    n = split(line, field, /","/)
    if (n < 15) next
    id = field[1]
    if (!(id in name_of)) { order[++kernels] = id; name_of[id] = field[5] }
    text = field[15]
    gsub(/,/, "", text)
    if (text ~ /^[-+]?[0-9.]+(e[-+]?[0-9]+)?$/) value[id, field[13]] = text + 0
  }
  END {
    l1 = "l1tex__t_"; shared = "l1tex__data_"
    for (i = 1; i <= kernels; ++i) {
      kernel = order[i]
      ns = number("gpu__time_duration.sum")
      dram = plus(number("dram__bytes_read.sum"), number("dram__bytes_write.sum"))
      name = name_of[kernel]
      sub(/\(.*/, "", name); sub(/^void /, "", name)
      printf "\n%s\n", name
      show("time, ms", scaled(ns, 1e6, "%.3f"))
      show("HBM, GB", scaled(dram, 1e9, "%.3f"), ratio(dram, ns, "%.0f GB/s"))
      show("L2, GB", scaled(number("lts__t_bytes.sum"), 1e9, "%.3f"), "")
      show("sectors a load request", ratio(number(l1 "sectors_pipe_lsu_mem_global_op_ld.sum"), \
           number(l1 "requests_pipe_lsu_mem_global_op_ld.sum"), "%.1f"), "4 for whole words of 4 bytes, 16 for 16")
      show("sectors a store request", ratio(number(l1 "sectors_pipe_lsu_mem_global_op_st.sum"), \
           number(l1 "requests_pipe_lsu_mem_global_op_st.sum"), "%.1f"), "")
      conflicts = plus(number(shared "bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"), \
                       number(shared "bank_conflicts_pipe_lsu_mem_shared_op_st.sum"))
      show("bank conflicts, %", ratio(conflicts == "n/a" ? conflicts : 100 * conflicts, \
           number(shared "pipe_lsu_wavefronts_mem_shared.sum"), "%.1f"), "of the wavefronts of shared memory")
      show("tensor, Gop", scaled(plus(number("sm__ops_path_tensor_src_bf16_dst_fp32.sum"), \
           number("sm__ops_path_tensor_src_fp16.sum")), 1e9, "%.2f"), "bf16 and fp16")
      show("instructions, M", scaled(number("sm__inst_executed.sum"), 1e6, "%.1f"), "of warps")
      show("special function, M", scaled(number("sm__inst_executed_pipe_xu.sum"), 1e6, "%.1f"), "of warps")
      show("warps resident, %", scaled(number("sm__warps_active.avg.pct_of_peak_sustained_active"), 1, "%.1f"), \
           "of " scaled(number("sm__maximum_warps_per_active_cycle_pct"), 1, "%.1f") " possible")
      show("registers per thread", scaled(number("launch__registers_per_thread"), 1, "%d"), \
           "shared memory: " scaled(number("launch__shared_mem_per_block"), 1024, "%.1f KiB") " a block")
      worst = 0; why = "none"
      n = split("long_scoreboard short_scoreboard barrier mio_throttle lg_throttle math_pipe_throttle wait " \
                "not_selected", reasons, " ")
      for (r = 1; r <= n; ++r) stall(reasons[r])
      if (worst > 0) show("first reason to wait", sprintf("%.2f", worst), why ", warps an instruction")
    }
  }' "$csv"
printf '\n%s\n%s\n' "$csv" "$report"
printf 'Beside another step: %s diff OTHER.ncu.csv %s\n' "$build/bin/attn_report" "$csv"
