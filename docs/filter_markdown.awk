# Turns the Markdown that GitHub renders into the Markdown that Doxygen understands, so that one
# file serves both. Doxygen calls it (FILTER_PATTERNS) with one .md file; it never changes the
# number of lines, so warnings name the right line.
#
#   $x$, $`x`$             ->  \f$x\f$
#   $$x$$, ```math fences  ->  \f[x\f]
#   # Title, ## Section    ->  # Title {#page}, ## Section {#page_section}
#   [t](other.md#part)     ->  @ref page_part "t"         also for the sources that are on the site
#   [t](LICENSE)           ->  t, or a link below SOURCE_URL
#   ![t](figures/x.svg)    ->  ![t](docs/figures/x.svg)   relative to the html folder
#   [Code: f.cu, b](f.cu)  ->  f.cu \snippet f.cu b      a line of its own: a link on GitHub
#   # Title                ->  its contents below it, where the page has at least 4 sections
#   ## Hint 1, ## Why      ->  <details>                  of exercises: read when it is asked for
#
# Code spans and fenced code stay as they are. A relative link to a file that does not exist
# becomes a @ref that Doxygen rejects. Plain POSIX awk: tested with mawk, gawk and busybox awk.
# Variables: ROOT (the repository), SOURCE_URL (optional, ends in "/").

function init(   path) {
    path = FILENAME
    if (index(path, ROOT "/") == 1) path = substr(path, length(ROOT) + 2)
    folder = path
    if (!sub(/\/[^\/]*$/, "", folder)) folder = ""
    page = page_label(path)
    started = 1
}

# ---- names ---------------------------------------------------------------------------------------

