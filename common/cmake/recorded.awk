# recorded.awk STEP.cu: what the recorded build of a step (attn/record.h) must know of its marks, as
# two #define lines: their names, and the lines of those that an ATTN_SPAN_END ends. A mark and its
# end stand in this order, with no other mark of this name between them. Prints nothing for a step
# without marks.
function name_of(line) {
  sub(/^[^"]*"/, "", line)
  sub(/".*$/, "", line)
  return line
}
/^ *ATTN_SPAN\("/ {
  name = name_of($0)
  if (!(name in begin)) names = names (names == "" ? "" : ", ") "\"" name "\""
  begin[name] = NR
}
/^ *ATTN_SPAN_END\("/ {
  name = name_of($0)
  if (begin[name] > 0) ended = ended ", " begin[name]
  begin[name] = 0
}
END {
  if (names == "") exit
  print "#define ATTN_RECORD_MARKS {" names "}"
  print "#define ATTN_RECORD_ENDED " ended
}
