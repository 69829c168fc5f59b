#!/usr/bin/env python3
"""timeline_page.py same PAGE JSON: the page's data are the JSON file's, byte for byte, and nothing
in the page is loaded from elsewhere.
timeline_page.py synthetic PAGE SPANS OUT: the page with made-up data of so many spans.
timeline_page.py with_test PAGE SCRIPT OUT: the page with a script behind its own.
Without NumPy."""
import json
import re
import sys

BEGIN = '<script type="application/json" id="data">'
END = "</script>"


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def parts(path):
    """What stands before the data, the data, what stands behind."""
    text = read(path)
    begin = text.index(BEGIN) + len(BEGIN)
    end = text.index(END, begin)
    return text[:begin], text[begin:end], text[end:]


def same(page, json_file):
    before, data, behind = parts(page)
    text = read(json_file)
    if json.loads(data) != json.loads(text):
        sys.exit(f"{page}: other data than {json_file}")
    if data.strip() != text.strip():
        sys.exit(f"{page}: the same data in other words than {json_file}")
    if "<" in data:
        sys.exit(f"{page}: a '<' in the data may end its element")
    own = before + behind
    for pattern in (r"https?:", r"\bsrc\s*=", r"<link", r"\bimport\b", r"\bfetch\(", r"url\("):
        if found := re.search(pattern, own):
            sys.exit(f"{page}: loads something: {found[0]}")
    if own.count("<!DOCTYPE html>") != 1 or not own.rstrip().endswith("</html>"):
        sys.exit(f"{page}: is no whole page")
    print(f"{len(json.loads(data)['traceEvents'])} events, page without them: {len(own)} bytes")


def synthetic(page, spans, out):
    """Blocks of 12 warps, each with marks, and waits inside them which arrivals of warp 11 end."""
    before, _, behind = parts(page)
    events = []
    blocks, marks = 8, spans // (8 * 11 * 3)
    for pid in range(1, blocks + 1):
        events.append({"ph": "M", "pid": pid, "tid": 0, "name": "process_name",
                       "args": {"name": f"block ({pid - 1},0,0) on SM {pid - 1}"}})
        for tid in range(1, 13):
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name",
                           "args": {"name": f"warp {tid - 1}"}})
        for n in range(marks):
            for tid in range(1, 12):
                ts = n + tid / 100
                at = {"ph": "X", "pid": pid, "tid": tid}
                events.append({**at, "cat": "mark", "name": f"phase {n % 4}", "ts": ts, "dur": 0.9})
                events.append({**at, "cat": "wait", "name": f"full[{n % 2}]", "ts": ts + 0.1,
                               "dur": 0.3, "args": {"source": f"made_up.cu:{n % 90}"}})
                arrival = round(ts + 0.35, 3)
                events.append({"ph": "X", "pid": pid, "tid": 12, "cat": "arrive", "dur": 0.002,
                               "name": f"full[{n % 2}]", "ts": arrival})
                flow = {"id": len(events), "name": "ends", "cat": "ends", "pid": pid}
                events.append({**flow, "ph": "s", "tid": 12, "ts": arrival})
                events.append({**flow, "ph": "f", "tid": tid, "ts": round(ts + 0.399, 3)})
    about = {"what": "made up", "chapter": "synthetic", "step": f"{spans} spans", "problem": ""}
    data = json.dumps({"otherData": about, "traceEvents": events})
    with open(out, "w", encoding="utf-8") as file:
        file.write(before + data + behind)


def with_test(page, script, out):
    text = read(page)
    at = text.rindex("</body>")
    with open(out, "w", encoding="utf-8") as file:
        file.write(text[:at] + "<script>\n" + read(script) + "</script>\n" + text[at:])


if __name__ == "__main__":
    if sys.argv[1] == "same":
        same(*sys.argv[2:])
    elif sys.argv[1] == "synthetic":
        synthetic(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        with_test(*sys.argv[2:])