# The page label of a Markdown file given by its path from the root; "" if it is not on the site.
function page_label(path,   s) {
    if (path == "README.md") return "mainpage"
    if (path ~ /(^|\/)(tests|scripts|cmake)\//) return ""
    s = path
    if (!sub(/\.md$/, "", s)) return ""
    if (path !~ /^(docs|common|[0-9][0-9]_[^\/]*)\//) return ""
    sub(/\/README$/, "", s)
    sub(/^docs\//, "", s)
    if (s ~ /^[0-9]/) s = "ch" s
    gsub(/[^A-Za-z0-9_]/, "_", s)
    return s
}

# Whether a source file is browsable on the site. Keep in step with INPUT in Doxyfile.in.
function is_site_source(path) {
    if (path ~ /^[0-9][0-9]_[^\/]*\/((kernels|host)\/)?[^\/]*\.(cu|cuh|h|cpp)$/) return 1
    return path ~ /^common\/(attn|emulator|kernels|ptx|report)\/.*\.(cuh|h)$/ && path !~ /\/tests\//
}

# GitHub's anchor of a heading, reduced to what a Doxygen label may hold.
function slug(s) {
    gsub(/%[0-9A-Fa-f][0-9A-Fa-f]/, "", s)
    s = tolower(s)
    gsub(/[ \t]/, "-", s)
    gsub(/[^a-z0-9_-]/, "", s)
    return s
}

function link_text(s,   t) {      # the text of a link, as plain words
    t = s
    gsub(/`/, "", t)
    gsub(/\*\*/, "", t)
    gsub(/"/, "'", t)
    return t
}

# "a/b" + "../c/d.md" -> "a/c/d.md"
function join_path(base, rel,   n, i, m, parts, out, s) {
    s = (rel ~ /^\//) ? rel : base "/" rel
    n = split(s, parts, "/")
    m = 0
    for (i = 1; i <= n; i++) {
        if (parts[i] == "" || parts[i] == ".") continue
        if (parts[i] == "..") { if (m > 0) m--; continue }
        out[++m] = parts[i]
    }
    s = ""
    for (i = 1; i <= m; i++) s = s (i > 1 ? "/" : "") out[i]
    return s
}

function exists(path) {
    if (path ~ /'/) return 0
    if (!(path in known)) known[path] = (system("test -e '" ROOT "/" path "'") == 0)
    return known[path]
}

# ---- links ---------------------------------------------------------------------------------------

# What a link target means on the site: "ref LABEL", "url URL", "none" (exists, but not on the
# site) or "keep" (an outside link).
function resolve(target,   path, part, hash, label) {
    if (target ~ /^[A-Za-z][A-Za-z0-9+.-]*:/ || target ~ /^@ref/ || target ~ /^\\ref/) return "keep"
    hash = index(target, "#")
    part = ""
    path = target
    if (hash) { part = slug(substr(target, hash + 1)); path = substr(target, 1, hash - 1) }
    if (path == "") return "ref " page "_" part
    path = join_path(folder, path)
    if (path != "" && path !~ /\.[A-Za-z0-9]+$/ && exists(path "/README.md"))
        path = path "/README.md"
    label = page_label(path)
    if (label != "" && exists(path)) return "ref " label (part != "" ? "_" part : "")
    if (is_site_source(path) && exists(path)) return "ref " path
    if (path != "" && !exists(path)) return "ref missing_file/" path
    return SOURCE_URL != "" ? "url " SOURCE_URL path : "none"
}

function rewrite_link(text, target,   kind) {
    kind = resolve(target)
    if (kind == "keep") return "[" inline(text) "](" target ")"
    if (kind == "none") return inline(text)
    if (kind ~ /^url /) return "[" inline(text) "](" substr(kind, 5) ")"
    kind = substr(kind, 5)
    text = link_text(text)
    gsub(/\n[ \t>]*/, " ", text)
    # An exercise or report page hangs below the page that links it first.
    if (kind !~ /[\/.]/ && index(kind, page "_") == 1 && target !~ /#/ && !(kind in hung)) {
        hung[kind] = 1
        return "@subpage " kind " \"" text "\""
    }
    return "@ref " kind " \"" text "\""
}

function rewrite_image(text, target) {
    if (target !~ /^[A-Za-z][A-Za-z0-9+.-]*:/) {
        target = join_path(folder, target)
        if (!exists(target)) return "@ref missing_file/" target " \"" text "\""
    }
    return "![" text "](" target ")"
}

# ---- inline text ---------------------------------------------------------------------------------

# The position of the bracket that closes the one at i, or 0.
function closing(s, i, open, shut,   depth, c, n) {
    depth = 0
    n = length(s)
    for (; i <= n; i++) {
        c = substr(s, i, 1)
        if (c == "\\") { i++; continue }
        if (c == open) depth++
        if (c == shut && --depth == 0) return i
    }
    return 0
}

# One paragraph, lines joined by \n. A local copy of every variable: it calls itself for link texts.
function inline(s,   out, i, n, c, run, ticks, j, k, body, target, prev, rest) {
    out = ""
    n = length(s)
    i = 1
    while (i <= n) {
        c = substr(s, i, 1)
        if (c == "\\") { out = out substr(s, i, 2); i += 2; continue }
        if (c == "`") {                                       # a code span, or plain backticks
            run = 1
            while (substr(s, i + run, 1) == "`") run++
            ticks = substr(s, i, run)
            j = i + run
            k = 0
            while (j <= n) {
                if (substr(s, j, 1) != "`") { j++; continue }
                k = 1
                while (substr(s, j + k, 1) == "`") k++
                if (k == run) break
                j += k
                k = 0
            }
            if (k == run) { out = out substr(s, i, j + run - i); i = j + run; continue }
            out = out ticks
            i += run
            continue
        }
        rest = substr(s, i)
        if (c == "$") {
            if (substr(s, i, 2) == "$$") {                    # $$ display $$
                j = index(substr(s, i + 2), "$$")
                if (j) { out = out "\\f[" substr(s, i + 2, j - 1) "\\f]"; i += j + 3; continue }
            } else if (substr(s, i, 2) == "$`") {             # $`inline`$
                j = index(substr(s, i + 2), "`$")
                if (j) { out = out "\\f$" substr(s, i + 2, j - 1) "\\f$"; i += j + 3; continue }
            } else {                                          # $inline$
                prev = i > 1 ? substr(s, i - 1, 1) : " "
                j = prev ~ /[A-Za-z0-9]/ ? 0 : math_end(s, i)
                if (j) {
                    out = out "\\f$" substr(s, i + 1, j - i - 1) "\\f$"
                    i = j + 1
                    continue
                }
            }
            out = out c
            i++
            continue
        }
        if (c == "*" && rest ~ /^\*\*[^ \t\n*]/) {  # Doxygen keeps the stars around code, links
            j = bold_end(s, i + 2)
            if (j) {
                body = substr(s, i + 2, j - i - 2)
                out = out "<b>" inline(body) "</b>"
                i = j + 2
                continue
            }
        }
        if (rest ~ /^<!--/ && (j = index(rest, "-->"))) {
            out = out substr(rest, 1, j + 2)
            i += j + 2
            continue
        }
        if (rest ~ /^<\/?(details|summary)[^>]*>/) {          # HTML that Doxygen 1.9 does not know
            j = index(rest, ">")
            out = out "\\htmlonly[block]" substr(rest, 1, j) "\\endhtmlonly "
            i += j
            continue
        }
        if (c == "[" || (c == "!" && substr(s, i + 1, 1) == "[")) {
            k = i + (c == "!")
            j = closing(s, k, "[", "]")
            if (j && substr(s, j + 1, 1) == "(") {
                body = substr(s, k + 1, j - k - 1)
                k = closing(s, j + 1, "(", ")")
                if (k) {
                    target = substr(s, j + 2, k - j - 2)
                    carry += count(target, "\n")
                    gsub(/[ \t\n]+/, " ", target)
                    sub(/^ /, "", target)
                    sub(/ .*$/, "", target)                   # drops an optional "title"
                    if (c == "!") out = out rewrite_image(body, target)
                    else {
                        rest = rewrite_link(body, target)
                        carry += count(body, "\n") - count(rest, "\n")
                        out = out rest
                    }
                    i = k + 1
                    continue
                }
            }
        }
        out = out c
        i++
    }
    return out
}

# The position of the ** that closes bold text which begins at i, outside code spans, or 0.
function bold_end(s, i,   n, c, code) {
    n = length(s)
    for (; i < n; i++) {
        c = substr(s, i, 1)
        if (c == "\\") i++
        else if (c == "`") code = !code
        else if (!code && substr(s, i, 2) == "**" && substr(s, i - 1, 1) !~ /[ \t\n]/) return i
    }
    return 0
}

function count(s, what) { return gsub(what, "", s) }

# The end of inline maths that starts with the $ at i: no blank inside the two $, no letter or
# digit after the second. 0 if this $ is just a dollar sign.
function math_end(s, i,   n, j, c) {
    n = length(s)
    if (substr(s, i + 1, 1) ~ /[ \t\n]/) return 0
    for (j = i + 1; j <= n; j++) {
        c = substr(s, j, 1)
        if (c == "\\") { j++; continue }
        if (c == "`") return 0
        if (c != "$") continue
        if (j == i + 1 || substr(s, j - 1, 1) ~ /[ \t\n]/) return 0
        return substr(s, j + 1, 1) ~ /[A-Za-z0-9]/ ? 0 : j
    }
    return 0
}

# "[Code: v1_global.cu, softmax](v1_global.cu)": what lies between the markers //! [softmax].
function snippet(line,   path, region) {
    region = line
    sub(/^.*, */, "", region)
    sub(/\].*$/, "", region)
    path = line
    sub(/^.*\]\(/, "", path)
    sub(/\).*$/, "", path)
    path = join_path(folder, path)
    return "\\htmlonly[block]<div class=\"quoted\">\\endhtmlonly" file_name(path) \
           "\\htmlonly[block]</div>\\endhtmlonly\\snippet " path " " region
}
# The name of a quoted file, over the code: a link where the file is on the site.
function file_name(path) {
    return is_site_source(path) && exists(path) ? "@ref " path " \"" path "\"" : path
}

