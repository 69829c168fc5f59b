# shellcheck shell=bash
# Shared by profile.sh and verify_on_gpu.sh: finds ncu, selects the metrics, formats an export.
# Sourced.
#
# NCU=/path/to/ncu selects an ncu. Otherwise the first one in PATH is used, then one in
# ATTN_NCU_FOLDERS (folders separated by blanks; default: /usr/local/cuda/bin and Nsight Compute's
# folders in /opt/nvidia).

# Prints the path of ncu, or nothing. Returns 2 if NCU names a missing file.
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

# The metrics of metrics.txt, separated by commas.
ncu_metrics() {  # METRICS_TXT
  awk '/^[a-z]/ && $1 != "section" { printf "%s%s", separator, $1; separator = "," }' "$1"
}

# Reads the output of `ncu --csv` from stdin and prints the rows of the requested metrics, without
# the columns of ncu's advice. Lines in front record what ncu omits and attn_report needs for
# comparisons: the clocks, and the problem as printed by the chapter program. Returns 1 and prints
# nothing if there are no counters.
ncu_export() {  # CLOCKS WHAT_THE_PROGRAM_PRINTED
  local csv
  csv=$(awk '/^"ID"/ { sub(/,"Rule Name".*/, ""); print }
             /,"Command line profiler metrics",/ { sub(/(,|,"")+\r?$/, ""); print }')
  [[ $csv == '"ID"'*$'\n'* ]] || return 1
  printf '==profile.sh== clocks: %s\n' "$1"
  sed -n '/^problem: /{s/^/==profile.sh== /p;q}' <<<"$2"
  printf '%s\n' "$csv"
}
