#!/usr/bin/env bash
# answers.sh QUIZ_01_NAIVE ROOT: what may be an answer. Arithmetic is one; what cannot be one is refused before anything is
# sealed or shown.
set -euo pipefail
quiz=$1
exercises=$2/01_naive/exercises
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "$1"; cat "$work/said"; exit 1; }

# predicted STATUS WHAT OPERATIONS BYTES BOUND MILLISECONDS
predicted() {
  local status=0
  printf 'operations = %s\nhbm_bytes = %s\nbound = %s\nmilliseconds = %s\n' "${@:3}" >"$work/e.txt"
  rm -f "$work/seal"
  "$quiz" --answers "$work/e.txt" --task "$exercises/e.task" --seal "$work/seal" </dev/null >"$work/said" 2>&1 || status=$?
  [[ $status -eq $1 ]] || fail "$3, $4, $5, $6: status $status"
  grep -qE "$2" "$work/said" || fail "$3, $4, $5, $6: does not say $2"
  if [[ $status -eq 0 ]]; then return; fi
  if grep -q expected "$work/said"; then fail "$3, $4, $5, $6: the truth is shown"; fi
  [[ ! -e $work/seal ]] || fail "$3, $4, $5, $6: is sealed"
}
predicted 0 'operations = 549755813888    \(4 \* 4096\^2 \* 128 \* 64\)' '4 * 4096^2 * 128 * 64' '(64*4096) * (4096*12 + 8*128)' hbm '13.15/4.8'
predicted 2 'operations = 4 x 4096: must be one number, or arithmetic' '4 x 4096' 1 HBM 1
predicted 2 'operations = 5e11 or 6e11: must be' '5e11 or 6e11' 1 HBM 1
predicted 2 'hbm_bytes = 1,3e10: must be' 5e11 1,3e10 HBM 1
predicted 2 'hbm_bytes = 1/0: must be' 5e11 1/0 HBM 1
predicted 2 'hbm_bytes = \(1: must be' 5e11 '(1' HBM 1
predicted 2 'milliseconds = 2.7 ms: must be' 5e11 1e10 HBM '2.7 ms'
predicted 2 'bound = memory: must be one of HBM, ' 5e11 1e10 memory 2.7
predicted 2 'milliseconds = x: must be' '?' 1e10 HBM x
predicted 1 'operations: not answered' '?' 1e10 HBM 2.7
echo 'operatons = 5' >"$work/e.txt"
if "$quiz" --answers "$work/e.txt" --task "$exercises/e.task" >"$work/said" 2>&1; then fail "a misspelt name is taken"; fi
grep -q 'operatons: not a name in this exercise' "$work/said" || fail "a misspelt name is not said"

# answered STATUS WHAT NAME VALUE: the right answers but one.
answered() {
  local status=0
  sed "s/^$3 = .*/$3 = $4/" "$exercises/d.solution.txt" >"$work/d.txt"
  "$quiz" --answers "$work/d.txt" --key "$exercises/d.key" </dev/null >"$work/said" 2>&1 || status=$?
  [[ $status -eq $1 ]] || fail "$3 = $4: status $status"
  grep -qE "$2" "$work/said" || fail "$3 = $4: does not say $2"
}
answered 0 'right a_store_sectors = 32' a_store_sectors '64 \/ 2'
answered 0 'right a_bound = l1_requests' a_bound L1_Requests
answered 1 'wrong a_store_sectors = 16' a_store_sectors 16
answered 2 'a_store_sectors = 32.5: must be one integer' a_store_sectors 32.5
answered 2 'a_store_sectors = 32 sectors: must be one integer' a_store_sectors '32 sectors'
answered 2 'a_bound = L1: must be one of hbm, fp32, tensor, l1_requests' a_bound L1
echo "everything as expected"
