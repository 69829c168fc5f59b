#!/usr/bin/env bash
# docs_site.sh DOCS DOXYFILE DOXYGEN AWK [NODE]: writes the site into a folder of its own; then: a
# step's name leads to its source, a long page has its contents, all that the search knows is there,
# and it finds what pages say.
set -euo pipefail
docs=$1 doxyfile=$2 doxygen=$3 awk=$4 node=${5:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { printf 'FAILED: %s\n' "$1"; exit 1; }

cd "$docs/.."
{ cat "$doxyfile"; printf 'OUTPUT_DIRECTORY = "%s"\n' "$work"; } | "$doxygen" - || fail "doxygen"
sh "$docs/site/finish.sh" "$awk" "$work/html"
cd "$work/html"

page=ch01_naive.html
grep -q 'href="v1__global_8cu_source.html"' "$page" || fail "v1_global: no link to its source"
if grep -o 'href="[^"]*_8cu\.html"' ch*.html; then fail "a step's name leads elsewhere"; fi
grep -q '<div class="toc">' "$page" || fail "$page has no contents"
for file in *.html; do
  [[ $(grep -c 'src="menu.js"' "$file") -eq 1 ]] || fail "$file does not load menu.js once"
done
grep -q 'src="search/engine.js"' search.html || fail "search.html does not load search/engine.js"
if grep -nE 'src="(https?:)?//' "$page" search.html; then fail "a script from the network"; fi

# Marks of quotations are no documentation.
grep -rhoE --include=*.cu --include=*.h --include=*.cpp --exclude-dir=exercises '//! \[[A-Za-z0-9_]+\]$' "$docs"/../0*/ | sort -u |
  sed 's/.*\[/[/' >"$work/marks"
[[ $(wc -l <"$work/marks") -gt 30 ]] || fail "few marks in the sources"
documented='(<p[^>]*>|class="mdescRight">|class="ttdoc">)\[[A-Za-z0-9_]+\]( |<)'
{ grep -hoE "$documented" ./*.html || true; } | sed 's/.*\[/[/; s/\].*/]/' | sort -u \
  >"$work/documented"
stray=$(grep -xFf "$work/marks" "$work/documented" || true)
[[ -z $stray ]] || fail "marks of quotations as documentation: $stray"
# Quoted code has the name of its file over it, as a link.
for chapter in "$docs"/../0*; do
  quoted=$(grep -c '^\[Code: ' "$chapter/README.md" || true)
  shown=$(grep -cE '<div class="quoted">(<p[^>]*>)?<a class="el"' \
    "ch$(basename "$chapter").html" || true)
  [[ $quoted -eq $shown ]] || fail "$chapter: $quoted quotations, $shown with a file's name"
done
# Figures open in their full size; pages lead to the ones before and behind; v2 comes before v10.
grep -qE '<a class="figure" [^>]*href="docs/figures/[^"]*\.svg"><img ' ch03_flash_v1.html ||
  fail "a figure"
grep -q '<nav class="turn"><a rel="prev" href="timelines.html">.*<a rel="next" href="ch01_naive_R' \
  "$page" || fail "$page: the page before, the next page"
while read -r target; do
  [[ -f $target ]] || fail "a page leads to $target"
done < <(grep -hoE '<a rel="(prev|next)" href="[^"]*"' ./*.html |
  sed 's/.*href="//; s/"//' | sort -u)
for list in files.html "$(grep -l 'v10_l2_order' dir_*.html)"; do
  found=$(grep -nE '>v(2_split_q|10_l2_order)\.cu<' "$list" | sed 's/.*>v\([0-9]*\)_.*/\1/')
  [[ $(paste -sd ' ' <<<"$found") == "2 10" ]] || fail "$list: v10 comes before v2"
done

# The texts: "KIND", "NAME", "URL", "TEXT", a line each.
texts=search/texts.js
[[ $(grep -c '^"page"' "$texts") -gt 100 ]] || fail "$texts has few pages"
[[ $(grep -c '^"source"' "$texts") -gt 50 ]] || fail "$texts has few sources"
for word in bank causal cp.async; do
  [[ $(grep '^"page"' "$texts" | grep -cF -- "$word") -gt 0 ]] || fail "no page has $word"
done
while IFS='#' read -r file anchor; do
  [[ -f $file ]] || fail "$texts names $file"
  [[ -z $anchor ]] || grep -qF "id=\"$anchor\"" "$file" || fail "$texts names $file#$anchor"
done < <(sed -nE 's/^"(page|source)", "([^"\\]|\\.)*", "([^"]*)".*/\3/p' "$texts")
[[ -n $node ]] || { echo "no Node.js: the search itself did not run"; exit 0; }

"$node" - search/engine.js "$texts" <<'JS'
const fs = require('fs'), vm = require('vm'), assert = require('assert');
const site = vm.createContext({});
for (const file of process.argv.slice(2)) vm.runInContext(fs.readFileSync(file, 'utf8'), site);
const ask = (q, p = 0) => vm.runInContext('answer', site)(site.siteTexts, {q, n: 20, p});
for (const word of ['bank', 'causal', 'cp.async']) {
  const a = ask(word);
  assert(a.hits > 3, word + ': ' + a.hits + ' hits');
  assert.equal(a.items[0].type, 'page', word);
  const marked = 'class="hl">' + word;
  for (const i of a.items) assert(i.fragments[0].toLowerCase().includes(marked), i.url);
}
assert.match(ask('bank').items[0].url, /^gpu_primer\.html#gpu_primer_shared-memory-and-its-banks$/);
assert.equal(ask('cpXasync').hits, 0);  // the dot is a dot
assert(ask('bank causal').hits < ask('bank').hits);  // all words
assert.equal(ask('').hits, 0);
const all = ask('softmax');
assert.equal(all.pages, Math.ceil(all.hits / 20));
assert.notEqual(ask('softmax', 1).items[0].url, all.items[0].url);
const line = ask('"void load_tile"').items.find(i => i.type === 'source');
const [file, anchor] = line.url.split('#');
const row = fs.readFileSync(file, 'utf8').split('\n').find(l => l.includes('id="' + anchor + '"'));
assert(row.replace(/<[^>]*>/g, '').includes('load_tile'), line.url);
const shown = ask('__shared__').items.map(i => i.fragments[0]).join('');
assert(!/<(?!\/?span)/.test(shown));  // text, not markup
JS
echo "links, contents and search as expected"
