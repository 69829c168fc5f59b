#!/usr/bin/env bash
# glossary.sh ROOT: the glossary of docs/notation.md has each term once, in alphabetical order, with
# a meaning and a source; and each term (or one of several in a row) is used in another file.
set -uo pipefail
export LC_ALL=C.UTF-8
cd -- "$1" || exit 1
rows=$(awk '/^## /{on = /^## Glossary/} on && /^\| / && !/^\| term |^\|---/' docs/notation.md)
[[ $(wc -l <<<"$rows") -ge 50 ]] || { echo "fewer than 50 terms"; exit 1; }
bad=0
complain() { echo "$*"; bad=1; }
last=
mapfile -t files < <(git ls-files -- '*.md' '*.cu' '*.h' | grep -vE '^docs/(notation|reports/)')
while IFS='|' read -r _ terms meaning source rest; do
  terms=${terms# } terms=${terms% }
  [[ ${meaning// } && ${source// } && -z ${rest// } ]] || complain "$terms: three cells"
  key=${terms,,} key=${key//-/ }
  [[ $key > $last ]] || complain "$terms: after $last"
  last=$key
  found=
  IFS=, read -ra words <<<"$terms"
  for word in "${words[@]}"; do
    word=${word# }
    grep -qiFm1 -- "$word" "${files[@]}" && found=1 && break
  done
  [[ $found ]] || complain "$terms: in the glossary, and used nowhere"
done <<<"$rows"
exit "$bad"
