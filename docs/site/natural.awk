# Lists of files and of types in the order of their numbers: v2 comes before v10, where Doxygen
# compares characters. awk -f natural.awk FILE: rows of files.html and annotated.html, which form a
# tree by their ids (row_0_1_), and entries of a folder's page, three rows each. POSIX awk.

/^<tr id="row_/ {
    id = $0
    sub(/^<tr id="row_/, "", id)
    sub(/".*/, "", id)
    begin(gsub(/_/, "", id), $0)
    next
}
/^<tr class="memitem:"><td class="memItemLeft"[^>]*>(file|directory)/ {
    begin(1, $0)
    next
}
/^<\/table>/ { flush() }
items > 0 { item[items] = item[items] "\n" $0; next }
{ print }
END { flush() }

function begin(at, row) {
    depth[++items] = at
    item[items] = row
    key[items] = natural(row)
}
# What is compared of a row: its kind, then its name, with numbers of 8 digits.
function natural(row,   kind, out) {
    kind = row ~ /">directory/ ? "0" : "1"
    match(row, /(<a class="el"[^>]*>|<b>)[^<]*/)
    row = substr(row, RSTART, RLENGTH)
    sub(/^[^>]*>/, "", row)
    while (match(row, /[0-9]+/)) {
        out = out substr(row, 1, RSTART - 1) sprintf("%08d", substr(row, RSTART, RLENGTH))
        row = substr(row, RSTART + RLENGTH)
    }
    return kind tolower(out row)
}
function flush() {
    if (items > 0) emit(1, items)
    items = 0
}
# Prints items first to last: those of the depth of the first in order, each with its own behind it.
function emit(first, last,   n, i, j, of, end, swap) {
    n = 0
    for (i = first; i <= last; i++) if (depth[i] == depth[first]) of[++n] = i
    for (i = 1; i <= n; i++) end[of[i]] = i < n ? of[i + 1] - 1 : last
    for (i = 2; i <= n; i++)
        for (j = i; j > 1 && key[of[j - 1]] > key[of[j]]; j--) {
            swap = of[j]
            of[j] = of[j - 1]
            of[j - 1] = swap
        }
    for (i = 1; i <= n; i++) {
        print item[of[i]]
        if (end[of[i]] > of[i]) emit(of[i] + 1, end[of[i]])
    }
}
