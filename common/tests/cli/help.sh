#!/usr/bin/env bash
# help.sh PROGRAM OPTION=GROUP ... OPTION= ...: --help has the option in that group ("Options"; "Of
# backward"), or has it not; an option that it leaves out is refused with a reason, not unknown.
set -euo pipefail
program=$1
help=$("$program" --help)
for word in "${@:2}"; do
  option=${word%%=*} group=${word#*=}
  found=$(awk -v option="$option" '/^[A-Z].*:$/ { group = $0 }
                                 $1 == option { print group }' <<<"$help")
  [[ $found == "${group:+$group:}" ]] || { echo "$option: in '$found', not '$group'"; exit 1; }
  [[ -z $group ]] || continue
  said=$("$program" "$option" 1 --seqlen 8 2>&1 || true)
  if grep -q "no such option" <<<"$said"; then echo "$option: $said"; exit 1; fi
done
echo "$# options as expected"
