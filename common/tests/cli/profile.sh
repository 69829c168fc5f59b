#!/usr/bin/env bash
# profile.sh SCRIPTS ATTN_REPORT EXPORT: what profile.sh makes of a chapter program and of ncu, both played
# by stand-ins that write down how they were called. EXPORT is what ncu "counted".
# shellcheck disable=SC2016  # the bodies of stand-ins are expanded when they run
set -euo pipefail
scripts=$1 report=$2
export EXPORT=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tree="$work/a tree"
results=$tree/build/release/results
csv=$results/01_naive.v2_coalesced.ncu.csv
mkdir -p "$tree/common/scripts" "$tree/01_naive" "$tree/02_other" "$tree/build/release/bin" "$work/with" "$work/system"
cp "$scripts/profile.sh" "$scripts/ncu_export.sh" "$scripts/metrics.txt" "$tree/common/scripts"
touch "$tree/01_naive/chapter.cpp" "$tree/02_other/chapter.cpp"

# The real commands that profile.sh itself needs, and nothing else of this machine: above all no ncu.
for tool in bash env cat mkdir mktemp dirname grep sed awk rm wc mv; do
  ln -s "$(command -v "$tool")" "$work/system/$tool"
done

stand_in() {  # PATH BODY
  printf '#!/usr/bin/env bash\nprintf "%%s\\n" "%s $*" >>"$CALLS"\n%s\n' "${1##*/}" "$2" >"$1"
  chmod +x "$1"
}
program() { stand_in "$tree/build/release/bin/01_naive" "$1"; }
ncu() { stand_in "$work/with/ncu" "$1"; }

good_program='case " $* " in
  *" --list "*) echo "v1_global forward"; echo "v2_coalesced forward 47 lines" ;;
  *" --time "*) echo "v2_coalesced  pass  158.6 ms" ;;
  *) echo "device: NVIDIA H200 (sm_90)"
     echo "problem: forward B=4 Hq=16 Hkv=16 seqlen_q=2048 seqlen_k=2048 d=128 bf16 inputs=random seed=1"
     echo "v2_coalesced launched once" ;;
esac'
good_ncu='case " $* " in
  *" --import "*) echo "==PROF== a message"; cat "$EXPORT" ;;
  *) while [[ $1 != -o ]]; do shift; done
     echo "a report" >"$2.ncu-rep" ;;
esac'

run() {  # FOLDERS_IN_PATH ARGUMENT...: sets status, output, calls
  local path=$1
  shift
  status=0
  export CALLS=$work/calls
  : >"$CALLS"
  output=$(PATH=$path ATTN_NCU_FOLDERS=${folders-} "$tree/common/scripts/profile.sh" "$@" 2>&1 </dev/null) ||
    status=$?
  calls=$(<"$CALLS")
}
fail() {
  printf 'FAILED: %s\n--- exit %s\n%s\n--- calls\n%s\n' "$1" "$status" "$output" "$calls"
  exit 1
}
exits() { [[ $status -eq $1 ]] || fail "exit status, not $1"; }
has() { [[ $2 == *"$1"* ]] || fail "no '$1'"; }
has_not() { [[ $2 != *"$1"* ]] || fail "'$1'"; }
all=$work/with:$work/system
problem=(--batch 4 --heads 16 --head-dim 128 --seqlen 2048)

