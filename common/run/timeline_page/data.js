// Columns of a timeline: typed arrays with one entry per span, in the order of the rows on which
// they are drawn. No DOM here.
'use strict';

const kKinds = ['wait', 'arrive', 'mark', 'unit', 'flight'];
const kWait = 0, kArrive = 1, kMark = 2, kUnit = 3, kFlight = 4;
const kTileWrite = 5, kTileRead = 6;  // of a tile of shared memory, by work in flight

function nanoseconds(microseconds) { return Math.round(microseconds * 1000); }

// "k_full[1]" is stage 1 of k_full: stages share a colour and a line of the summary.
function withoutStage(name) { return name.replace(/\[\d+\]/, ''); }
function stageOf(name) {
  const found = /\[(\d+)\]/.exec(name);
  return found ? Number(found[1]) : 0;
}

// Blocks with their lanes, and the raw spans of each lane: {begin, end, kind, name, event}.
function readLanes(events) {
  const blocks = new Map(), open = new Map();
  const blockOf = pid => {
    if (!blocks.has(pid))
      blocks.set(pid, {pid, name: 'block ' + pid, order: pid, lanes: new Map()});
    return blocks.get(pid);
  };
  // Units first, then work in flight, tiles of shared memory, warps.
  const laneOf = (pid, key, tile = '') => {
    const lanes = blockOf(pid).lanes;
    if (!lanes.has(key)) {
      const order = tile ? 1.5 : typeof key === 'string' ? 1 : key >= 1001 ? key - 2000 : 1 + key;
      const name = tile ? 'smem ' + tile : key + ' in flight';
      lanes.set(key, {key, name, tile, order, block: blockOf(pid), spans: []});
    }
    return lanes.get(key);
  };
  events.forEach((e, event) => {
    if (e.pid === 0) return;  // counters of all SMs, for Perfetto
    if (e.ph === 'X') {
      const begin = nanoseconds(e.ts), kind = kKinds.indexOf(e.cat);
      if (kind < 0) return;  // "exit": the end of a warp
      laneOf(e.pid, e.tid).spans.push(
        {begin, end: begin + nanoseconds(e.dur), kind, name: e.name, event});
    } else if (e.ph === 'b') {
      open.set(e.id, {begin: nanoseconds(e.ts), end: 0, kind: kFlight, name: e.name, event});
    } else if (e.ph === 'e' && open.has(e.id)) {
      const span = open.get(e.id);
      span.end = nanoseconds(e.ts);
      laneOf(e.pid, e.cat === 'tma' ? 'TMA' : e.cat).spans.push(span);
      const args = events[span.event].args || {};
      for (const [tiles, kind] of [[args.writes, kTileWrite], [args.reads, kTileRead]])
        for (const tile of tiles ? tiles.split(', ') : [])
          laneOf(e.pid, 'smem ' + tile, tile).spans.push({...span, kind});
    } else if (e.name === 'process_name') {
      blockOf(e.pid).name = e.args.name;
    } else if (e.name === 'process_sort_index') {
      blockOf(e.pid).order = e.args.sort_index;
    } else if (e.name === 'thread_name') {
      laneOf(e.pid, e.tid).name = e.args.name;
    }
  });
  return [...blocks.values()].sort((a, b) => a.order - b.order);
}

// The row of each span in its lane: spans inside others lie below them; flights that overlap lie
// below each other. Returns the number of rows.
function assignRows(spans) {
  spans.sort((a, b) => a.begin - b.begin || b.end - a.end);
  const ends = [];
  let rows = 1;
  for (const span of spans) {
    if (span.kind >= kFlight) {
      span.row = ends.findIndex(end => end <= span.begin);
      if (span.row < 0) span.row = ends.length;
      ends[span.row] = span.end;
    } else {
      while (ends.length > 0 && ends[ends.length - 1] <= span.begin) ends.pop();
      span.row = ends.length;
      ends.push(span.end);
    }
    rows = Math.max(rows, span.row + 1);
  }
  return rows;
}

