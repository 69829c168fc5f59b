#!/bin/sh
# finish.sh AWK HTML_FOLDER: what Doxygen leaves to do on the site; finish.awk and natural.awk say
# what.
set -eu
awk=$1
site=$(cd "$(dirname "$0")" && pwd)
cd "$2"
cp "$site/menu.js" .
cp "$site/engine.js" search/
"$awk" -f "$site/finish.awk" *.html >search/texts.js
for file in files.html annotated.html dir_*.html; do
  "$awk" -f "$site/natural.awk" "$file.new" >"$file.sorted"
  mv "$file.sorted" "$file.new"
done
for file in ./*.html.new; do mv "$file" "${file%.new}"; done
