"""timeline_figures.py OLD NEW: whether two pictures of `attn_report timeline --svg` show the same.

The compiler decides which reads of arrays the model counts, so times may differ by a little: boxes
may move by some pixels, and lose a label that no longer fits. All else must be the same.
"""

import re
import sys

MOVED = 20  # pixels
SMALL = 8  # narrower boxes may be missing, and those that the window cuts

BOX = re.compile(r'<rect class="([gn][^"]*)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"')
LABEL = re.compile(r'<text class="c" [^>]*>(.*)</text>')
TICK = re.compile(r'<line class="(?:grid|axis)" |<text class="s c" ')


def read(path):
    """The boxes (colour, row, x, width, label), and the lines that must not differ."""
    boxes, others = [], []
    for line in open(path, encoding="utf-8"):
        if found := BOX.search(line):
            colour, x, y, width = found.groups()
            boxes.append([colour, y, float(x), float(width), ""])
        elif found := LABEL.search(line):
            boxes[-1][4] = found[1]
        elif not TICK.search(line):
            others.append(line)
    return boxes, others


def missing(boxes, among):
    """The boxes without a counterpart."""
    left = min(x for _, _, x, _, _ in boxes)
    right = max(x + width for _, _, x, width, _ in boxes)
    for colour, row, x, width, label in boxes:
        cut = x < left + MOVED or x + width > right - MOVED
        if width < SMALL or cut:
            continue
        if not any(
            (c, r) == (colour, row) and abs(x - x2) < MOVED and abs(width - w) < MOVED
            and (not label or not other or label == other)
            for c, r, x2, w, other in among
        ):
            yield f'"{label}" ({colour}) at {x:.0f}, {row}'


def main():
    (old, old_lines), (new, new_lines) = read(sys.argv[1]), read(sys.argv[2])
    wrong = [f"{box} is gone" for box in missing(old, new)]
    wrong += [f"{box} is new" for box in missing(new, old)]
    if old_lines != new_lines:
        wrong.append("title, lanes, styles or size differ")
    for text in wrong[:5]:
        print(f"  {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
