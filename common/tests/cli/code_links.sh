#!/usr/bin/env bash
# code_links.sh ROOT: where a page shows code of a file, plain Markdown has a link,
# [Code: v1_global.cu, softmax](v1_global.cu), on a line of its own between blank lines; the file is
# there, and has the region; and no page hides a quotation in a comment.
set -uo pipefail
cd "$1" || exit 1
bad=0 count=0
wrong() { printf '%s: %s\n' "$1" "$2"; bad=1; }

mapfile -t pages < <(find [!.]* -path build -prune -o -name '*.md' -print | sort)
while IFS=: read -r page line text; do
  wrong "$page:$line" "a quotation that nobody sees: $text"
done < <(grep -nHE '<!--.*[\\@]snippet' "${pages[@]}")
while IFS=: read -r page line text; do
  count=$((count + 1))
  if [[ ! $text =~ ^\[Code:\ ([^],]+),\ ([a-z0-9_]+)\]\(([^\)]+)\)$ ]]; then
    wrong "$page:$line" "must be [Code: FILE, REGION](PATH), alone on its line: $text"
    continue
  fi
  name=${BASH_REMATCH[1]} region=${BASH_REMATCH[2]} file=$(dirname "$page")/${BASH_REMATCH[3]}
  [[ $(basename "$file") == "$name" ]] || wrong "$page:$line" "says $name and leads to $file"
  [[ -f $file ]] || { wrong "$page:$line" "$file is not there"; continue; }
  [[ $(grep -cF "//! [$region]" "$file") -eq 2 ]] ||
    wrong "$page:$line" "$file has no two markers //! [$region]"
  around=$(sed -n "$((line - 1))p;$((line + 1))p" "$page")
  [[ -z ${around//[[:space:]]/} ]] || wrong "$page:$line" "needs a blank line before and behind"
done < <(grep -nHF '[Code:' "${pages[@]}")
[[ $count -gt 0 ]] || { echo "no page quotes code"; exit 1; }
echo "$count quotations"
exit "$bad"
