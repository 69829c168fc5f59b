#!/usr/bin/env bash
# Builds the kernels of FlashAttention-3 that peers.py and peers_formats.py time, as the package
# flash_attn_interface.
#
#   common/scripts/flash_attention_3.sh CHECKOUT OUT
#   common/scripts/flash_attention_3.sh ~/flash-attention ~/fa3
#   PYTHONPATH=~/fa3 common/scripts/verify_on_gpu.sh peers 06_flash_v3_hopper
#
# CHECKOUT: a clone of github.com/Dao-AILab/flash-attention with its submodule csrc/cutlass. OUT: a
# folder; objects of the same commit and options are not compiled again. Only some kernels are
# compiled, about a minute each on one core: head dims 64, 128 and 256, forward and backward in
# bf16, forward in e4m3; for decoding head dim 128 in bf16, contiguous and in pages. A problem that
# needs another kernel ends Python with a "symbol lookup error".
#
# Needs nvcc, g++ and a python3 with PyTorch 2.9 or newer; only the last step needs PyTorch, so the
# kernels in OUT/obj-* may be compiled on another machine. Exit status: 0, 1 if something cannot be
# built, 2 for an error on the command line.
set -euo pipefail
if [[ ${1:-} == --help ]]; then
  sed -n '2,/^set -/{/^set -/d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"
  exit 0
fi
die() {
  printf 'flash_attention_3.sh: %s\n' "$2" >&2
  exit "$1"
}
[[ $# -eq 2 ]] || die 2 "usage: flash_attention_3.sh CHECKOUT OUT"
source=$1/hopper cutlass=$1/csrc/cutlass/include out=$2
[[ -f $source/flash_api_stable.cpp ]] || die 2 "$1: no checkout of flash-attention"
[[ -f $cutlass/cutlass/cutlass.h ]] ||
  die 2 "$1: csrc/cutlass is empty: git -C $1 submodule update --init csrc/cutlass"
commit=$(git -C "$1" rev-parse --short=7 HEAD)

options=(-std=c++17 -DNDEBUG "-I$cutlass" "-I$source")
for feature in APPENDKV LOCAL SOFTCAP FP16 HDIM96 HDIM192 HDIMDIFF64 HDIMDIFF192 SM8x; do
  options+=("-DFLASHATTENTION_DISABLE_$feature")
done
obj=$out/obj-$commit-$(md5sum <<<"${options[*]}" | cut -c1-8)
mkdir -p "$obj" "$out/flash_attn_3" || die 2 "$out: cannot be written"
kernels=(flash_prepare_scheduler flash_fwd_combine)
for d in 64 128 256; do
  kernels+=("instantiations/flash_bwd_hdim${d}_bf16_sm90")
  for type in bf16 e4m3; do kernels+=("instantiations/flash_fwd_hdim${d}_${type}_sm90"); done
done
for how in packgqa split paged paged_split; do
  kernels+=("instantiations/flash_fwd_hdim128_bf16_${how}_sm90")
done
objects=()
for kernel in "${kernels[@]}"; do
  object=$obj/$(basename "$kernel").o
  objects+=("$object")
  [[ -f $object ]] && continue
  echo "== $kernel"
  nvcc -O3 --use_fast_math --expt-relaxed-constexpr --expt-extended-lambda -Xcompiler -fPIC \
    -gencode arch=compute_90a,code=sm_90a -DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED \
    -DCUTLASS_ENABLE_GDC_FOR_SM90 -DCUTLASS_DEBUG_TRACE_LEVEL=0 "${options[@]}" \
    -c "$source/$kernel.cu" -o "$object.part" || die 1 "$kernel: not compiled"
  mv "$object.part" "$object"
done

echo "== flash_api_stable"
paths=$(python3 - <<'P'
import os, sysconfig
import torch
from torch.utils.cpp_extension import include_paths
library = os.path.join(os.path.dirname(torch.__file__), "lib")
print(*("-I" + p for p in [*include_paths(), sysconfig.get_paths()["include"]]), "-L" + library)
P
) || die 1 "python3 has no PyTorch"
cuda=$(dirname "$(dirname "$(command -v nvcc)")")
# shellcheck disable=SC2086  # several words
g++ -O3 -fPIC -shared -w -DUSE_CUDA -DPy_LIMITED_API=0x03090000 \
  -DTORCH_TARGET_VERSION=0x0209000000000000 "${options[@]}" $paths "-I$cuda/include" \
  "$source/flash_api_stable.cpp" "${objects[@]}" "-L$cuda/lib64" -lc10 -lc10_cuda -ltorch \
  -ltorch_cpu -ltorch_cuda -lcudart -Wl,-z,lazy \
  -o "$out/flash_attn_3/_C.so" ||
  die 1 "flash_api_stable.cpp: not built"

release=$(nvcc --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
version=3.0.0+g$commit.cuda$release
cp "$source/flash_attn_interface.py" "$out"
# Lazy binding: a kernel that was not compiled fails only when it is called.
cat >"$out/flash_attn_3/__init__.py" <<'P'
import os
import sys
import torch
flags = sys.getdlopenflags()
sys.setdlopenflags(os.RTLD_LAZY)
from . import _C
sys.setdlopenflags(flags)
P
rm -rf "$out"/flash_attn_3-*.dist-info
mkdir "$out/flash_attn_3-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: flash-attn-3\nVersion: %s\n' "$version" \
  >"$out/flash_attn_3-$version.dist-info/METADATA"
printf 'flash_attn_interface\nflash_attn_3\n' >"$out/flash_attn_3-$version.dist-info/top_level.txt"
echo "flash-attn-3 $version in $out"
