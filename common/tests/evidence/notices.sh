#!/usr/bin/env bash
# notices.sh ATTN_REPORT PROJECT: in a copy of the sources, evidence is recorded and then something
# is edited. What a figure depends on must make its lines stale, by the right key; what it does not
# depend on must not.
set -euo pipefail
report=$1 project=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export ATTN_PROBLEM_LISTS=$work
root=$work/project
reports=$root/docs/reports/gpu
mkdir -p "$reports"
for chapter in 01_naive 05_flash_decoding 06_flash_v3_hopper 07_paged; do
  mkdir -p "$root/$chapter"
  (cd "$project/$chapter" && find . -path ./exercises -prune -o -type f -print0 |
    xargs -0 cp --parents -t "$root/$chapter")
done
mkdir "$root/common"
for folder in api attn device run ptx python cmake scripts kernels; do
  [[ ! -d $project/common/$folder ]] || cp -r "$project/common/$folder" "$root/common"
done

# The line that a run would have left.
echo '{"commit":"here","date":"today"}' >"$work/measured"
lines() {  # PART CHAPTER NAME STEP OPTIONS
  local step="{\"name\":\"$4\",\"outcome\":\"pass\",\"time\":{}}"
  case $1 in
    times) echo "{\"timing_method\":4,\"operation\":\"any\",\"steps\":[$step]}" ;;
    peers) echo "{\"timing_method\":4,\"problems\":[{\"runs\":[{\"steps\":[$step]}]}]}" ;;
    counters) printf '==profile.sh== clocks: none\n"ID","Metric Name"\n"0","x"\n' ;;
  esac >"$work/file"
  "$report" evidence record --root "$root" "$reports" "$1" "$2" "$3" "$work/file" \
    --options="$5" --measured "$work/measured"
}
listed() {  # CHAPTER NAME: its options
  (cd "$root" && . common/scripts/gpu_problems.sh && steps_like() { echo "$2"; } &&
    problems_of "$1" | sed -n "s/^$2 //p" | sed 's/--step [^ ]*//')
}
lines times 01_naive 01_naive.forward_n4096 v1_global "$(listed 01_naive forward_n4096)"
lines times 05_flash_decoding 05_flash_decoding.decode_b16_n8192 v13_even_splits \
  "$(listed 05_flash_decoding decode_b16_n8192)"
lines times 06_flash_v3_hopper 06_flash_v3_hopper.forward_d128_n2048 v14_tuned \
  "$(listed 06_flash_v3_hopper forward_d128_n2048)"
lines times 06_flash_v3_hopper 06_flash_v3_hopper.forward_e4m3_d128_n2048 f5_incoherent \
  "$(listed 06_flash_v3_hopper forward_e4m3_d128_n2048)"
lines times 07_paged 07_paged.decode_b16_n8192 v5_balanced_plan \
  "$(listed 07_paged decode_b16_n8192)"
of_list() { (. "$root/common/scripts/gpu_problems.sh" && "$@"); }
lines counters 05_flash_decoding 05_flash_decoding.v13_even_splits v13_even_splits \
  "$(of_list profiled_problem 05_flash_decoding v13_even_splits)"
peers=$(of_list peers_of 05_flash_decoding | sed -n 1p)
first=$(of_list peer_problems peers.05_flash_decoding | sed -n 1p)
lines peers 05_flash_decoding peers.05_flash_decoding v13_even_splits "${peers#* } $first"
peers=$(of_list peers_of 07_paged | grep pages)
first=$(of_list peer_problems peers.07_paged.pages | sed -n 1p)
lines peers 07_paged peers.07_paged.pages v5_balanced_plan "${peers#* } $first"

echo "host times of calls" >"$reports/calls.common.txt"
"$report" evidence finish --root "$root" "$reports" calls common passed 1 calls.common.txt \
  --measured "$work/measured"

