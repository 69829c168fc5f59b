#!/usr/bin/env bash
# code_links.sh ROOT: pages quote code by filled fences (<!-- code: FILE REGION -->), which plain
# Markdown shows, too; no page has a quotation that only the built site would show.
set -uo pipefail
cd "$1" || exit 1
mapfile -t pages < <(find [!.]* -path build -prune -o -name '*.md' -print | sort)
if grep -nHE '<!--.*[\\@]snippet|^\[Code:' "${pages[@]}"; then
  echo "quotations that plain Markdown does not show"
  exit 1
fi
count=$(cat "${pages[@]}" | grep -cE '^<!-- (code|diff): ')
[[ $count -gt 50 ]] || { echo "only $count pages quote code"; exit 1; }
echo "$count quotations"
