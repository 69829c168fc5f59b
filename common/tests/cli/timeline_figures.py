"""timeline_figures.py OLD NEW: whether two pictures of `attn_report timeline --svg` show the same.

The compiler decides which reads of arrays the model counts, so times may differ by a little: boxes
may move by some pixels, and lose a label that no longer fits. All else must be the same.
"""

import collections
import re
import sys

MOVED = 20  # pixels
SMALL = 8  # narrower boxes may be missing, and those that the window cuts
LEFT, RIGHT = 140, 856  # of the window, in pixels
MORE = 2  # boxes of a colour and row that one picture may have more than the other: narrow or cut

BOX = re.compile(r'<rect class="([gn][^"]*)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"')
LABEL = re.compile(r'<text class="c" [^>]*>(.*)</text>')
GRID = re.compile(r'<line class="(?:grid|axis)" ')


def read(path):
    """The boxes (colour, row, x, width, label), and the lines that must not differ."""
    boxes, others = [], []
    for line in open(path, encoding="utf-8"):
        if found := BOX.search(line):
            colour, x, y, width = found.groups()
            boxes.append([colour, y, float(x), float(width), ""])
        elif found := LABEL.search(line):
            boxes[-1][4] = found[1]
        elif not GRID.search(line):
            others.append(line)
    return boxes, others


def missing(boxes, among):
    """The boxes without a counterpart. Each is the counterpart of one."""
    left = list(among)
    for colour, row, x, width, label in boxes:
        near = [
            b for b in left
            if b[:2] == [colour, row] and abs(x - b[2]) < MOVED and abs(width - b[3]) < MOVED
            and (not label or not b[4] or label == b[4])
        ]
        if near:
            left.remove(min(near, key=lambda b: abs(x - b[2]) + abs(width - b[3])))
        elif width >= SMALL and x >= LEFT + MOVED and x + width <= RIGHT - MOVED:
            yield f'"{label}" ({colour}) at {x:.0f}, {row}'


def unequal(old, new):
    """Colours and rows with another number of boxes."""
    counts = [collections.Counter((b[0], b[1]) for b in boxes) for boxes in (old, new)]
    for key in sorted(counts[0] | counts[1]):
        if abs(counts[0][key] - counts[1][key]) > MORE:
            yield f"row {key[1]} ({key[0]}): {counts[0][key]} boxes, now {counts[1][key]}"


def main():
    (old, old_lines), (new, new_lines) = read(sys.argv[1]), read(sys.argv[2])
    wrong = [f"{box} is gone" for box in missing(old, new)]
    wrong += [f"{box} is new" for box in missing(new, old)]
    wrong += unequal(old, new)
    if old_lines != new_lines:
        wrong.append("title, lanes, styles or size differ")
    for text in wrong[:5]:
        print(f"  {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
