# shellcheck shell=bash
# What profile.sh and verify_on_gpu.sh share: which ncu, which metrics, and how an export looks. To be sourced.
#
# NCU=/path/to/ncu picks an ncu. Without it the first one in PATH is taken, then one in ATTN_NCU_FOLDERS (folders
# with blanks between them; if not set, /usr/local/cuda/bin and those of Nsight Compute in /opt/nvidia).

# Prints its path, or nothing. Returns 2 where NCU names none.
find_ncu() {
  local ncu folder
  if [[ -n ${NCU:-} && ! -x $NCU ]]; then
    printf '%s\n' "$NCU"
    return 2
  fi
  ncu=${NCU:-$(command -v ncu || true)}
  for folder in ${ATTN_NCU_FOLDERS-/usr/local/cuda/bin /opt/nvidia/nsight-compute/*}; do
    if [[ -z $ncu && -x $folder/ncu ]]; then ncu=$folder/ncu; fi
  done
  printf '%s\n' "$ncu"
}

# The metrics of metrics.txt, with commas between.
ncu_metrics() {  # METRICS_TXT
  awk '/^[a-z]/ && $1 != "section" { printf "%s%s", separator, $1; separator = "," }' "$1"
}

# From stdin, what `ncu --csv` prints, to stdout: the lines of the metrics asked for by name, and the columns before
# those of ncu's advice. Before them what ncu does not say and attn_report asks before it compares: the clocks, and
# the problem, as the chapter program printed it. Returns 1, and prints nothing, where there are no counters.
ncu_export() {  # CLOCKS WHAT_THE_PROGRAM_PRINTED
  local csv
  csv=$(awk '/^"ID"/ { sub(/,"Rule Name".*/, ""); print }
             /,"Command line profiler metrics",/ { sub(/(,|,"")+\r?$/, ""); print }')
  [[ $csv == '"ID"'*$'\n'* ]] || return 1
  printf '==profile.sh== clocks: %s\n' "$1"
  sed -n '/^problem: /{s/^/==profile.sh== /p;q}' <<<"$2"
  printf '%s\n' "$csv"
}
