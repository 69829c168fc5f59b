#!/usr/bin/env bash
# example.sh CMAKE BUILD EXAMPLE: installs libattention, builds the example project against it with
# find_package and with pkg-config, and runs it.
set -euo pipefail
cmake=$1 build=$2 example=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$cmake" --install "$build" --prefix "$work/prefix" --component attention >"$work/log" ||
  { cat "$work/log"; exit 1; }
"$cmake" -S "$example" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" >"$work/log" 2>&1 &&
  "$cmake" --build "$work/build" >>"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
for kind in attention attention_static; do
  "$work/build/paged_decode_$kind" || exit 1
done

if command -v pkg-config >/dev/null; then
  export PKG_CONFIG_PATH
  PKG_CONFIG_PATH=$(dirname "$(find "$work/prefix" -name attention_kernels.pc)")
  # The file names the prefix at configuration; here it was another.
  flags=$(pkg-config --define-variable=prefix="$work/prefix" --cflags --libs attention_kernels)
  # shellcheck disable=SC2086  # several words
  c++ -std=c++17 "$example/paged_decode.cpp" -o "$work/example" $flags
  LD_LIBRARY_PATH=$(dirname "$(find "$work/prefix" -name libattention.so)") "$work/example"
fi

# The header is C.
printf '#include <attention_kernels/attention.h>\nint main(void) { return attn_steps() == 0; }\n' \
  >"$work/steps.c"
cc -std=c99 -Wall -Wextra -Werror -pedantic -fsyntax-only -I "$work/prefix/include" "$work/steps.c"