# The export: one launch, the metrics of metrics.txt, clocks left alone.
program "$good_program"
ncu "$good_ncu"
run "$all" 01_naive v2_coalesced "${problem[@]}"
exits 0
launch=$(grep '^ncu .*--metrics' <<<"$calls")
has "--clock-control none" "$launch"
has "--profile-from-start off" "$launch"
has "gpu__time_duration.sum,dram__bytes_read.sum" "$launch"
has "--section SpeedOfLight" "$launch"
has "bin/01_naive ${problem[*]} --profile v2_coalesced" "$launch"
has "output_kernel" "$output"
has "sectors a load request                1.5" "$output"
has "bank conflicts, %                     n/a" "$output"
[[ $(head -n 1 "$csv") == "==profile.sh== clocks: none" ]] || fail "no clocks in $(head -n 3 "$csv")"
[[ $(sed -n 2p "$csv") == "==profile.sh== problem: forward B=4 "*" seed=1" ]] || fail "no problem"
[[ -f $results/01_naive.v2_coalesced.ncu-rep ]] || fail "no report"
# attn_report reads it, and knows the problem.
said=$("$report" diff "$csv" "$csv") || [[ $? -eq 3 ]] || fail "attn_report diff: $said"
has "problem: forward B=4 Hq=16 Hkv=16 seqlen_q=2048" "$said"
has_not "not stated" "$said"

run "$all" --lock-clocks 01_naive v2_coalesced
exits 0
has "--clock-control base" "$calls"
grep -q '^==profile.sh== clocks: base$' "$csv" || fail "no clocks"

# An ncu in the folders to look in, and one that is named.
folders="$work/nowhere $work/with" run "$work/system" 01_naive v2_coalesced
exits 0
has "ncu --clock-control" "$calls"
NCU=$work/with/ncu run "$work/system" 01_naive v2_coalesced
exits 0
has "ncu --clock-control" "$calls"
NCU=$work/nosuch run "$all" 01_naive v2_coalesced
exits 2
has "NCU=$work/nosuch: no such program" "$output"

# Counters for administrators only: what to do, times, and no export of another run left behind.
ncu 'echo "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU"; exit 1'
run "$all" 01_naive v2_coalesced "${problem[@]}"
exits 0
has "administrators only" "$output"
has "sudo -E common/scripts/profile.sh" "$output"
has "NVreg_RestrictProfilingToAdminUsers=0" "$output"
has "Going on with times only" "$output"
has "158.6 ms" "$output"
has "01_naive ${problem[*]} --operation forward --step v2_coalesced --time" "$calls"
[[ ! -e $csv ]] || fail "an old export is still there"

# No ncu.
run "$work/system" 01_naive v2_coalesced
exits 0
has "no ncu: " "$output"
has "158.6 ms" "$output"
has_not "ncu " "$calls"

# ncu fails, or counts nothing: its words, status 1.
ncu 'echo "==ERROR== Unknown metric"; exit 9'
run "$all" 01_naive v2_coalesced
exits 1
has "Unknown metric" "$output"
has "ncu failed (exit 9)" "$output"
ncu "${good_ncu/cat \"\$EXPORT\"/head -n 1 \"\$EXPORT\"}"
ln -s "$(command -v head)" "$work/system/head"
run "$all" 01_naive v2_coalesced
exits 1
has "ncu wrote no counters" "$output"
[[ ! -e $csv ]] || fail "an export without counters"

# The chapter program refuses: its words and status, and ncu is left alone.
ncu "$good_ncu"
for refusal in 2 3 4 77; do
  program "echo 'the reason'; exit $refusal"
  run "$all" 01_naive v2_coalesced
  exits $refusal
  has "the reason" "$output"
  has_not "ncu " "$calls"
done
has "nothing to profile without a GPU" "$output"

# Mistakes on the command line.
refused() {  # TEXT ARGUMENT...
  local text=$1
  shift
  run "$all" "$@"
  exits 2
  has "$text" "$output"
  [[ $(wc -l <<<"$output") -eq 1 ]] || fail "not one line"
  [[ -z $calls ]] || fail "something was called"
}
refused "CHAPTER and STEP are needed"
refused "CHAPTER and STEP are needed" 01_naive
refused "--clocks: must be --lock-clocks" --clocks 01_naive v2_coalesced
refused "no chapter 99_nosuch: 01_naive 02_other" 99_nosuch v1
refused "02_other: not built" 02_other v1
run "$all" --help
exits 0
has "ATTN_NCU_FOLDERS" "$output"
echo "everything as expected"
