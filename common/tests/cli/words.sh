#!/usr/bin/env bash
# words.sh ROOT: no page, comment or test name uses a word of words.txt. Generated tables and quoted
# output are not looked at. Ends with planted faults.
set -uo pipefail
export LC_ALL=C.UTF-8
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)

# Hits of FILE...: FILE:LINE: TEXT -> what to write.
hits() {
  local pattern instead
  while IFS=$'\t' read -r pattern instead; do
    [[ $pattern == '#'* || -z $pattern ]] && continue
    grep -nHP -- "$pattern" "$@" /dev/null | sed "s|\$|  -> ${instead//|/ or }|"
  done <"$here/words.txt"
}
# Files of words: what git tracks, but for evidence, logs, fixtures, the list itself; and for the
# folders that are still to be rewritten.
to_be_rewritten='^common/(check|emulator|exercise|files|report|run|scripts|tests)/'
files() {
  cd -- "$1" && git ls-files |
    grep -E '\.(md|cu|h|cpp|inc|sh|py|cmake|txt|edits|mutants)$' |
    grep -vE '^docs/(reports/|versions\.md)|/fixtures/|^common/tests/cli/(words|long_lines)\.' |
    grep -vE "$to_be_rewritten"
}
said=$(cd -- "$1" && mapfile -t all < <(files "$1") && hits "${all[@]}")
if [[ -n $said ]]; then
  echo "$said"
  echo "$(wc -l <<<"$said") places"
  exit 1
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for planted in 'Nobody waits.' 'a lane sees the keys' 'whole numbers of rows'; do
  echo "// $planted" >"$work/planted.cu"
  [[ $(hits "$work/planted.cu") == *' -> '* ]] || { echo "not found: $planted"; exit 1; }
done
echo '// The producer warp issues the next tile.' >"$work/planted.cu"
[[ -z $(hits "$work/planted.cu") ]] || { echo "found in plain words"; exit 1; }