# Which files peers_formats.py writes: verify_on_gpu.sh, code_keys.cpp and gpu_problems.sh agree.
scripts=$root/common/scripts
of_script=$(sed -n 's/^ *\(\*\.[^)]*\)) script=peers_formats.py.*/\1/p' "$scripts/verify_on_gpu.sh")
keys=$project/common/report/code_keys.cpp
of_keys=$(sed -n '/by_peers_formats/,/^}/s/.*std::array{\(.*\)}.*/\1/p' "$keys" |
  sed 's/", "/|*/g; s/"//g; s/^/*/')
[[ -n $of_script && $of_script == "$of_keys" ]] ||
  { echo "FAILED: verify_on_gpu.sh: $of_script, code_keys.cpp: $of_keys"; exit 1; }
for chapter in 05_flash_decoding 06_flash_v3_hopper 07_paged 08_quant_sparse; do
  while read -r name options; do
    case " $options " in
      *e4m3*|*sage*|*fa3_*|*" decode "*fa3*) [[ $name =~ \.(fa3|fp8|pages)$ ]] ;;
      *) [[ ! $name =~ \.(fa3|fp8|pages)$ ]] ;;
    esac || { echo "FAILED: $name $options: which script times it?"; exit 1; }
  done < <(of_list peers_of "$chapter")
done

stale() { "$report" evidence check --root "$root" "$reports" | grep ' stale: ' || true; }
[[ -z $(stale) ]] || { stale; echo "FAILED: stale before anything was edited"; exit 1; }

count=0
# edit FILE SED: changes the one file of that name in the copy, and says what is stale then.
edit() {
  local path
  path=$(find "$root" -name "${1##*/}" -path "*$1")
  [[ -f $path ]] || { echo "FAILED: no $1, or several"; exit 1; }
  cp "$path" "$work/before"
  sed -i -E "$2" "$path"
  ! cmp -s "$path" "$work/before" || { echo "FAILED: $1 has nothing to edit: $2"; exit 1; }
  said=$(stale)
  cp "$work/before" "$path"
  count=$((count + 1))
}
noticed() {  # PATTERN WHAT FILE SED
  edit "$3" "$4"
  grep -q -- "$1" <<<"$said" || { echo "FAILED: not noticed: $2"; echo "$said"; exit 1; }
  echo "noticed: $2"
}
harmless() {  # WHAT FILE SED
  edit "$2" "$3"
  [[ -z $said ]] || { echo "FAILED: not harmless: $1"; echo "$said"; exit 1; }
  echo "harmless: $1"
}
v13=/05_flash_decoding/v13_even_splits.cu
kernel='^times 05_flash_decoding.*`v13_even_splits` has changed since'
launch='^times 05_flash_decoding.*: launch code has changed since'
method='^times 05_flash_decoding.*: the way of measuring has changed since'

noticed "$kernel" "a barrier in a kernel" $v13 '0,/__syncthreads\(\);/s///'
noticed '^times 01_naive.*`v1_global` has changed since' "device code that steps share" \
  /common/attn/kernel.h \
  's/(float to_float\(__nv_bfloat16 x\) \{ return )/\12 * /'
noticed "$kernel" "an instruction in ptx/" /common/ptx/mma.h '0,/\.row\.col\./s//.col.row./'
noticed "$kernel" "a compile flag" AttnChapter.cmake 's/-ftz=true/-ftz=false/'
noticed "$launch" "the grid in launch()" $v13 's/num_sms \* Config::kBlocksPerSm/num_sms/'
noticed "$launch" "the number of splits" /common/kernels/decode/splits.h \
  's/of_runs \/ 16/of_runs \/ 8/'
noticed '^times 06_flash_v3_hopper.*: launch code has changed since' "a tensor map" \
  /common/kernels/hopper/tensor_maps.h 's/\{64, tile_rows, panels, 1\}/{32, tile_rows, panels, 1}/'
f4=/06_flash_v3_hopper/f4_block_scales.cu
noticed '^times 06_flash_v3_hopper.*`f5_incoherent` has changed since' \
  "the parent's kernel, which a step launches" $f4 's/v_descale, sum\)/-v_descale, sum)/'
noticed '^times 06_flash_v3_hopper.*`f5_incoherent` has changed since' \
  "a kernel that only a host function of a header launches" \
  /06_flash_v3_hopper/kernels/quantise_tiles.h \
  '/\[hadamard\]/,/\[hadamard\]/s/ - / + /'
