# What Doxygen leaves to do, on all HTML files of the site at once:
# awk -f finish.awk *.html >search/texts.js
#
#   in pages       links to a file's documentation lead to its source, where there is one; a
#                  figure is a link to itself, in its full size; a table has a box of its own, in
#                  which it scrolls; at the end are the page before and the next
#   in all files   menu.js, and in search.html the engine, search/engine.js
#   on stdout      the text of pages, one entry a section, and of sources, one entry a file
#
# A changed FILE is written as FILE.new. POSIX awk.

BEGIN {
    for (i = 1; i < ARGC; i++) there[ARGV[i]] = 1
    print "var siteTexts = ["
    read_order("navtreedata.js")
}

# The pages as the sidebar has them, up to the sources: of_page[n] and page_title[n].
function read_order(file,   line, part, child, url) {
    while ((getline line < file) > 0) {
        if (!match(line, /\[ "([^"\\]|\\.)*", "[^"#]+\.html", /)) continue
        part = substr(line, RSTART, RLENGTH)
        child = substr(line, RSTART + RLENGTH)
        sub(/^\[ "/, "", part)
        sub(/", $/, "", part)
        match(part, /", "[^"]*$/)
        url = substr(part, RSTART + 4)
        part = substr(part, 1, RSTART - 1)
        gsub(/\\"/, "\\&quot;", part)
        if (url == "files.html" || url == "annotated.html") continue
        if (!(url in place)) place[url] = ++pages
        of_page[place[url]] = url
        page_title[place[url]] = part
        if (child ~ /^"/) {
            gsub(/[^A-Za-z0-9_]/, "", child)
            read_order(child ".js")
        }
    }
    close(file)
}
function link_to(n, rel, before, after) {
    if (n < 1 || n > pages) return ""
    return "<a rel=\"" rel "\" href=\"" of_page[n] "\">" before page_title[n] after "</a>"
}

# A page made from Markdown, in contrast to what Doxygen lists by itself.
function is_page(file,   line, found) {
    while (!found && (getline line < file) > 0) found = index(line, "<!-- PageDoc -->")
    close(file)
    return found > 0
}

function json(s) {
    gsub(/\\/, "\\\\&", s)
    gsub(/"/, "\\\"", s)
    gsub(/\t/, " ", s)
    gsub(/\n/, "\\n", s)
    return "\"" s "\""
}

function plain(s) {
    gsub(/<\/(td|th|tr|li|p|div|dd|dt|summary|h[1-6])>|<br[^>]*>/, " ", s)
    gsub(/<[^>]*>/, "", s)
    gsub(/&#160;|&nbsp;/, " ", s)
    gsub(/&#39;/, "'", s)
    gsub(/&quot;/, "\"", s)
    gsub(/&lt;/, "<", s)
    gsub(/&gt;/, ">", s)
    gsub(/&amp;/, "\\&", s)
    return s
}

function squeezed(s) {
    gsub(/[ \t\n]+/, " ", s)
    sub(/^ /, "", s)
    sub(/ $/, "", s)
    return s
}

function add(name, url, text) {
    print json(kind) ", " json(name) ", " json(url) ", " json(text) ","
}

function flush_section(   name) {
    if (kind == "page" && squeezed(section text) != "") {
        name = squeezed(section)
        add(name == "" ? title : title ": " name,
            FILENAME (anchor == "" ? "" : "#" anchor), squeezed(text))
    }
    section = text = anchor = ""
}

function finish_file() {
    if (out == "") return
    close(out)
}

FNR == 1 {
    finish_file()
    out = FILENAME ".new"
    kind = FILENAME ~ /_source\.html$/ ? "source" : is_page(FILENAME) ? "page" : ""
    title = section = text = anchor = ""
    inside = in_contents = in_heading = in_table = 0
}

{ line = $0 }

# Links of a page to v1__global_8cu.html.
kind == "page" {
    rest = line
    line = ""
    while (match(rest, /href="[A-Za-z0-9_]+_8[a-z]+\.html"/)) {
        target = substr(rest, RSTART + 6, RLENGTH - 7)
        source = target
        sub(/\.html$/, "_source.html", source)
        if (!(source in there)) source = target
        line = line substr(rest, 1, RSTART + 5) source "\""
        rest = substr(rest, RSTART + RLENGTH)
    }
    line = line rest
    rest = line
    line = ""
    while (match(rest, /<img src="docs\/[^"]*"[^>]*>/)) {
        image = substr(rest, RSTART, RLENGTH)
        target = image
        sub(/^<img src="/, "", target)
        sub(/".*/, "", target)
        sub(/ style="pointer-events: none;"/, "", image)
        line = line substr(rest, 1, RSTART - 1) "<a class=\"figure\" title=\"full size\" href=\"" \
               target "\">" image "</a>"
        rest = substr(rest, RSTART + RLENGTH)
    }
    line = line rest
}

# Doxygen takes names in Python for those of C++: attn.forward is not attn::forward.
FILENAME ~ /^attention_in_an_hour/ && /<div class="line">/ { gsub(/<\/?a[^>]*>/, "", line) }

kind == "page" && /<table class="(markdownTable|doxtable)"/ {
    sub(/<table class="/, "<div class=\"table\">&", line)
    in_table = 1
}
in_table && /<\/table>/ {
    sub(/<\/table>/, "&</div>", line)
    in_table = 0
}

/<!-- contents -->/ && kind == "page" && (FILENAME in place) {
    n = place[FILENAME]
    print "<nav class=\"turn\">" link_to(n - 1, "prev", "&#8592; ", "") \
          link_to(n + 1, "next", "", " &#8594;") "</nav>" >out
}

/^<\/head>/ {
    print "<script src=\"menu.js\"></script>" >out
    if (FILENAME == "search.html") print "<script src=\"search/engine.js\"></script>" >out
}

{ print line >out }

kind == "" { next }

title == "" && match($0, /<div class="title">.*<\/div>/) {
    title = squeezed(plain(substr($0, RSTART, RLENGTH)))
}

kind == "source" {
    if (/<span class="lineno">/) {
        sub(/^.*<span class="lineno"> *[0-9]+<\/span>/, "")
        text = text plain($0) "\n"
    } else if (/<!-- contents -->/) {
        sub(/ Source File$/, "", title)
        add(title, FILENAME, text)
    }
    next
}

/<div class="contents">/ { inside = 1 }
!inside { next }
/<div class="toc">/ { in_contents = 1 }
in_contents { if (!sub(/^.*<div class="textblock">/, "")) next; in_contents = 0 }

/<h[1-6][^>]*>.* id="[^"]*"/ {
    flush_section()
    match($0, / id="[^"]*"/)
    anchor = substr($0, RSTART + 5, RLENGTH - 6)
    in_heading = 1
}
in_heading {
    section = section " " plain($0)
    if (/<\/h[1-6]>/) in_heading = 0
    next
}
{ text = text plain($0) " " }
/<!-- contents -->/ { flush_section(); inside = 0 }

END {
    finish_file()
    print "];"
}
