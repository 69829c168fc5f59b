# What ATTN_MEMBERS of a struct leaves out, or names though it is none: a line each. By the text, as
# the macro is the last in its struct.
#
#   awk -f members.awk FILE...

function strip(line) {
  sub(/\/\/.*/, "", line)
  return line
}

function complain(what) {
  print FILENAME ":" FNR ": ATTN_MEMBERS " what
  bad = 1
}

# The names that a declaration declares: what stands before [, =, a comma or the end.
function declared(text,   parts, n, i, name, all) {
  if (text ~ /^[ \n]*static_assert/) return ""
  if (text ~ /^[ \n]*(static|constexpr|using|template|friend|typedef)[ \n]/) return ""
  if (text ~ /^[ \n]*(enum|struct|union|explicit)[ \n]/) return ""
  while (gsub(/\[[^\[\]]*\]/, " ", text)) {}
  gsub(/alignas *\([^()]*\)/, " ", text)
  gsub(/=[^,]*\([^()]*\)/, "= 0", text)
  while (gsub(/\([^()]*\)/, " ", text)) called = 1
  while (gsub(/<[^<>]*>/, " ", text)) {}
  if (called) {
    called = 0
    return text ~ /BODY/ ? "" : " what_it_cannot_read"
  }
  n = split(text, parts, ",")
  all = ""
  for (i = 1; i <= n; ++i) {
    name = parts[i]
    gsub(/::/, " ", name)
    sub(/[=:].*/, "", name)
    sub(/INIT/, "", name)
    gsub(/[ \n]+$/, "", name)
    sub(/.*[^A-Za-z0-9_]/, "", name)
    if (name != "") all = all " " name
  }
  return all
}

FNR == 1 { depth = 0; text = "" }
{ text = text strip($0) "\n" }
/ATTN_MEMBERS\(/ { pending = 1 }
pending && strip($0) ~ /\) *;? *$/ {
  pending = 0
  at = match(text, /ATTN_MEMBERS\([^()]*\)[; \n]*$/)
  if (!at) next
  list = substr(text, at)
  gsub(/ATTN_MEMBERS\(|\).*|[ \n]/, "", list)
  n = split(list, names, ",")
  # Back to the { of the struct.
  body = substr(text, 1, at - 1)
  level = 0
  for (i = length(body); i > 0; --i) {
    c = substr(body, i, 1)
    if (c == "}") ++level
    if (c == "{" && level-- == 0) break
  }
  body = substr(body, i + 1)
  # Without bodies: that of a function ends without a semicolon and follows a parenthesis.
  while (match(body, /\{[^{}]*\}/)) {
    ahead = substr(body, 1, RSTART - 1)
    behind = substr(body, RSTART + RLENGTH)
    if (ahead ~ /\)[ \na-z]*$/) body = ahead " BODY;" behind
    else if (ahead ~ /(struct|union|enum) [A-Za-z_]*[ \n]*$/) body = ahead " " behind
    else body = ahead " INIT" behind
  }
  split("", has)
  split("", listed)
  count = split(body, lines, ";")
  for (i = 1; i <= count; ++i) {
    m = split(declared(lines[i]), found, " ")
    for (k = 1; k <= m; ++k) has[found[k]] = 1
  }
  for (i = 2; i <= n; ++i) listed[names[i]] = 1
  for (name in has) if (!(name in listed)) complain("leaves out " name)
  for (name in listed) if (!(name in has)) complain("names " name ", which is no member")
  ++structs
}
END {
  print structs " structs"
  exit bad
}