// All that the page draws, of a file of --timeline.
function readTimeline(file) {
  const events = file.traceEvents;
  const blocks = readLanes(events), lanes = [], names = [], nameIds = new Map(), groups = [];
  const groupIds = new Map(), inLane = new Set();
  let count = 0, rows = 0;
  for (const block of blocks) {
    block.lanes = [...block.lanes.values()].sort(
      (a, b) => a.order - b.order || a.name.localeCompare(b.name, 'en', {numeric: true}));
    for (const lane of block.lanes) {
      lane.index = lanes.push(lane) - 1;
      lane.rows = assignRows(lane.spans);
      lane.firstRow = rows;
      rows += lane.rows;
      count += lane.spans.length;
    }
  }
  const t = {
    about: file.otherData || {}, events, blocks, lanes, names, groups, count, end: 1,
    begin: new Float64Array(count), until: new Float64Array(count), kind: new Uint8Array(count),
    name: new Uint32Array(count), group: new Uint32Array(count), lane: new Uint32Array(count),
    row: new Uint32Array(count), event: new Uint32Array(count), stage: new Uint8Array(count),
    rowStart: new Uint32Array(rows + 1), endedBy: new Int32Array(count).fill(-1),
    flowFrom: new Uint32Array(0), flowTo: new Uint32Array(0),
  };
  const idOf = (ids, list, key, value) => {
    if (!ids.has(key)) ids.set(key, list.push(value) - 1);
    return ids.get(key);
  };
  let next = 0;
  for (const lane of lanes) {
    const byRow = Array.from({length: lane.rows}, () => []);
    for (const span of lane.spans) byRow[span.row].push(span);
    byRow.forEach((spans, row) => {
      t.rowStart[lane.firstRow + row] = next;
      for (const span of spans) {
        const i = next++, base = withoutStage(span.name);
        const label = span.kind === kUnit ? lane.name + ': ' + base
                      : lane.tile ? withoutStage(lane.tile) + ': ' + base : base;
        t.begin[i] = span.begin;
        t.until[i] = span.end;
        t.kind[i] = span.kind;
        t.lane[i] = lane.index;
        t.row[i] = lane.firstRow + row;
        t.event[i] = span.event;
        t.stage[i] = stageOf(span.name) % 3;
        t.name[i] = idOf(nameIds, names, span.name, span.name);
        const g = idOf(groupIds, groups, span.kind + label,
                       {kind: span.kind, label, base, lanes: 0});
        t.group[i] = g;
        if (!inLane.has(lane.index * 65536 + g)) {
          inLane.add(lane.index * 65536 + g);
          ++groups[g].lanes;
        }
        if (span.end > t.end) t.end = span.end;
      }
    });
    delete lane.spans;
  }
  t.rowStart[rows] = next;
  readFlows(t);
  return t;
}

// Arrows, as the spans at their ends.
function readFlows(t) {
  const laneAt = new Map(t.lanes.map(lane => [lane.block.pid + ' ' + lane.key, lane]));
  const spanAt = (e, kinds) => {
    const lane = laneAt.get(e.pid + ' ' + e.tid);
    return lane ? findSpan(t, lane, nanoseconds(e.ts), kinds) : -1;
  };
  const starts = new Map(), from = [], to = [];
  for (const e of t.events) if (e.ph === 's') starts.set(e.id, e);
  for (const e of t.events) {
    if (e.ph !== 'f' || !starts.has(e.id)) continue;
    const a = spanAt(starts.get(e.id), [kArrive, kUnit]), b = spanAt(e, [kWait]);
    if (a < 0 || b < 0) continue;
    from.push(a);
    to.push(b);
    t.endedBy[b] = a;
  }
  t.flowFrom = Uint32Array.from(from);
  t.flowTo = Uint32Array.from(to);
}

// The first span of a row that ends after `time`.
function firstAfter(t, row, time, from = t.rowStart[row]) {
  let low = from, high = t.rowStart[row + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (t.until[middle] > time) high = middle; else low = middle + 1;
  }
  return low;
}

// The innermost span of a lane at a time, of some kinds; -1 if there is none.
function findSpan(t, lane, time, kinds) {
  for (let row = lane.firstRow + lane.rows - 1; row >= lane.firstRow; --row) {
    let i = firstAfter(t, row, time - 1);
    for (; i < t.rowStart[row + 1] && t.begin[i] <= time; ++i)
      if (kinds.includes(t.kind[i])) return i;
  }
  return -1;
}

// Per group that has spans between two times: its time there, number of spans, and share of the
// time of the lanes on which it occurs. The longest first, by kind.
function summarise(t, from, to) {
  const time = new Float64Array(t.groups.length), spans = new Uint32Array(t.groups.length);
  for (let i = 0; i < t.count; ++i) {
    const inside = Math.min(t.until[i], to) - Math.max(t.begin[i], from);
    if (inside < 0 || (inside === 0 && t.until[i] > t.begin[i])) continue;
    time[t.group[i]] += inside;
    ++spans[t.group[i]];
  }
  return t.groups.map((group, g) => ({
    group: g, kind: group.kind, label: group.label, base: group.base, time: time[g],
    spans: spans[g], share: time[g] / ((to - from || 1) * group.lanes),
  })).filter(line => line.spans > 0).sort((a, b) => b.share - a.share);
}

// Spans of the file whose name contains a text, in any case, in the order of their begin.
function findNames(t, text) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return [];
  const matches = t.names.map(name => name.toLowerCase().includes(wanted)), hits = [];
  for (let i = 0; i < t.count; ++i)
    if (matches[t.name[i]] && t.kind[i] < kTileWrite) hits.push(i);
  // Through the time of one block, then the next: blocks do the same at the same time.
  const block = i => t.lanes[t.lane[i]].block.order;
  return hits.sort((a, b) => block(a) - block(b) || t.begin[a] - t.begin[b] || a - b);
}

if (typeof module !== 'undefined') module.exports = {readTimeline, summarise, findNames, kKinds};