noticed '^times 06_flash_v3_hopper.*: launch code has changed since' \
  "the launch of the parent's kernel" $f4 \
  's/std::min<unsigned>\(scheduler\.count\(\), num_sms\)/num_sms/'
noticed "$launch" "the blocks of a launch" /common/kernels/decode/splits.h \
  's/(return )(p\.batch \* p\.kv_heads)/\12 * \2/'
noticed '^times 07_paged.*: launch code has changed since' "a plan" /host/plan.cpp \
  's/return plan(ned_blocks\(p\) \+ row)/return 1 + plan\1/'
noticed '^times 01_naive.*: launch code has changed since' "a workspace" /01_naive/*chapter.cpp \
  '0,/score_bytes\(p, 1, 4\)\}/s//score_bytes(p, 2, 4)}/'
noticed "$launch" "a launch attribute" /common/attn/kernel.h \
  's/cudaFuncAttributeMaxDynamicSharedMemorySize/cudaFuncAttributePreferredSharedMemoryCarveout/'
noticed "$method" "the timer" /common/device/device.cpp \
  's/kLongestSpin = 64e-3/kLongestSpin = 1e-3/'
noticed "$method" "the L2 flush" /common/device/device.cpp 's/2 \* gpu_info\(\)\.l2_bytes/4096/'
noticed "$method" "the spin kernel" /common/device/spin.cu 's/seconds \* 1e9/seconds * 1e8/'
noticed "$method" "how many launches warm up" /common/run/options.h \
  's/warmup = [0-9]+/warmup = 1/'
noticed '^peers 05_flash_decoding.*: the way of measuring has changed since' "peers.py" peers.py \
  's/2 \* busy/busy/'
noticed '^peers 07_paged.*: the way of measuring has changed since' "peers_formats.py" \
  peers_formats.py 's/PAGE = 16/PAGE = 32/'
noticed '^counters 05_flash_decoding.*: the way of measuring has changed since' \
  "the flags of ncu" verify_on_gpu.sh 's/--clock-control none/--clock-control base/'
noticed '^calls common.*: the way of measuring has changed since' "the host code of a call" \
  /python/attn/calls.py 's/_MOST_PLANS = 256/_MOST_PLANS = 1/'
noticed "$launch" "the list of problems" gpu_problems.sh \
  's/(decode_b16_n8192 .*cache 16 8192 32) 8/\1 4/'
noticed '^peers 05_flash_decoding.*: launch code has changed since' "the problems of peers" \
  gpu_problems.sh 's/n in 1024 8192 65536 262144; do cache 1 /n in 8192 65536 262144; do cache 1 /'
noticed_edits=$count

harmless "a comment" $v13 '20s,^,// A comment.\n,; s,(__syncthreads\(\);).*,\1  // another one,'
harmless "layout" $v13 's,^  ,      ,; \,//|^#,!s, = , =\n        ,'
harmless "the values that a step is checked against" /06_flash_v3_hopper/host/fp8.cpp \
  's/x\[i\] \*= random_sign/x[i] *= 2 * random_sign/'
harmless "a renamed local variable" $v13 's/\bfactor\b/scale_of_the_row/g'
harmless "the help text of an option" /common/run/options.cpp \
  's/timed launches/launches that count/'
harmless "a word of a message" $v13 's/only head dims 64/head dims: 64/'
harmless "a comment in peers.py" peers.py '3s,^,# A comment.\n,'
harmless "a step's idea in the chapter's table" /01_naive/*chapter.cpp \
  's/adjacent threads on adjacent addresses/coalesced loads/'
harmless "the parent's pass, which a step replaces" $f4 \
  's/quantise_tiles<false/quantise_tiles<true/'
harmless "another problem in the list" gpu_problems.sh \
  's/^( *)echo "decode_b1_n8192 .*/&\n\1echo "decode_b2_n8192 $(cache 2 8192 32 8)"/'
echo "$noticed_edits edits noticed, $((count - noticed_edits)) harmless ones not"
