# awk -f leaks.awk kind=answer FILE ... kind=given FILE ... kind=quiz FILE ... kind=text FILE ...:
# names what of answers stands in texts. Status 1 if anything does. A text is looked at without
# comments, white space and line breaks.
#   answer   a region: none of its statements that no stub has, of 28 characters or more, and no
#            two that follow each other as in no stub, are in a text
#   given    the stubs
#   quiz     the answers to a quiz: no two of them are in one text, as `name = value`; no two
#            numbers from 1000 on are on one line, as arithmetic; and none of 6 digits or more in a
#            comment or a page
FNR == 1 { finish(); file = FILENAME; file_kind = kind }
{
  line = $0
  if (file_kind == "text" && line ~ /[0-9]/) look_for_values(line)
  if (file_kind == "text" && (line ~ /^ *\/\// || file ~ /\.md$/)) look_for_long_numbers(line)
  if (file_kind == "quiz") { remember_value(line); next }
  if (line ~ /^[ \t]*#(pragma|include)/) next
  sub(/\/\/.*/, "", line)
  gsub(/[ \t\r]/, "", line)
  flat = flat line
}
END { finish(); if (leaks == 0 && texts < 100) { print "no texts"; leaks = 1 } exit leaks > 0 }

function finish(  i, e) {
  if (file_kind == "answer") answers[file] = flat
  if (file_kind == "given") given = given flat "\n"
  if (file_kind == "text") {
    if (!texts++) choose()
    for (i = 1; i <= count; ++i) if (stands(wanted[i])) leak(of[i], wanted[i])
    for (e in named) { if (named[e] >= 2) leak(e, named[e] " values"); delete named[e] }
  }
  flat = ""
}
# Whether it is a statement of flat: behind another one, or anywhere in a page.
function stands(s,  rest, at) {
  rest = ";" flat
  while ((at = index(rest, s)) > 0) {
    if (file ~ /\.md$/ || index(";{}", substr(rest, at - 1, 1))) return 1
    rest = substr(rest, at + 1)
  }
  return 0
}
function leak(e, what) { ++leaks; sub(/.*\//, "", e); print file ": " e ": " what }

# wanted[]: what no text may have.
function choose(  e, n, i, s, before) {
  for (e in answers) {
    n = statements(answers[e])
    before = ""
    for (i = 1; i <= n; ++i) {
      s = statement[i]
      if (s ~ /^[}]*$|^__syncthreads|^cp_async_commit/) {
        if (before != "") before = before s
        continue
      }
      if (length(s) >= 28) want(e, s)
      if (before != "" && before !~ /^for\([^{]*[{]$/ && length(before s) >= 40) want(e, before s)
      before = s
    }
  }
}
function want(e, s) {
  if (s ~ /for\([^{]*[{]$/ || index(given, s)) return  # heads of loops are like each other
  wanted[++count] = s
  of[count] = e
}
# statement[]: split behind ; { and }, but for a for(...;...;...).
function statements(text,  n, i, c, depth) {
  delete statement
  n = 1
  for (i = 1; i <= length(text); ++i) {
    c = substr(text, i, 1)
    if (c == "(") ++depth
    if (c == ")") --depth
    statement[n] = statement[n] c
    if ((c == ";" && depth == 0) || c == "{" || c == "}") ++n
  }
  return statement[n] == "" ? n - 1 : n
}

function remember_value(line,  name, value) {
  sub(/#.*/, "", line)
  if (line !~ /=/) return
  name = value = line
  sub(/ *=.*/, "", name)
  sub(/.*= */, "", value)
  gsub(/[ \t]/, "", line)
  pairs[++pair_count] = line
  quiz_of[pair_count] = file
  names = names (names == "" ? "" : "|") name
  if (value ~ /^[0-9][0-9][0-9][0-9][0-9][0-9]+$/) long_number[pair_count] = value
  if (value ~ /[0-9][0-9.*]*[0-9]/) number[pair_count] = evaluate(value)
}
function look_for_long_numbers(line,  i) {
  for (i = 1; i <= pair_count; ++i)
    if (long_number[i] != "" && index(line, long_number[i])) leak(quiz_of[i], line)
}
# Counts the answers that a line names: "refused = 9", is["refused"] = 9; or {"refused", 9}.
function look_for_names(line,  i) {
  gsub(/"\]? *[,=] */, "=", line)
  gsub(/["\[\]{};]/, " ", line)
  gsub(/ *= */, "=", line)
  line = " " line " "
  for (i = 1; i <= pair_count; ++i)
    if (!((file, i) in met) && index(line, " " pairs[i] " ")) {
      met[file, i] = 1
      ++named[quiz_of[i]]
    }
}
# Of each quiz how many answers a text names; and which numbers a line has, arithmetic included.
function look_for_values(line,  spaced, i, e, found, seen, expression, value) {
  spaced = line
  if (line ~ /[,=]/ && line ~ ("(" names ")[]\"]* *[,=]")) look_for_names(line)
  while (match(spaced, /[0-9(][0-9.e()*^\/+ -]*[*^][0-9.e()*^\/+ -]*/)) {
    expression = substr(spaced, RSTART, RLENGTH)
    spaced = substr(spaced, RSTART + RLENGTH)
    value = evaluate(expression)
    for (i = 1; i <= pair_count; ++i)
      if (number[i] >= 1e3 && value > 0.98 * number[i] && value < 1.02 * number[i] &&
          !((quiz_of[i], value) in seen)) {
        seen[quiz_of[i], value] = 1
        ++found[quiz_of[i]]
      }
  }
  for (e in found) if (found[e] >= 2) leak(e, line)
}
# Sums, products and powers of numbers, in parentheses or not.
function evaluate(text) { gsub(/ /, "", text); rest = text; return sum() }
function sum(  x, op) {
  x = product()
  while (rest ~ /^[-+]/) { op = next_character(); x = op == "+" ? x + product() : x - product() }
  return x
}
function product(  x, op, y) {
  x = power()
  while (rest ~ /^[*\/]/) {
    op = next_character()
    y = power()
    x = op == "*" ? x * y : y == 0 ? 0 : x / y
  }
  return x
}
function power(  x) {
  x = atom()
  if (rest ~ /^\^/) { next_character(); x = x ^ power() }
  return x
}
function atom(  x) {
  if (rest ~ /^\(/) { next_character(); x = sum(); if (rest ~ /^\)/) next_character(); return x }
  if (!match(rest, /^[0-9.]+(e[-+]?[0-9]+)?/)) return 0
  x = substr(rest, 1, RLENGTH) + 0
  rest = substr(rest, RLENGTH + 1)
  return x
}
function next_character(  c) { c = substr(rest, 1, 1); rest = substr(rest, 2); return c }
