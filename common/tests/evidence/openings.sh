#!/usr/bin/env bash
# openings.sh ROOT: the opening of README.md (all before "## What a step looks like") and of each
# chapter's pages (all before their first section) has no measured figure outside of generated
# blocks. Ends with planted faults.
set -uo pipefail

# figures_of PAGE END: lines of its opening that hold a figure, generated blocks left out.
figures_of() {
  awk -v end="$2" '
    index($0, end) == 1 { exit }
    /^<!-- table: / { generated = 1 }
    /^<!-- end table/ { generated = 0; next }
    /^```/ { fence = !fence; next }  # what a program prints
    !generated && !fence { text = $0
      # Names of papers, and sections of them.
      gsub(/[0-9][0-9][0-9][0-9]\.[0-9][0-9][0-9][0-9][0-9]/, "", text)
      gsub(/sections? [0-9.]+( and [0-9.]+)?/, "", text)
      # A decimal number, a share, a rate or a factor.
      if (text ~ /(^|[^0-9.])[0-9]+\.[0-9]+|[0-9] ?%|[0-9] ?(TFLOP|GB|TB)\/s|[0-9] times/)
        print FILENAME ":" NR ": a figure outside of a generated block: " $0 }' "$1"
}
openings_of() {  # openings_of ROOT
  local page
  cd "$1" || return
  figures_of README.md "## What a step looks like"
  for page in 0*/*.md; do figures_of "$page" "## "; done
}

said=$(openings_of "$1")
[[ -z $said ]] || { echo "$said"; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/01_first"
expect() {  # expect PAGE LINE: a figure in LINE is found, and in a generated block it is none
  printf '# Title\n\n%s\n\n## What a step looks like\n1.5\n' "$2" >"$work/$1"
  [[ $(openings_of "$work") == "$1:3: a figure"* ]] ||
    { echo "FAILED: not found in $1: $2"; exit 1; }
  printf '# Title\n<!-- table: headline x -->\n%s\n<!-- end table -->\n' "$2" >"$work/$1"
  [[ -z $(openings_of "$work") ]] || { echo "FAILED: found in a generated block: $2"; exit 1; }
}
echo '# First (arXiv 2205.14135)' >"$work/01_first/README.md"
expect README.md 'Decoding is 1.04 times as fast as cuDNN'
expect README.md 'It reaches 97 % of the roof'
expect README.md 'At 801 TFLOP/s'
expect 01_first/README.md 'v7 is 3 times as fast'
