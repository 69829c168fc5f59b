# Finds and hides the answers to exercises in texts. Called by student_edition.cmake:
#
#   awk -v out=DIR -f hide_answers.awk kind=answer FILE ... kind=given FILE ... kind=quiz FILE ...
#       kind=text FILE ...
#
# answer: the region of an exercise, named like the exercise; given: the stubs. A part of a text
# that is also a part of an answer is hidden if it shows more than the stubs: a statement that no
# stub has, or two in an order that no stub has. Statements are compared without comments, white
# space and line breaks. In C++ the part is replaced by #include "hidden/ex01a_1.inc", and its text
# is written to DIR/ex01a_1. The text without its answers is FILE.hidden. quiz: right answers; a C++
# comment line with one of their numbers of 6 digits or more is hidden, too. In Markdown a notice
# replaces the part. Any other file that contains an answer is reported, and the exit status is 1.
FNR == 1 { finish(); file = FILENAME; file_kind = kind }
{ raw[++lines] = $0 }
END { finish(); exit failed }

# The statements of raw[], or its lines: unit[i], from line from[i] to line to[i].
function read_units(by_line,  i, text, open) {
  units = open = 0
  for (i = 1; i <= lines; ++i) {
    text = raw[i]
    if (text ~ /^[ \t]*#/) {
      if (text ~ /^[ \t]*#(pragma|include "exercises)/) continue
      text = "#" i ";"  # what #if leaves out is not cut in two
    }
    sub(/\/\/.*/, "", text)
    gsub(/[ \t\r]/, "", text)
    if (text == "") continue
    if (!open) { open = 1; unit[++units] = ""; from[units] = i }
    unit[units] = unit[units] text
    to[units] = i
    if (by_line || text ~ /[;{}]$/) open = 0
  }
}
function trivial(u) {
  return length(u) < 12 || u ~ /^for\([^{]*[{)]$/ || (u ~ /^if\(.*\)\{$/ && length(u) < 18) ||
         u == "__syncthreads();" || u == "cp_async_commit();"
}
function finish(  by_line) {
  if (lines == 0) return
  delete mark
  delete shows
  hidden = 0
  for (by_line = 0; by_line <= 1; ++by_line) {
    read_units(by_line)
    if (file_kind == "answer") remember_answer(by_line)
    else if (file_kind == "given") remember_given()
    else if (file_kind == "quiz") remember_numbers()
    else find()
  }
  if (file_kind == "text" && file ~ /\.(cu|h|cpp)$/) find_numbers()
  if (hidden) hide()
  lines = 0
}
function remember_answer(by_line,  name, i) {
  name = file (by_line ? " by line" : "")
  sub(/.*\//, "", name)
  names[++exercises] = name
  length_of[name] = units
  for (i = 1; i <= units; ++i) {
    answer[name, i] = unit[i]
    is_asked[unit[i]] = 1
    places[name, unit[i]] = places[name, unit[i]] " " i
  }
}
function remember_given(  i) {
  for (i = 1; i <= units; ++i) { given = given "\n" unit[i]; is_given[unit[i]] = 1 }
  given = given "\n#\n"
}
function remember_numbers(  i, value) {
  for (i = 1; i <= lines; ++i) {
    value = raw[i]
    sub(/.*= */, "", value)
    if (value ~ /^[0-9][0-9][0-9][0-9][0-9][0-9]+$/) quiz_number[value] = exercise_of(file)
  }
}
# .../01_naive/exercises/d.solution.txt: ex01d.
function exercise_of(path,  part, n) {
  n = split(path, part, "/")
  return "ex" substr(part[n - 2], 1, 2) substr(part[n], 1, 1)
}
function find_numbers(  i, value) {
  for (value in quiz_number)
    for (i = 1; i <= lines; ++i)
      if (raw[i] ~ /^ *\/\// && index(raw[i], value)) {
        mark[i] = quiz_number[value]
        shows[i] = hidden = 1
      }
}
# Whether units i to last show more than the stubs. For a function that an answer calls
# (ex05a_combine), only `least` statements together count: each alone is obvious.
function tells(i, last, least,  run, statements, own) {
  run = "\n"
  for (; i <= last; ++i) {
    run = run unit[i] "\n"
    if (trivial(unit[i])) continue
    ++statements
    if (!(unit[i] in is_given) && length(unit[i]) >= 24) own = 1
  }
  return ((own && least == 2) || statements >= least) && index(given, run) == 0
}
# The longest part from unit i on that is also part of an answer: its last unit; `of` is the
# exercise.
function longest(i,  n, e, count, list, j, m, best) {
  best = i - 1
  if (!(unit[i] in is_asked)) return best
  for (n = 1; n <= exercises; ++n) {
    e = names[n]
    if (!((e, unit[i]) in places)) continue
    count = split(places[e, unit[i]], list, " ")
    for (j = 1; j <= count; ++j) {
      m = 0
      while (i + m <= units && list[j] + m <= length_of[e] &&
             unit[i + m] == answer[e, list[j] + m])
        ++m
      if (i + m - 1 > best && tells(i, i + m - 1, e ~ /_/ ? 4 : 2)) { best = i + m - 1; of = e }
    }
  }
  return best
}
# Marks the lines to hide.
function find(  i, last, first, k) {
  for (i = 1; i <= units; ++i) {
    last = longest(i)
    if (last < i) continue
    first = i
    i = last
    while (unit[last] ~ /^[})]*;?$/) --last
    while (unit[first] ~ /^[})]*;?$/) ++first
    sub(/ by line/, "", of)
    for (k = from[first]; k <= to[last]; ++k) if (!(k in mark)) mark[k] = of
    hidden = 1
  }
}
function hide(  k, to_file, text, is_code) {
  if (file !~ /\.(cu|h|cpp|md)$/) {
    print file ": has the answer of " of
    failed = 1
    return
  }
  to_file = file ".hidden"
  for (k = 1; k <= lines; ++k) {
    if (!(k in mark) || raw[k] ~ /^ *\/\/!/) { print raw[k] >to_file; continue }
    of = mark[k]
    text = ""
    is_code = 0
    for (; (k in mark) && mark[k] == of && raw[k] !~ /^ *\/\/!/; ++k) {
      text = text raw[k] "\n"
      if (raw[k] !~ /^ *(\/\/.*)?$/ || (k in shows)) is_code = 1
    }
    --k
    if (!is_code) { printf "%s", text >to_file; continue }
    print replacement(of, text) >to_file
  }
  close(to_file)
}
function replacement(of, text,  name) {
  if (file ~ /\.md$/) return "// ... what " of " asks for"
  if (!((of, text) in name_of)) {
    name = name_of[of, text] = of "_" ++number[of]
    printf "%s", text >(out "/" name)
    close(out "/" name)
  }
  return "#include \"hidden/" name_of[of, text] ".inc\""
}
