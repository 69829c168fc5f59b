# Derives versions of a text from edit lists, each written as the lines that differ.
#
#   awk -v out=FOLDER/ [-v suffix=.inc] [-v numbered=1] -f edit.awk EDITS... TEXT
#
# EDITS contains entries:
#
#     == o_not_rescaled            or "== name of other": based on an earlier entry
#     ! says: a row's sum is not 1
#      float scale = ...;          ' ' a context line, '-' a removed line, '+' an added line
#     -acc *= scale;
#     @@                           another place of the same entry
#
# Lines are compared without // comments and marks (attn/span.h), and a run of blanks counts as one;
# lines of TEXT without code may stand between. Each entry is written to FOLDER/NAME<suffix>, with
# `numbered` to FOLDER/1<suffix>, FOLDER/2<suffix>, ... A directive (!) becomes the first line,
# "// says: ...". Prints a line per entry: its name, a tab, its directive; with `numbered` its
# number, a tab, its title. A file that already has the text is not written. Exits with 1 and one
# line if a place is not found, or found more than once.

function code(line) {
  sub(/\/\/.*/, "", line)
  sub(/ATTN_SPAN(_END)?\("[^"]*"\)/, "", line)  # marks of timelines are no code
  gsub(/[ \t\r]+/, " ", line)
  gsub(/^ | $/, "", line)
  return line
}

function fail(what) {
  printf "%s: %s\n", at_entry, what > "/dev/stderr"
  failed = 1
  exit 1
}

FNR == 1 { ++file }
file < ARGC - 1 {
  at_entry = FILENAME ":" FNR
  if (/^==/) {
    if (!/^== [^ ]/) fail("must be \"== name\"")
    title = substr($0, 4)
    base[++entries] = ""
    if (!numbered && title ~ /^[a-z0-9_]+ of [a-z0-9_]+$/) {
      split(title, words, " of ")
      title = words[1]
      base[entries] = words[2]
    }
    name[entries] = title
    places[entries] = FILENAME ":" FNR
    if (!numbered && title in number) fail("a second entry " title)
    number[title] = entries
    first[entries] = hunk_lines + 1
  } else if (/^!/) {
    if (!/^! [^ ]/ || entries in directive) fail("must be the one \"! words\" of an entry")
    directive[entries] = substr($0, 3)
  }
  else if (entries && (/^[-+ ]/ || /^@@/)) hunk[++hunk_lines] = $0
  else if (!/^#/ && code($0) != "") fail("begins with none of == ! @@ - + and blank")
  next
}
{ text[++lines] = $0 }

# Finds the place of hunk lines from..to in new[1..size] and records the removed and added lines.
function find_place(from, to,   i, k, n, found, place, at, matched, wanted, kind) {
  n = 0
  for (i = from; i <= to; ++i)
    if (substr(hunk[i], 1, 1) != "+" && code(substr(hunk[i], 2)) != "")
      wanted[++n] = code(substr(hunk[i], 2))
  if (n == 0) fail("a place without a line that finds it")
  found = 0
  for (i = 1; i <= size; ++i) {
    if (code(new[i]) != wanted[1]) continue
    matched = 0
    for (k = i; k <= size && matched < n; ++k) {
      if (code(new[k]) == "") continue
      if (code(new[k]) != wanted[matched + 1]) break
      at[++matched] = k
    }
    if (matched < n) continue
    if (++found > 1) fail("occurs more than once: " wanted[1])
    for (k = 1; k <= n; ++k) place[k] = at[k]
  }
  if (!found) fail("does not occur: " wanted[1])
  k = 0
  for (i = from; i <= to; ++i) {
    kind = substr(hunk[i], 1, 1)
    if (kind == "+" && k) behind[place[k]] = behind[place[k]] substr(hunk[i], 2) "\n"
    else if (kind == "+") ahead[place[1]] = ahead[place[1]] substr(hunk[i], 2) "\n"
    else if (code(substr(hunk[i], 2)) != "" && ++k && kind == "-") gone[place[k]] = 1
  }
}

# Applies entry e to new[1..size], after its base. All its places are found in the same text.
function apply_entry(e,   i, from, end, before, old, changes) {
  if (base[e] != "") {
    at_entry = places[e]
    if (!(base[e] in number) || number[base[e]] >= e) fail("no earlier entry " base[e])
    apply_entry(number[base[e]])
  }
  at_entry = places[e]
  split("", gone)
  split("", ahead)
  split("", behind)
  end = e < entries ? first[e + 1] - 1 : hunk_lines
  for (i = first[e]; i <= end; ++i) changes = changes || hunk[i] ~ /^[-+]/
  if (!changes) fail("changes nothing")
  from = first[e]
  for (i = from; i <= end + 1; ++i)
    if (i > end || hunk[i] ~ /^@@/) {
      if (i > from) find_place(from, i - 1)
      from = i + 1
    }
  before = size
  for (i = 1; i <= before; ++i) old[i] = new[i]
  size = 0
  for (i = 1; i <= before; ++i) {
    append(ahead[i])
    if (!(i in gone)) new[++size] = old[i]
    append(behind[i])
  }
}

# Appends the lines of `text`, each with its newline, to new[1..size]. A string of the whole file
# would take seconds: mawk copies it whenever it grows.
function append(text,   words, n, i) {
  if (text == "") return
  n = split(text, words, "\n")  # the last newline ends the last line
  for (i = 1; i < n; ++i) new[++size] = words[i]
}

# Writes new[1..size] to `path`, unless the file already has these lines.
function put(path,   i, line, same) {
  i = 0
  same = 1
  while (same && (getline line < path) > 0) same = ++i <= size && line "" == new[i] ""
  close(path)
  if (same && i == size) return
  printf "" > path
  for (i = 1; i <= size; ++i) print new[i] > path
  close(path)
}

END {
  if (failed) exit 1
  if (!entries) {
    at_entry = ARGV[1]
    fail("no entry")
  }
  for (e = 1; e <= entries; ++e) {
    size = lines
    for (i = 1; i <= lines; ++i) new[i] = text[i]
    apply_entry(e)
    if (e in directive) {
      for (i = ++size; i > 1; --i) new[i] = new[i - 1]
      new[1] = "// " directive[e]
    }
    label = numbered ? e : name[e]
    put(out label suffix)
    print label "\t" (numbered ? name[e] : directive[e])
  }
}