# ---- blocks --------------------------------------------------------------------------------------

function flush_paragraph() {
    if (para == "") return
    carry = 0
    printf "%s", inline(para)
    while (carry-- > 0) printf "\n"                           # keeps the line count
    para = ""
}

# Whether the page has sections enough for a table of contents. An exercise has none: its hints are
# folded.
function long_page(   line, sections, inside) {
    if (folder ~ /\/exercises$/) return 0
    while ((getline line < FILENAME) > 0) {
        if (line ~ /^[ \t>]*(```|~~~)/) inside = !inside
        else if (!inside && line ~ /^##+[ \t]/) sections++
    }
    close(FILENAME)
    return sections >= 4
}

function heading(line,   marks, text, label) {
    match(line, /^#+/)
    marks = substr(line, 1, RLENGTH)
    text = substr(line, RLENGTH + 1)
    sub(/^[ \t]+/, "", text)
    sub(/[ \t]+#*[ \t]*$/, "", text)
    if (text ~ /\{#[A-Za-z0-9_-]+\}$/) return marks " " inline(text)
    if (!titled && length(marks) == 1) {
        titled = 1
        label = page
    } else {
        label = slug(text)
        if (label in slugs) label = label "-" slugs[label]++
        else slugs[label] = 1
        label = page "_" label
    }
    return marks " " inline(text) (page == "" ? "" : " {#" label "}")
}

!started { init() }

fence != "" {
    if (match($0, /^[ \t>]*(```+|~~~+)[ \t]*$/) && index($0, fence)) {
        if (in_math) { line = $0; sub(/(```+|~~~+)[ \t]*$/, "\\f]", line); print line }
        else print
        fence = ""
        in_math = 0
    } else print
    next
}

/^[ \t>]*(```|~~~)/ {
    flush_paragraph()
    line = $0
    match(line, /(```+|~~~+)/)
    fence = substr(line, RSTART, RLENGTH)
    language = substr(line, RSTART + RLENGTH)
    lead = substr(line, 1, RSTART - 1)
    gsub(/[ \t]/, "", language)
    if (language == "math") { in_math = 1; print lead "\\f["; next }
    if (language ~ /^(cuda|cu|cuh|c\+\+|h|hpp)$/) language = "cpp"
    else if (language !~ /^(cpp|c|python|py)$/) language = "text"
    print lead fence "{." language "}"
    next
}

# The blank line below the title of a long page makes room for its contents.
/^[ \t]*$/ {
    flush_paragraph()
    print titled && !listed++ && long_page() ? "\\tableofcontents{HTML:2}" : $0
    next
}

# What an exercise tells only when it is asked, the last sections of its page: closed until a reader
# opens them.
folder ~ /\/exercises$/ && /^## (Hint [0-9]+|Why)[ \t]*$/ {
    flush_paragraph()
    sub(/^## /, "")
    line = folded ? "</details>" : ""
    folded = 1
    print "\\htmlonly[block]" line "<details><summary>" $0 "</summary>\\endhtmlonly"
    next
}

/^#+[ \t]/ { flush_paragraph(); print heading($0); next }

/^\[Code: [^]]+, *[A-Za-z0-9_]+\]\([^)]+\)[ \t]*$/ { flush_paragraph(); print snippet($0); next }

/^[ \t]*>[ \t]*\[!(NOTE|TIP|IMPORTANT|WARNING|CAUTION)\][ \t]*$/ {
    flush_paragraph()
    word = $0
    sub(/^.*\[!/, "", word)
    sub(/\].*$/, "", word)
    print "> **" substr(word, 1, 1) tolower(substr(word, 2)) ".**"
    next
}

/^ ? ? ?\[[^\]]+\]:[ \t]+[^ \t]/ {                            # [name]: target
    flush_paragraph()
    match($0, /\]:[ \t]+/)
    lead = substr($0, 1, RSTART + RLENGTH - 1)
    target = substr($0, RSTART + RLENGTH)
    sub(/[ \t].*$/, "", target)
    kind = resolve(target)
    if (kind ~ /^ref /) print lead "@ref " substr(kind, 5)
    else if (kind ~ /^url /) print lead substr(kind, 5)
    else print lead target
    next
}

{ para = para $0 "\n" }

END {
    flush_paragraph()
    if (folded) print "\n\\htmlonly[block]" "</details>\\endhtmlonly"
}
