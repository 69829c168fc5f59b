#!/usr/bin/env bash
# long_lines.sh ROOT [--write]: no line is longer than 100 columns. long_lines.txt lists the
# files that still have some, and how many: none may get more, and a file without any leaves the
# list. --write counts anew; who commits a number that has risen has a reason.
set -euo pipefail
export LC_ALL=C.UTF-8
root=$1 list=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)/long_lines.txt
cd "$root"

declare -A allowed=() counted=()
while read -r count file; do allowed[$file]=$count; done < <(grep -v '^#' "$list")
while IFS=: read -r file count; do
  [[ $count -eq 0 ]] || counted[$file]=$count
done < <(find [!.]* .ci .devcontainer -regextype posix-extended \
  -regex 'build|docs/reports|.*/(fixtures|student)' -prune -o -type f \
  -regex '.*\.(h|cpp|cu|inc|sh|py|cmake|awk|js|css)|.*(CMakeLists\.txt|Dockerfile.*|/run)' \
  -exec grep -HcE '.{101}' {} +)

if [[ ${2:-} == --write ]]; then
  {
    grep '^#' "$list"
    for file in "${!counted[@]}"; do echo "${counted[$file]} $file"; done | sort -k 2
  } >"$list.new"
  mv "$list.new" "$list"
  exit
fi

bad=0
for file in "${!counted[@]}"; do
  most=${allowed[$file]:-0}
  [[ ${counted[$file]} -gt $most ]] || continue
  echo "$file: ${counted[$file]} lines are longer than 100 columns, must be at most $most:"
  grep -nE '.{101}' "$file" | cut -c1-110
  bad=1
done
for file in "${!allowed[@]}"; do
  [[ -z ${counted[$file]:-} ]] || continue
  echo "$file: has no long line any more: long_lines.sh ROOT --write takes it off the list"
  bad=1
done
echo "${#allowed[@]} files still have long lines"
exit "$bad"
