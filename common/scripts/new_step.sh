#!/usr/bin/env bash
# Creates a step as a copy of its parent.
#
#   common/scripts/new_step.sh CHAPTER NAME --parent STEP
#   common/scripts/new_step.sh 04_flash_v2 v14_name --parent v11
#
# Writes CHAPTER/NAME.cu with a header to fill in, and adds the step after its parent to the steps
# in CHAPTER/CMakeLists.txt and to the chapter's table. The copy builds, runs and passes the tests
# of the chapter unchanged; then change one idea. `diff_04_v11_v14` shows your changes.
#
# Exit status: 0; 2 for an error on the command line; 1 if the script does not recognise the form of
# the table: then it prints the lines for you to add.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

die() {
  printf 'new_step.sh: %s\n' "$2" >&2
  exit "$1"
}
usage='new_step.sh CHAPTER NAME --parent STEP'
if [[ ${1:-} == --help ]]; then
  sed -n '2,/^set -/{/^set -/d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"
  exit 0
fi
[[ $# -eq 4 && $3 == --parent ]] || die 2 "usage: $usage"
chapter=${1%/} name=$2 parent=$4
[[ -f $chapter/chapter.cpp ]] || die 2 "$chapter: no such chapter: $(echo 0[1-8]_*)"
[[ $name =~ ^([vbfqsdacp])([0-9]+)_[a-z0-9_]+$ ]] ||
  die 2 "$name: must be a letter, a number and words: v14_name"
number=${BASH_REMATCH[1]}${BASH_REMATCH[2]}
shopt -s nullglob
taken=("$chapter/$number"_*.cu)
[[ ${#taken[@]} -eq 0 ]] || die 2 "$name: ${taken[0]} has this number"
found=("$chapter/$parent.cu" "$chapter/${parent}"_*.cu)
[[ -f ${found[0]} ]] || found=("${found[@]:1}")
[[ ${#found[@]} -gt 0 ]] || die 2 "--parent $parent: $chapter has no such step"
[[ ${#found[@]} -eq 1 ]] || die 2 "--parent $parent: ambiguous: ${found[*]}"
parent=$(basename "${found[0]}" .cu)

# The step file. Its header keeps the parent's supported features.
awk -v name="$name" -v parent="$parent" '
  NR == 1 {
    print "// " name ": the change in one line, in the terms of the field."
    print "//"
    print "// parent    " parent
    print "// change    What this step does differently."
    print "// why       The cost that this saves, and where the profile shows it."
    print "// expect    the ncu counter that should change, and by how much"
  }
  !body && /^\/\// {
    supports = /^\/\/ supports/ || (supports && /^\/\/  /)
    if (supports) print
    next
  }
  { body = 1; print }' "$chapter/$parent.cu" |
  sed "/^\/\/ parent /!s/\b$parent\b/$name/g" >"$chapter/$name.cu"

# The lists of steps: all of them, and those for Hopper. A line of more than 100 columns is broken.
sed -i "/attn_add_chapter/,/)/{/attn_add_chapter\|FIRST_STEPS/!{s/\b$parent\b/& $name/
  /.\{101\}/s/ $name\b/\n        $name/}}" "$chapter/CMakeLists.txt"

# The table: the declaration, and the expression that contains the parent's name.
places=("$chapter/chapter.cpp" "$chapter"/host/*.{h,cpp})
mapfile -t tables < <(grep -lw "ATTN_DECLARE_STEP($parent)" "${places[@]}")
places_of() { grep -nw -- "$1" "${places[@]}" | cut -d : -f 1,2 | head -n 3 | tr '\n' ' '; }
yours="$chapter/$name.cu is written and in CMakeLists.txt"
[[ ${#tables[@]} -gt 0 ]] ||
  die 1 "$yours; its declaration and row are yours, as those of $parent: $(places_of "$parent")"
added=0
for table in "${tables[@]}"; do
  sed -i "s/^ATTN_DECLARE_STEP($parent);\$/&\nATTN_DECLARE_STEP($name);/
    s/^\(ATTN_DECLARE_LAUNCH(\)$parent\(, .*\)\$/&\n\1$name\2/" "$table"
  if awk -v name="$name" -v parent="$parent" '
    { text = text $0 "\n" }
    END {
      # A stack of open brackets up to the name; which of them contains the expression.
      at = index(text, "\"" parent "\"")
      if (!at) exit 1
      for (i = 1; i < at; ++i) {
        c = substr(text, i, 1)
        if (c == "\"") { while (substr(text, ++i, 1) != "\"") if (substr(text, i, 1) == "\\") ++i }
        else if (substr(text, i, 2) == "//") { while (substr(text, i, 1) != "\n") ++i }
        else if (c ~ /[({[]/) open[++depth] = i
        else if (c ~ /[)}\]]/) --depth
      }
      # Moves outwards until the enclosing bracket is a body or a list of steps.
      start = at
      while (depth > 0) {
        before = substr(text, 1, open[depth] - 1)
        sub(/[ \n]+$/, "", before)
        if (substr(text, open[depth], 1) == "{" && before !~ /[(,]$/) break
        start = open[depth]
        --depth
      }
      if (start == at) exit 1
      end = start
      for (level = 0; end <= length(text); ++end) {
        c = substr(text, end, 1)
        if (c == "\"") {
          while (substr(text, ++end, 1) != "\"") if (substr(text, end, 1) == "\\") ++end
        }
        else if (substr(text, end, 2) == "//") { while (substr(text, end, 1) != "\n") ++end }
        else if (c ~ /[({[]/) ++level
        else if (c ~ /[)}\]]/ && --level == 0) break
      }
      while (start > 1 && substr(text, start - 1, 1) ~ /[A-Za-z0-9_.:]/) --start
      whole = substr(text, start, end - start + 1)
      line = substr(text, 1, start - 1)
      sub(/.*\n/, "", line)
      # "Step features = ...": more lines belong to it.
      if (line ~ /[^ ]/ && line !~ /^ *return \{$/) exit 1
      copy = whole
      gsub("\"" parent "\"", "\"" name "\"", copy)
      gsub("\\(" parent "\\)", "(" name ")", copy)
      gsub("\\(" parent ",", "(" name ",", copy)
      indent = line
      gsub(/[^ ]/, " ", indent)
      next_one = substr(text, end + 1, 1)
      rest = substr(text, end + 1)
      if (next_one == ";" || next_one == ",")
        printf "%s%s\n%s%s%s", substr(text, 1, end), next_one, indent, copy, rest
      else printf "%s,\n%s%s%s", substr(text, 1, end), indent, copy, rest
    }' "$table" >"$table.new" && [[ -s $table.new ]]; then
    mv "$table.new" "$table"
    added=1
  else
    rm -f "$table.new"
  fi
done
row=$(places_of "\"$parent\"")
[[ $added -eq 1 ]] ||
  die 1 "$yours, its declaration is there; its row is yours, as that of $parent: $row"

digits=${chapter%%_*}
echo "$chapter/$name.cu: fill in its header, and the words of its row in ${tables[*]}"
echo "build:  cmake --build --preset release --target $chapter"
echo "run:    build/release/bin/$chapter --step $name --device emulated"
echo "diff:   cmake --build --preset release --target diff_${digits}_${parent%%_*}_$number"
echo "tests:  ctest --preset release -R test_$chapter"
pages="$chapter/README.md docs/reports/h200/README.md"
echo "pages:  build/release/bin/attn_report tables --reports docs/reports/h200 $pages"
