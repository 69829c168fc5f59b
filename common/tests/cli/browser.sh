# shellcheck shell=bash
# Pages of timelines in a headless browser, for timeline_page.sh and memory_view.sh. Sourced; $work
# is a temporary folder, $python Python, $here this folder.
fail() { echo "FAILED: $*"; exit 1; }

need_browser() {  # sets $browser; without one the test is skipped
  local name
  for name in chromium chromium-browser google-chrome; do
    if browser=$(command -v "$name"); then return; fi
  done
  echo "skipped: no Chromium (Debian's package chromium)"
  exit 77
}

# use_page PAGE TEST WIDTH HEIGHT light|dark: runs the script TEST in the page, and prints its
# results, one of which is the colour scheme.
use_page() {
  need_browser
  "$python" "$here/timeline_page.py" with_test "$1" "$2" "$work/test.html"
  # Chromium's windows are at least 500 pixels wide: a frame may be narrower.
  local page=$work/test.html scheme=1
  if [[ $3 -lt 500 ]]; then
    page=$work/frame.html
    cat >"$page" <<HTML
<iframe id="frame" src="test.html" style="width: $3px; height: 844px; border: 0"></iframe>
<pre id="result"></pre>
<script>
onload = () => {
  const inside = document.getElementById('frame').contentDocument;
  document.getElementById('result').textContent = inside.getElementById('result').textContent;
};
</script>
HTML
  fi
  if [[ $5 == dark ]]; then scheme=0; fi
  timeout 120 "$browser" --headless --no-sandbox --disable-gpu --user-data-dir="$work/profile" \
    --blink-settings="preferredColorScheme=$scheme" --allow-file-access-from-files \
    --window-size="$(($3 < 500 ? 600 : $3)),$4" --dump-dom "file://$page" \
    >"$work/dom" 2>"$work/browser" || fail "$(cat "$work/browser")"
  sed -n '/>RESULT$/,/^END/p' "$work/dom" >"$work/result"
  grep -v -e 'RESULT' -e '^END' "$work/result" || fail "no result: $(tail -5 "$work/browser")"
  ! grep -q FAILED "$work/result" || fail "see above"
  grep -qx "$5" "$work/result" || fail "not $5"
}
