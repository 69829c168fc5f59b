#!/usr/bin/env bash
# chapter_pages.sh ROOT: a page of a chapter has at most 300 lines, tables and code not counted;
# the steps and the `diff_...` targets that a page names exist;
# a table has a line per row. Ends with planted faults.
set -uo pipefail
export LC_ALL=C.UTF-8
most_lines=300

pages_of() {  # pages_of ROOT: complaints, a line each
  local page lines step target targets
  cd "$1" || return
  # From the headers: diff_01_v1_v2 for a parent in the chapter, else diff_parent_02 or, for a later
  # ladder of the chapter, diff_parent_08_d1.
  targets=$(grep -m1 '^// parent' 0*/*.cu 2>/dev/null | while IFS='/:' read -r chapter step _ _ parent; do
    parent=${parent##*parent} parent=${parent// } number=${chapter:0:2} step=${step%%_*}
    [[ $parent =~ ^[a-z][0-9]+_ ]] && echo "diff_${number}_${parent%%_*}_$step" ||
      printf '%s\n' "diff_parent_$number" "diff_parent_${number}_$step"
  done)
  for page in 0*/*.md; do
    [[ -f $page && $page != */RESULTS.md ]] || continue
    lines=$(sed -e '/^<!-- table: /,/^<!-- end table -->/d' -e '/^```/,/^```$/d' \
      -e '/^<!-- \(code\|diff\): /,/^<!-- end code -->/d' "$page" | wc -l)
    [[ $lines -le $most_lines ]] || echo "$page: $lines lines, at most $most_lines"
  done
  for page in README.md docs/*.md 0*/*.md 0*/exercises/*.md; do
    [[ -f $page ]] || continue
    # A rule of a table within a line: something has wrapped the table like a paragraph.
    grep -nE '\|[^-:]*\| *\|:?---' "$page" | sed "s#^\([0-9]*\):.*#$page:\1: a table in one line#"
    while read -r target; do
      grep -qxF -- "$target" <<<"$targets" || echo "$page: names $target, which is no target"
    done < <(grep -oE '\bdiff_(parent_)?0[1-8](_[a-z][0-9]+)*\b' "$page" | sort -u)
    [[ $page == 0* ]] || continue
    # A step is a file, of this chapter or of another, a line of the chapter's table, or a name in
    # the log of what was tried; `v2_v3` is the end of a target's name.
    while read -r step; do
      compgen -G "0*/$step.cu" >/dev/null || grep -qswF -- "$step" "${page%%/*}/chapter.cpp" \
        docs/reports/*/"${page%%/*}.tried.txt" || echo "$page: names $step, which is not there"
    done < <(grep -oE '`[vbfqsdp][0-9]+[a-z]?_[a-z0-9_]+(\.cu)?`' "$page" | tr -d '`' |
      sed 's/\.cu$//' | grep -vE '^[vbfqsdp][0-9]+_[vbfqsdp][0-9]+$' | sort -u)
  done
}

said=$(pages_of "$1")
[[ -z $said ]] || { echo "$said"; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/01_first"
said_of() { pages_of "$work"; }
expect() {  # expect REGEX
  local said
  said=$(said_of)
  [[ $said =~ $1 ]] || { echo "no '$1' in: $said"; exit 1; }
}
yes a | head -n 300 >"$work/01_first/README.md"
[[ -z $(said_of) ]] || { echo "300 lines: $(said_of)"; exit 1; }
echo a >>"$work/01_first/README.md"
expect '301 lines, at most 300'
{ yes a | head -n 300; printf '<!-- table: tree x -->\nb\n<!-- end table -->\n'; } \
  >"$work/01_first/README.md"
[[ -z $(said_of) ]] || { echo "300 lines and a table: $(said_of)"; exit 1; }
echo 'In `v1_one.cu` a thread' >"$work/01_first/README.md"
expect 'names v1_one, which is not there'
echo >"$work/01_first/v1_one.cu"
[[ -z $(said_of) ]] || { echo "a step that is there: $(said_of)"; exit 1; }
echo '// parent    v1_one' >"$work/01_first/v2_two.cu"
echo '`diff_01_v1_v2` and `diff_01_v2_v3`' >"$work/01_first/README.md"
[[ $(said_of) == *'names diff_01_v2_v3, which is no target' ]] || { echo "targets: $(said_of)"; exit 1; }
printf '| a | b |\n|---|---:|\n| c | d |\n' >"$work/01_first/README.md"
[[ -z $(said_of) ]] || { echo "a table: $(said_of)"; exit 1; }
echo '| a | b | |---|---:| | c | d |' >"$work/01_first/README.md"
expect '01_first/README.md:1: a table in one line'
