#!/usr/bin/env bash
# filter.sh ROOT: what exercise_filter.sh refuses, with its words, and what it lets pass.
set -euo pipefail
shopt -s nullglob
filter=$1/common/scripts/exercise_filter.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# refused TEXT WHY: as printf would write it.
refused() {
  local said
  printf '%b' "$1" >"$work/x.inc"
  if said=$("$filter" text ex01a "$work/x.inc" 2>&1); then echo "passes: $1"; exit 1; fi
  grep -qE "^ex01a: refused: .*$2" <<<"$said" || { printf 'expected %s\nin %s\n' "$2" "$said"; exit 1; }
}
passes() {
  printf '%b' "$1" >"$work/x.inc"
  "$filter" text ex01a "$work/x.inc" || { echo "refused: $1"; exit 1; }
}

# What hides: behind a string that looks like a comment, behind a comment, in two lines, in another spelling.
refused '(void)"//"; extern "C" int system(const char*);\n' 'line 1: extern '
refused 'x();\n(void)"/*"; extern int y; (void)"*/";\n' 'line 2: extern '
refused "char c = '\"'; extern int b; c = '\"';" 'line 1: extern '
refused 'a();\n/*//*/ #include "check/reference.h"\n' 'line 2: a directive'
refused '/* \n */ #define merge max\n' 'line 2: a directive'
refused '#pragma unroll\n#define merge max\n' 'line 2: a directive'
refused '#if 0\n#endif\n' 'line 1: a directive'
refused '#include <fstream>\n' 'line 1: a directive'
refused 'ex\\\ntern int x;\n' 'line 1 has a backslash at its end'
refused '// a comment \\  \nx();\n' 'line 1 has a backslash at its end'
refused '%:include "x"\n' 'line 1 has a digraph'
refused '??=include "x"\n' 'line 1 has a trigraph'
refused 'int \\u0065xtern;\n' 'line 1 has a universal character name'
refused 'f(R"(//)");\n' 'line 1 has a raw string'
refused 'int a\0b;\n' 'a zero byte'
refused '_Pragma("GCC poison max")\n' 'line 1: _Pragma'
refused '# 1 "<stdin>" extern int x;\n' "GCC's lexer cannot read it"
# What reaches outside.
refused 'static float remembered[9];\n' 'line 1: static '
refused 'static const int when = time(0);\n' 'line 1: static '
refused 'thread_local int n;\n' 'line 1: thread_local'
refused '__asm__("int3");\n' 'line 1: __asm__'
refused '__attribute__((constructor)) void f();\n' 'line 1: __attribute__'
refused 'if (__builtin_is_constant_evaluated()) return 0;\n' 'line 1: __builtin_is_constant_evaluated'
refused 'if consteval { return 0; }\n' 'line 1: consteval'
refused 'std /**/ :: ofstream("x");\n' 'line 1: std::ofstream'
refused 'using namespace std;\n' 'line 1: using namespace'
refused 'namespace s = std;\n' 'line 1: namespace'
refused '::popen("ls", "r");\n' 'line 1: a name of the global scope'
refused 'attn::attention_reference(p, q, k, v);\n' 'line 1: attn::'
refused 'return emulated::v1_global::launch(args);\n' 'line 1: emulated'
refused 'Block::current().shared();\n' 'line 1: Block::'

passes '#include <algorithm>\n#pragma unroll 4\nfor (;;) x = std::max(x, std::numeric_limits<float>::lowest());\n'
passes '#pragma unroll\r\nint million = 1'"'"'000'"'"'000;  // not static, no #include, no std::ofstream\r\n'
passes 'static constexpr int kRow = 33; static_assert(kRow > 32, "#include \\"extern\\" // static");\n'
passes '/* extern\n static */ constexpr auto size = sizeof(Config::kBlockN); printf("%d\\n", 3);\n'
# all EXERCISE FILE...: together, which takes less time; one by one if they are refused.
all() {
  [[ $# -gt 1 ]] || { echo "$1: no file"; exit 1; }
  for f in "${@:2}"; do cat "$f"; echo ';'; done >"$work/all"
  "$filter" text "$1" "$work/all" && return
  for f in "${@:2}"; do "$filter" text "$1: $f" "$f"; done
  exit 1
}
all stubs "$1"/0*/exercises/*.stub.inc
answers=0
for source in $(grep -lE '//! \[ex[0-9]' "$1"/0*/*.cu "$1"/0*/kernels/*.h); do
  for e in $(grep -oE '//! \[ex[0-9]+[a-z]' "$source" | sed 's/.*\[//' | sort -u); do
    awk -v m="//! [$e]" 'index($0, m) { inside = !inside; next } inside' "$source" >"$work/$e.inc"
    awk -v out="$work/$e." -v suffix=.inc -f "$1/common/cmake/edit.awk" \
      "$(sed "s,/kernels/.*,,; s,/[^/]*[.]cu$,," <<<"$source")/exercises/${e: -1}.mutants" "$work/$e.inc" >/dev/null
    of=("$work/$e".*inc)
    all "$e" "${of[@]}"
    answers=$((answers + ${#of[@]}))
  done
done
[[ $answers -gt 200 ]] || { echo "only $answers answers"; exit 1; }
echo "everything as expected"
