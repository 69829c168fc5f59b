#!/usr/bin/env python3
"""timeline_events.py FILE [NAME]: checks the events of a timeline: spans of a track nest, begins
and ends pair, and a flow leads from a span to a wait. With NAME, prints the share of the time of
that mark in which both warpgroups of a block are in it, in percent. Without NumPy."""
import json
import sys
from collections import Counter, defaultdict


def ns(microseconds):
    return round(microseconds * 1000)


def check(condition, what):
    if not condition:
        sys.exit(f"{sys.argv[1]}: {what}")


def read(path):
    with open(path, encoding="utf-8") as file:
        document = json.load(file)
    what = document["otherData"].get("what", "")
    measured = what.startswith("measured on ")
    keys = ["chapter", "step", "problem", "clock_mhz"]
    for key in keys + (["measured_us", "launch_us", "sms"] if measured else ["modelled_us"]):
        check(key in document["otherData"], f"otherData lacks {key}")
    check(measured or "model" in what, "does not say that it is a model")
    return document["traceEvents"]


def check_spans(events):
    """The spans of each track, after checking that they nest."""
    tracks = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            check(e["dur"] >= 0 and e["ts"] >= 0, f"a span of negative time: {e}")
            tracks[e["pid"], e["tid"]].append((ns(e["ts"]), ns(e["ts"]) + ns(e["dur"]), e))
    for track, spans in tracks.items():
        spans.sort(key=lambda s: (s[0], -s[1]))
        around = []
        for begin, end, e in spans:
            while around and around[-1][0] <= begin:
                around.pop()
            check(not around or end <= around[-1][0], f"track {track}: does not nest: {e}")
            # A mark is code, of which a wait is a part; it would be cut at the end of the wait.
            check(not around or e["cat"] != "mark" or around[-1][1] != "wait",
                  f"track {track}: a mark in a wait: {e}")
            around.append((end, e["cat"]))
    return tracks


def check_names(events, tracks):
    names = {(e["pid"], e["tid"], e["name"]) for e in events if e["ph"] == "M"}
    for pid, tid in tracks:
        for what, thread in (("process_name", 0), ("process_sort_index", 0),
                             ("thread_name", tid), ("thread_sort_index", tid)):
            check((pid, thread, what) in names, f"track {pid}, {tid} lacks {what}")


def check_flights(events):
    """Every b has one e with its id and name, which is not before it."""
    begins, ends = {}, {}
    for e in events:
        if e["ph"] in "be":
            which = begins if e["ph"] == "b" else ends
            check(e["id"] not in which, f"an id twice: {e}")
            which[e["id"]] = e
    check(begins.keys() == ends.keys(), "a b without its e, or the other way round")
    for key, b in begins.items():
        e = ends[key]
        check((b["name"], b["cat"], b["pid"]) == (e["name"], e["cat"], e["pid"]),
              f"begin and end differ: {b} {e}")
        check(b["ts"] <= e["ts"], f"ends before it begins: {b}")
    return len(begins)


def check_flows(events, tracks):
    """Every s has one f: from inside a span to inside a wait, not backwards."""
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = [e for e in events if e["ph"] == "f"]
    check(len(starts) == len(ends) == sum(e["ph"] == "s" for e in events), "flows do not pair")

    def inside(e, kinds):
        return any(begin <= ns(e["ts"]) <= end and span["cat"] in kinds
                   for begin, end, span in tracks.get((e["pid"], e["tid"]), []))

    for f in ends:
        check(f["id"] in starts, f"a flow without a start: {f}")
        s = starts[f["id"]]
        check(ns(s["ts"]) <= ns(f["ts"]), f"a flow backwards: {s} {f}")
        check(inside(s, ("arrive", "unit")), f"a flow starts in no arrival or unit: {s}")
        check(inside(f, ("wait",)), f"a flow ends in no wait: {f}")
    return len(ends)


def at_once(events, name):
    """Of the time in which a warpgroup is in a mark, the part in which two are."""
    any_time = two = 0
    changes = defaultdict(list)
    for e in events:
        if e["ph"] == "X" and e["cat"] == "mark" and e["name"] == name and (e["tid"] - 1) % 4 == 0:
            changes[e["pid"]] += [(ns(e["ts"]), 1), (ns(e["ts"]) + ns(e["dur"]), -1)]
    check(changes, f"no mark {name}")
    for some in changes.values():
        last = depth = 0
        for at, change in sorted(some):
            any_time += (at - last) * (depth > 0)
            two += (at - last) * (depth > 1)
            last, depth = at, depth + change
    return 100 * two / any_time


def main():
    events = read(sys.argv[1])
    tracks = check_spans(events)
    check_names(events, tracks)
    flights = check_flights(events)
    flows = check_flows(events, tracks)
    if len(sys.argv) > 2:
        print(f"{at_once(events, sys.argv[2]):.1f}")
        return
    kinds = Counter(e["cat"] for e in events if e["ph"] == "X")
    print(f"{len({pid for pid, _ in tracks})} blocks, {flights} flights, {flows} flows,",
          ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())))


main()
