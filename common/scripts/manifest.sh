#!/usr/bin/env bash
# Ties a folder of measurements to the sources they were measured with. A figure in docs/reports is true
# of the sources of that day; when one of them changes, somebody has to measure again or say why not.
#
#   common/scripts/manifest.sh write DIR   hashes the sources into DIR/manifest.txt
#   common/scripts/manifest.sh check DIR   compares them with it
#   common/scripts/manifest.sh list        the sources
#   common/scripts/manifest.sh digest      one hash for all of them
#
# verify_on_gpu.sh writes, after a full run that passed; by hand it would be a lie. The test
# "evidence: manifest" checks. Bytes are hashed, comments too. Where a change cannot have moved a figure, or
# nobody had a GPU yet, add a line below `unverified:` in manifest.txt: the path, two spaces, the reason.
# Such lines are gone after the next full run, because every source has been measured then.
#
# Exit status of check: 0 all sources are as measured or listed with a reason; 1 some are not, a line each;
# 2 no manifest, or one that cannot be read.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# What can change a kernel, its launch, its timing or its roof. In this list: step files, what they
# include, the chapter's table (costs, supported problems), buffers, launches and timing, cuBLAS calls,
# inputs (data change the power drawn, and so the clock), measured roofs, the kernels of the GPU tests,
# the rules that warp_access.txt compares with counters, and the flags of nvcc.
# Not in it: what only the CPU sees (algorithm.h, reference, check, options, results, the emulator). It can
# call a right kernel wrong, but CPU tests watch over that. Exercises are never in a report.
sources() {
  local path
  for path in [0-9][0-9]_*/*.cu [0-9][0-9]_*/*.cuh [0-9][0-9]_*/*.h [0-9][0-9]_*/chapter.cpp \
      common/ptx/*.h common/attn/*.cu \
      common/attn/{blas,cost,device,inputs,kernel,problem,roofline,session,status,step,tensor}.h \
      common/attn/{blas,device,inputs,problem,roofline,session}.cpp \
      common/tests/*.cu common/tests/{kernels,warp_access_patterns}.h \
      common/emulator/warp_access.h common/cmake/{AttnChapter,AttnCuda}.cmake; do
    [[ -f $path && $path != */algorithm.h ]] || continue  # a pattern without a match stands for itself
    printf '%s\n' "$path"
  done | sort
}

hashes() {
  local paths
  mapfile -t paths < <(sources)
  [[ ${#paths[@]} -gt 0 ]] || die "no sources in $PWD"
  sha256sum -- "${paths[@]}"
}

die() {
  printf 'manifest.sh: %s\n' "$1" >&2
  exit 2
}

write_manifest() {  # DIR
  local file=$1/manifest.txt
  [[ -d $1 ]] || die "$1: no such folder"
  {
    echo "# The sources that reach the GPU, as they were when the files of this folder were measured:"
    echo "# sha256, path. Written by common/scripts/manifest.sh, which says what is in it and what is not."
    hashes
    echo
    echo "# Changed since, and not measured again: path, two spaces, the reason why this may be."
    echo "unverified:"
  } >"$file.new"
  mv -- "$file.new" "$file"
  echo "$file: $(grep -cE '^[0-9a-f]{64}  ' "$file") sources"
}

check_manifest() {  # DIR
  local file=$1/manifest.txt line number=0 section=measured path bad=0
  [[ -f $file ]] || die "$file: no such file"
  local -A measured=() current=() reason=()
  while IFS= read -r line || [[ -n $line ]]; do
    number=$((number + 1))
    line=${line%"${line##*[![:space:]]}"}  # without blanks at the end
    if [[ -z $line || $line == '#'* ]]; then
      continue
    elif [[ $line == unverified: ]]; then
      section=unverified
    elif [[ $section == unverified && $line =~ ^([^[:space:]]+)[[:space:]]*(.*)$ ]]; then
      [[ -z ${reason[${BASH_REMATCH[1]}]+x} ]] || die "$file:$number: ${BASH_REMATCH[1]} twice"
      reason[${BASH_REMATCH[1]}]=${BASH_REMATCH[2]}
    elif [[ $section == measured && $line =~ ^([0-9a-f]{64})\ \ ([^[:space:]]+)$ ]]; then
      measured[${BASH_REMATCH[2]}]=${BASH_REMATCH[1]}
    else
      die "$file:$number: neither a hash and a path nor 'unverified:': $line"
    fi
  done <"$file"
  [[ ${#measured[@]} -gt 0 ]] || die "$file: no source in it"
  while read -r line path; do current[$path]=$line; done < <(hashes)

  # verdict PATH WHAT: what happened to a source, unless a reason excuses it.
  verdict() {
    if [[ -z ${reason[$1]+x} ]]; then
      printf '%s: %s\n' "$1" "$2"
      bad=1
    elif [[ -z ${reason[$1]} ]]; then
      printf '%s: %s, and listed as unverified without a reason\n' "$1" "$2"
      bad=1
    fi
    unset "reason[$1]"
  }
  local unverified=${#reason[@]}
  while IFS= read -r path; do
    if [[ -z ${current[$path]+x} ]]; then
      verdict "$path" "gone since the measurement"
    elif [[ -z ${measured[$path]+x} ]]; then
      verdict "$path" "new, not there at the measurement"
    elif [[ ${current[$path]} != "${measured[$path]}" ]]; then
      verdict "$path" "changed since the measurement"
    fi
  done < <(printf '%s\n' "${!measured[@]}" "${!current[@]}" | sort -u)
  for path in "${!reason[@]}"; do  # what is left excuses nothing
    printf '%s: listed as unverified, but as it was measured: take the line out\n' "$path"
    bad=1
  done
  if [[ $bad -ne 0 ]]; then
    echo "measure again (common/scripts/verify_on_gpu.sh), or list the path with a reason in $file"
    return 1
  fi
  echo "$file: ${#current[@]} sources, $unverified of them unverified with a reason"
}

case ${1:-}:$# in
  write:2) write_manifest "$2" ;;
  check:2) check_manifest "$2" ;;
  list:1) sources ;;
  digest:1) hashes | sha256sum | cut -c 1-16 ;;
  *) die "one of: write DIR, check DIR, list, digest" ;;
esac
