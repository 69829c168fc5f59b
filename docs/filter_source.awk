# Makes every source file a documented file for Doxygen, so that pages can link to it: appends
# a \file block whose brief is the first sentence line of the file's header comment. The site shows
# the unfiltered source (FILTER_SOURCE_FILES = NO). POSIX awk.
#
# A line "//! [softmax]" marks where a quotation begins and ends (\snippet reads the unfiltered
# file). Doxygen would take it for documentation of what comes next: here it is a plain comment.

/^[ \t]*\/\/! \[[A-Za-z0-9_]+\][ \t]*$/ { sub(/\/\/!/, "// ") }

{ print }

/[\\@]file([ \t]|$)/ { has_file = 1 }

# The first comment line that says something, before the first line of code.
!code && brief == "" {
    line = $0
    if (line ~ /^[ \t]*(\/\/|\/\*|\*)/) {
        sub(/^[ \t]*(\/\/[\/!]*<?|\/\*[*!]*|\*)[ \t]*/, "", line)
        sub(/\*\/.*$/, "", line)
        sub(/[ \t]+$/, "", line)
        if (line ~ /[A-Za-z]/ && line !~ /clang-format|SPDX|Copyright/) brief = line
    } else if (line !~ /^[ \t]*$/) code = 1
}

END {
    if (has_file) exit
    gsub(/`/, "", brief)
    stem = FILENAME
    sub(/.*\//, "", stem)
    sub(/\.[a-z]*$/, "", stem)
    if (index(brief, stem ": ") == 1) brief = substr(brief, length(stem) + 3)
    out = ""
    for (i = 1; i <= length(brief); i++) {        # no character of the line is a Doxygen command
        c = substr(brief, i, 1)
        out = out (c ~ /[\\@&$#<>%"]/ ? "\\" c : c)
    }
    print "\n/** \\file\n * \\brief " out "\n */"
}
