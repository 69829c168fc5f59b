#!/usr/bin/env bash
# chapter_pages.sh ROOT: the README of a chapter has at most 350 lines, generated ones not counted;
# a step that a page names is there; and words of older pages, which nobody in the field knows, are
# in no page and in no source. Ends with planted faults.
set -uo pipefail
export LC_ALL=C.UTF-8
most_lines=350
old_words='seldo[m]|sea[m]|hoar[d]s?'

pages_of() {  # pages_of ROOT: complaints, a line each
  local page lines step
  cd "$1" || return
  for page in 0*/README.md 0*/FP8.md 0*/CACHES.md 0*/MLA.md 0*/SPARSE.md; do
    [[ -f $page ]] || continue
    lines=$(sed -e '/^<!-- table: /,/^<!-- end table -->/d' \
      -e '/^<!-- \(code\|diff\): /,/^<!-- end code -->/d' "$page" | wc -l)
    [[ $lines -le $most_lines ]] || echo "$page: $lines lines, at most $most_lines"
  done
  for page in 0*/README.md 0*/FP8.md 0*/CACHES.md 0*/MLA.md 0*/SPARSE.md 0*/RESULTS.md 0*/exercises/*.md; do
    [[ -f $page ]] || continue
    # A step is a file, of this chapter or of another, a line of the chapter's table, or a name in
    # the log of what was tried; `v2_v3` is the end of a target's name.
    while read -r step; do
      compgen -G "0*/$step.cu" >/dev/null || grep -qswF -- "$step" "${page%%/*}/chapter.cpp" \
        docs/reports/*/"${page%%/*}.tried.txt" || echo "$page: names $step, which is not there"
    done < <(grep -oE '`[vbfqsd][0-9]+[a-z]?_[a-z0-9_]+(\.cu)?`' "$page" | tr -d '`' | sed 's/\.cu$//' |
      grep -vE '^[vbfqsd][0-9]+_[vbfqsd][0-9]+$' | sort -u)
  done
  grep -rnwE "$old_words" --include='*.'{md,h,cu,cpp,inc,sh,txt} \
    --exclude-dir={build,reports,.git} .
}

said=$(pages_of "$1")
[[ -z $said ]] || { echo "$said"; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/01_first"
expect() {  # expect REGEX
  local said
  said=$(pages_of "$work")
  [[ $said =~ $1 ]] || { echo "no '$1' in: $said"; exit 1; }
}
yes a | head -n 350 >"$work/01_first/README.md"
[[ -z $(pages_of "$work") ]] || { echo "350 lines: $(pages_of "$work")"; exit 1; }
echo a >>"$work/01_first/README.md"
expect '351 lines, at most 350'
{ yes a | head -n 350; printf '<!-- table: tree x -->\nb\n<!-- end table -->\n'; } \
  >"$work/01_first/README.md"
[[ -z $(pages_of "$work") ]] || { echo "350 lines and a table: $(pages_of "$work")"; exit 1; }
echo 'In `v1_one.cu` a thread' >"$work/01_first/README.md"
expect 'names v1_one, which is not there'
touch "$work/01_first/v1_one.cu"
[[ -z $(pages_of "$work") ]] || { echo "a step that is there: $(pages_of "$work")"; exit 1; }
printf 'O is rescaled %s\n' sel''dom >"$work/01_first/README.md"
expect 'README.md:1:O is rescaled'
