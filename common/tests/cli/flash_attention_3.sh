#!/usr/bin/env bash
# flash_attention_3.sh SCRIPT: what the script of that name calls and writes, with stand-ins for the
# compilers, PyTorch and git.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
checkout=$work/fa out=$work/out
mkdir -p "$work/with" "$checkout/hopper" "$checkout/csrc/cutlass"
touch "$checkout/hopper/flash_api_stable.cpp" "$checkout/hopper/flash_attn_interface.py"
stand_in() {  # NAME BODY
  printf '#!/usr/bin/env bash\necho "%s $*" >>"%s"\n%s\n' "$1" "$work/calls" "$2" >"$work/with/$1"
  chmod +x "$work/with/$1"
}
makes='while [[ $# -gt 0 ]]; do [[ $1 != -o ]] || : >"$2"; shift; done'
stand_in nvcc '[[ $1 != --version ]] || { echo "release 13.0, V13"; exit; }
[[ -z ${BREAKS:-} || $* != *$BREAKS* ]] || exit 1; '"$makes"
stand_in g++ "$makes"
stand_in python3 '[[ -z ${LACKS:-} ]] || exit 1; echo "-I/torch -L/torch/lib"'
stand_in git 'echo 0123456'
run() {  # EXIT TEXT: runs the script; expects the status and, in what it says, the text
  local status=0 said
  : >"$work/calls"
  said=$(PATH=$work/with:$PATH "$script" "$checkout" "$out" 2>&1) || status=$?
  [[ $status == "$1" && $said == *"$2"* ]] ||
    { printf 'exit %s, must be %s with "%s":\n%s\n' "$status" "$1" "$2" "$said"; exit 1; }
}
script=$1
run 2 "csrc/cutlass is empty: git -C $checkout submodule update --init csrc/cutlass"
mkdir -p "$checkout/csrc/cutlass/include/cutlass"
touch "$checkout/csrc/cutlass/include/cutlass/cutlass.h"
BREAKS=bwd_hdim128 run 1 "flash_bwd_hdim128_bf16_sm90: not compiled"
compgen -G "$out/obj-*/flash_bwd_hdim64_bf16_sm90.o" >/dev/null || { echo "no object"; exit 1; }
! compgen -G "$out/obj-*/flash_bwd_hdim128_*" || { echo "a broken object was kept"; exit 1; }
LACKS=torch run 1 "python3 has no PyTorch"
compiled() { grep -c '^nvcc .* -c ' "$work/calls" || true; }
[[ $(compiled) == 10 ]] || { echo "compiled $(compiled) objects; 10 were missing"; exit 1; }
# By name: the kernels, and the features that are switched off.
sources=$(for o in "$out"/obj-*/*.o; do basename "$o" .o; done)
expected=$(for d in 128 256 64; do
  echo "flash_bwd_hdim${d}_bf16_sm90"
done
for how in _packgqa _paged _paged_split "" _split; do echo "flash_fwd_hdim128_bf16${how}_sm90"; done
for more in hdim128_e4m3 hdim256_bf16 hdim256_e4m3 hdim64_bf16 hdim64_e4m3; do
  echo "flash_fwd_${more}_sm90"
done
printf 'flash_fwd_combine\nflash_prepare_scheduler\n')
[[ $(sort <<<"$sources") == "$(sort <<<"$expected")" ]] || { echo "$sources"; exit 1; }
off=$(grep -m 1 '^nvcc .* -c ' "$work/calls" | grep -o 'DISABLE_[A-Za-z0-9]*' | LC_ALL=C sort |
  xargs)
[[ $off == "DISABLE_APPENDKV DISABLE_FP16 DISABLE_HDIM192 DISABLE_HDIM96 DISABLE_HDIMDIFF192 \
DISABLE_HDIMDIFF64 DISABLE_LOCAL DISABLE_SM8x DISABLE_SOFTCAP" ]] || { echo "$off"; exit 1; }
run 0 "flash-attn-3 3.0.0+g0123456.cuda13.0 in $out"
[[ $(compiled) == 0 ]] || { echo "objects were built again"; exit 1; }
binding='^g++ .*_DISABLE_APPENDKV .*-I/torch .*hdim128_bf16_paged_split_sm90.o .*-Wl,-z,lazy '
grep -q "$binding" "$work/calls" || { cat "$work/calls"; exit 1; }
[[ -f $out/flash_attn_3/_C.so && -f $out/flash_attn_interface.py &&
  $(<"$out/flash_attn_3/__init__.py") == *RTLD_LAZY* &&
  $(<"$out"/flash_attn_3-*/METADATA) == *"Version: 3.0.0+g0123456.cuda13.0"* ]]
