#!/usr/bin/env bash
# long_compiles.sh FOLDER [SECONDS]: the files in FOLDER, a Ninja build folder, that took more than
# SECONDS (60) to compile: one per line, longest first; then the number of compilations and their
# total time.
set -euo pipefail
log=${1:?a build folder}/.ninja_log
[[ -f $log ]] || { echo "$log: no such file; a folder that Ninja builds in has one" >&2; exit 2; }
# Columns: start and end in ms, a time stamp, the output, a hash. For an output built twice the last
# line counts.
awk -F '\t' -v most="${2:-60}" '
  $4 ~ /\.o$/ { took[$4] = ($2 - $1) / 1000 }
  END {
    for (file in took) {
      sum += took[file]
      ++count
      if (took[file] <= most) continue
      name = file
      sub(/\.o$/, "", name)
      sub(/CMakeFiles\/[^\/]*\.dir\//, "", name)
      printf "%6.0f s  %s\n", took[file], name | "sort -rn"
    }
    close("sort -rn")
    printf "%d compilations, %.0f s in all\n", count, sum
  }' "$log"
