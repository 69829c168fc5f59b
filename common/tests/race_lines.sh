#!/usr/bin/env bash
# race_lines.sh MUTANT PLACE PLACE FOLDER...: a mutant that begins with "// race: A | B" has a race between a line
# with A and one with B. PLACE: a reported line as "file:number"; the file lies in one of the folders.
set -euo pipefail
mutant=$1 places=("$2" "$3")
folders=("${@:4}")

IFS= read -r first <"$mutant"
[[ $first == "// race: "*" | "* ]] || { echo "$mutant: does not begin with '// race: A | B'"; exit 1; }
first=${first#"// race: "}
a=${first%%" | "*} b=${first#*" | "}

lines=()
for place in "${places[@]}"; do
  file=${place%:*} found=
  for folder in "${folders[@]}"; do
    [[ -f $folder/$file ]] || continue
    found=$(sed -n "${place##*:}p" "$folder/$file")
    break
  done
  [[ -n $found ]] || { echo "$place: no such line in ${folders[*]}"; exit 1; }
  echo "$place: $found"
  lines+=("$found")
done
[[ ${lines[0]} == *"$a"* && ${lines[1]} == *"$b"* ]] || [[ ${lines[0]} == *"$b"* && ${lines[1]} == *"$a"* ]] ||
  { printf 'these are not the lines of the race, %s\n' "$first"; exit 1; }
