#!/usr/bin/env bash
# Checks that a student's file stays within its exercise. The build runs this before it compiles the
# file and before it links the object, for students (--target ex01a) and in grade.sh alike.
#
#   exercise_filter.sh text EXERCISE FILE.inc     the text, after GCC's lexer has removed comments
#                                                 and literals
#   exercise_filter.sh object EXERCISE FILE.o...  the functions that the object calls: mathematics,
#                                                 memory, the emulator
#
# Exit status: 0 accepted, 1 refused (one line states why), 2 usage. Without GCC or nm, the text or
# the object is accepted unchecked: the grader has both.
set -euo pipefail
export LC_ALL=C
[[ $# -ge 3 && ($1 = text || $1 = object) ]] || { echo "usage: exercise_filter.sh text|object EXERCISE FILE..." >&2; exit 2; }
what=$1 exercise=$2
shift 2
refuse() { echo "$exercise: refused: $*" >&2; exit 1; }

# ---- the object: every function that it takes from elsewhere ---------------------------------------------
if [[ $what = object ]]; then
  command -v nm >/dev/null || exit 0
  math='f(abs|max|min|mod|dim|ma)|ceil|floor|l?l?round|trunc|l?l?rint|nearbyint|sqrt|cbrt|exp|exp2|exp10|expm1|log|log2'
  math+='|log10|log1p|pow|sin|cos|sincos|tan|sinh|cosh|tanh|asin|acos|atan|atan2|erf|erfc|hypot|ldexp|frexp|scalbn|logb|ilogb|copysign|nextafter'
  runtime='mem(cpy|set|move|cmp|chr)|str(len|cmp)|printf|puts|putchar|_Unwind_Resume|_GLOBAL_OFFSET_TABLE_|__[a-z]*(di|si|ti|sf|df|xf|tf)[0-9]'
  runtime+='|__(gxx_personality_v0|dso_handle|cxa_[a-z_]*|stack_chk_fail|tls_get_addr|emutls_get_address|[mfp]*printf_chk|memcpy_chk)'
  runtime+='|__(asan|ubsan|tsan|sanitizer)_.*|(jump|make|ontop)_fcontext'
  # What the emulator's headers need: new, delete, exceptions, std::string, std::function, typeinfo.
  runtime+='|_Z(n[wa]|d[la])[A-Za-z0-9_]*|_ZSt(9terminatev|[0-9]+(rethrow_exception|current_exception|uncaught_exceptions|__throw_[a-z_]*).*)'
  runtime+='|_ZNK?St(13runtime_error|11logic_error|9exception|15__exception_ptr|7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE).*'
  runtime+='|_ZSt(28_Rb_tree|18_Rb_tree_|29_Rb_tree_|20_Rb_tree_|11_Hash_bytes|7nothrow).*|_ZNKSt8__detail20_Prime_rehash_policy.*|_ZT[ISV](St|N10__cxxabiv1).*'
  # The emulator itself, behind the CUDA names: the text may not name it (`emulator`, `Block::`).
  runtime+='|_ZN4attn8shape_of.*|_ZNK4attn7Problem8tokens_[qk]Ev'
  # For steps with masks of their own: owner of a list, the mask's index, the number of SMs.
  runtime+='|_ZN4attn(8lists_of|12list_strides)ERKNS_7ProblemE|__dynamic_cast'
  runtime+='|_ZN4attn(8gpu_info|12this_machine)Ev'
  # For steps on several ranks: what distributes a problem, and the time-out. The last one is of
  # std::shared_ptr.
  runtime+='|_ZN4attn5ranks(10run_decode|10timeout_of|13decode_shards).*|__libc_single_threaded'
  # For steps with a plan: the number of blocks that it is made for.
  runtime+='|_ZN4attn5plans14planned_blocksERKNS_7ProblemE'
  runtime+='|_ZT[ISV]N4attn(7KeyMask|9BlockMask|12SlidingTiles|15ColumnIntervals)E'
  runtime+='|_ZNK?4attn8emulator(5Block|8run_grid|12mma_m16n8k16|5wgmma|8wgmma_s8|10wgmma_e4m3).*'
  # Marks of timelines, in the step around the student's file.
  runtime+='|_ZN4attn8emulator(10(open_marks|begin_mark)|9end_marks|8end_mark).*'
  # Library calls of an unoptimised build, for debugging.
  runtime+='|__assert_fail|_ZNSaIcE[CD][12]E.*'
  for object in "$@"; do
    while read -r symbol; do
      refuse "it calls $(c++filt "$symbol" 2>/dev/null || echo "$symbol"), which has no place in an exercise"
    done < <(nm -u "$object" | awk '{ print $NF }' | grep -vxE "($math)[fl]?|$runtime" | sed -n 1p)
  done
  exit 0
fi

# ---- the text ----------------------------------------------------------------------------------------
file=$1
[[ -r $file ]] || { echo "exercise_filter.sh: $file: cannot be read" >&2; exit 2; }
# Removes sequences that disguise one token as another. Without them, comments and literals are easy
# to find.
disguise() {  # PATTERN WORDS
  local line
  line=$(grep -aonm1 -E -- "$1" "$file") && refuse "line ${line%%:*} has $2, which has no place in an exercise"
  return 0
}
disguise '\\[[:space:]]*$' "a backslash at its end"
disguise '\?\?[=/'\''()!<>-]' "a trigraph"
disguise '%:|<%|%>|<:|:>' "a digraph"
disguise '\\[uUN]' "a universal character name"
disguise '(^|[^_[:alnum:]])(u8|[uUL])?R"' "a raw string"
disguise $'[\001-\010\013-\037\177]'"*[^[:print:][:space:]]*"$'[\001-\010\013\016-\037\177]|\r.' "a control character"
[[ $(tr -d '\0' <"$file" | wc -c) -eq $(wc -c <"$file") ]] || refuse "a zero byte has no place in an exercise"

gcc=${CXX:-c++}
for gcc in "$gcc" g++ ""; do
  [[ -n $gcc ]] || { echo "$exercise: no GCC here: the text is not read before it is compiled" >&2; exit 0; }
  command -v "$gcc" >/dev/null && "$gcc" -E -fpreprocessed -x c++ - </dev/null >/dev/null 2>&1 && break
done

# Removes comments, then reads token by token. A linemarker of GCC's is "# 7 "<stdin>"".
text=$("$gcc" -E -fpreprocessed -dD -x c++ - <"$file" 2>/dev/null) || refuse "GCC's lexer cannot read it"
awk -v exercise="$exercise" -v source="$file" '
  function refuse(why,   text, n) {
    for (n = 1; (getline text < source) > 0 && n < line; n++);
    sub(/^[ \t]+/, "", text)
    sub(/\r$/, "", text)
    printf "%s: refused: line %d: %s has no place in an exercise: %s\n", exercise, line, why, substr(text, 1, 100) > "/dev/stderr"
    refused = 1
    exit 1
  }
  # Reads a token of `rest` into `token`: a number, a name, a literal (as ""), "::" or a character.
  function next_token(   n, c) {
    sub(/^[ \t\r\f\v]+/, "", rest)
    if (rest == "") return 0
    if (match(rest, /^\.?[0-9]('\''?[0-9A-Za-z_.]|[eEpP][-+])*/) || match(rest, /^[A-Za-z_$\200-\377][A-Za-z0-9_$\200-\377]*/) ||
        match(rest, /^::/)) {
      token = substr(rest, 1, RLENGTH)
      rest = substr(rest, RLENGTH + 1)
      return 1
    }
    c = substr(rest, 1, 1)
    token = c
    if (c != "\"" && c != "'\''") { rest = substr(rest, 2); return 1 }
    for (n = 2; n <= length(rest) && substr(rest, n, 1) != c; n++) if (substr(rest, n, 1) == "\\") n++
    if (n > length(rest)) refuse("a literal without an end")
    token = "\"\""
    rest = substr(rest, n + 1)
    return 1
  }
  function directive(   text) {
    text = rest
    gsub(/[ \t\r]+/, " ", text)
    if (text ~ /^ ?pragma unroll( ?\(?[A-Za-z0-9_]+\)?)? ?$/) return
    if (text ~ /^ ?include ?<(algorithm|array|cfloat|climits|cmath|cstdint|limits|numeric|type_traits|utility)> ?$/) return
    refuse("a directive other than #pragma unroll or an #include of <algorithm>, <cmath> and their like")
  }
  function check(token) {
    if (before == "::" && scope == "std" && !(token in harmless)) refuse("std::" token)
    if (token == "::" && (before in spaces)) refuse(before "::")
    if (token == "::" && before !~ /^[A-Za-z_>$]/) refuse("a name of the global scope")
    if (before == "static" && token != "constexpr") refuse("static")
    if (before == "using" && token == "namespace") refuse("using namespace")
    if ((token in words) || token ~ /^(__builtin|__attribute|__asm|__extension|__declspec|__sync_|__atomic)/) refuse(token)
    if (token == "::") scope = before
    before = token
  }
  BEGIN {
    split("asm _asm extern thread_local __thread namespace _Pragma emulator emulated consteval is_constant_evaluated " \
          "import module export", list)
    for (i in list) words[list[i]]
    split("std attn gpu Block Session", list)  # std: of its names, those below
    for (i in list) if (list[i] != "std") spaces[list[i]]
    split("max min clamp swap abs fabs exp exp2 log log2 sqrt pow floor ceil round fmax fmin fma sin cos sinh cosh tanh erf " \
          "fabsf expf exp2f logf log2f sqrtf powf floorf ceilf fmaxf fminf fmaf tanhf isinf isnan isfinite numeric_limits " \
          "array pair tuple get tie make_pair move forward size_t ptrdiff_t int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t " \
          "uint64_t is_same is_same_v conditional_t enable_if_t integral_constant true_type false_type remove_cv_t decay_t declval " \
          "index_sequence make_index_sequence integer_sequence bit_cast popcount countl_zero countr_zero has_single_bit gcd lcm accumulate " \
          "fill iota max_element min_element begin end size", list)
    for (i in list) harmless[list[i]]
  }
  /^# [0-9]+ "<(stdin|built-in|command-line)>"[ 0-9]*$/ { line = $2 - 1; next }
  {
    line++
    rest = $0
    first = 1
    while (next_token()) {
      if (token == "#" && first) { directive(); break }
      if (token == "#") refuse("#")
      check(token)
      first = 0
    }
  }
  END { if (!refused && before == "static") refuse("static") }
' <<<"$text"
