// What happens to shared memory, of the element "memory" of a page: columns with one entry per
// access of a warp, and its state at a time. No DOM here.
'use strict';

const kNever = -1;       // no writer
const kJustNow = 25;     // ns for which an access is shown as happening
const kSnapshots = 24;   // of the state of a block, so that going back is quick

function readMemory(file) {
  const sites = file.sites.map(([source, kind, bytes, what]) => ({source, kind, bytes, what}));
  const shapes = file.shapes.map(([offsets, wavefronts, ideal, rows]) => ({
    offsets, wavefronts, ideal,
    rows: rows.map(([extra, lanes]) => ({extra: extra === 1, lanes}))}));
  const memory = {sites, shapes, leftOut: file.left_out || ''};
  memory.blocks = file.blocks.map(block => readBlock(memory, block));
  return memory;
}

// Numbers of accesses are from 0 on; those of asynchronous work follow.
function readBlock(memory, file) {
  const count = file.t.length;
  const block = {
    pid: file.pid, bytes: file.bytes, cut: file.cut === true, count, memory,
    time: new Float64Array(count), lands: new Float64Array(count), warp: Uint16Array.from(file.w),
    site: Uint32Array.from(file.s), shape: Uint32Array.from(file.q),
    base: Uint32Array.from(file.b), writes: [], inFlight: [], snapshots: [],
    members: file.members.map(([name, offset, bytes, element, extents]) => (
      {name, offset, bytes, element, extents})),
    flights: file.flights.map(([begin, end, warp, writes, what, source, ranges]) => (
      {begin, end, warp, writes: writes === 1, what, source, ranges})),
    races: file.races,
  };
  for (let i = 0, time = 0; i < count; ++i) {
    time += file.t[i];
    block.time[i] = time;
    block.lands[i] = file.u[i] > 0 ? time + file.u[i] : 0;
    if (block.lands[i]) block.inFlight.push({id: i, begin: time, end: block.lands[i]});
    const kind = memory.sites[block.site[i]].kind;
    if (kind === 'write' || kind === 'atomic')
      block.writes.push({id: i, time: block.lands[i] || time});
  }
  block.flights.forEach((flight, f) => {
    if (!flight.writes) return;
    block.inFlight.push({id: count + f, begin: flight.begin, end: flight.end});
    block.writes.push({id: count + f, time: flight.end});
  });
  block.writes.sort((a, b) => a.time - b.time);
  return block;
}

// visit(first, bytes) for what an access or asynchronous work touches.
function eachRange(block, id, visit) {
  if (id >= block.count) {
    for (const [first, bytes] of block.flights[id - block.count].ranges) visit(first, bytes);
    return;
  }
  const bytes = block.memory.sites[block.site[id]].bytes, base = block.base[id];
  for (const offset of block.memory.shapes[block.shape[id]].offsets)
    if (offset >= 0) visit(base + offset, bytes);
}
function touches(block, id, byte) {
  let hit = false;
  eachRange(block, id, (first, bytes) => { hit = hit || (byte >= first && byte < first + bytes); });
  return hit;
}

// The last write of each byte at a time, or kNever.
function writersAt(block, time) {
  const every = Math.max(512, Math.ceil(block.writes.length / kSnapshots));
  if (block.snapshots.length === 0)
    block.snapshots.push({next: 0, writers: new Int32Array(block.bytes).fill(kNever)});
  let low = 0, high = block.writes.length;  // how many writes are over
  while (low < high) {
    const middle = (low + high) >> 1;
    if (block.writes[middle].time <= time) low = middle + 1; else high = middle;
  }
  const number = Math.min(Math.floor(low / every), block.snapshots.length - 1);
  let {next, writers} = block.snapshots[number];
  writers = writers.slice();
  for (; next < low; ++next) {
    if (next % every === 0 && next / every === block.snapshots.length)
      block.snapshots.push({next, writers: writers.slice()});
    const {id} = block.writes[next];
    eachRange(block, id, (first, bytes) => writers.fill(id, first, first + bytes));
  }
  return writers;
}

// The first access after a time.
function firstAccess(block, time) {
  let low = 0, high = block.count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (block.time[middle] > time) high = middle; else low = middle + 1;
  }
  return low;
}
function isRead(block, i) { return block.memory.sites[block.site[i]].kind.endsWith('read'); }

// Copies that have not landed, and what is being read: their numbers.
function inFlightAt(block, time) {
  return block.inFlight.filter(f => f.begin <= time && time < f.end).map(f => f.id);
}
function readsAt(block, time) {
  const ids = [];
  for (let i = firstAccess(block, time) - 1; i >= 0 && block.time[i] > time - kJustNow; --i)
    if (isRead(block, i)) ids.push(i);
  block.flights.forEach((f, n) => {
    if (!f.writes && f.begin <= time && time < f.end) ids.push(block.count + n);
  });
  return ids;
}

// {warp, time, source, text} of an access or of asynchronous work.
function describe(block, id) {
  if (id >= block.count) {
    const f = block.flights[id - block.count];
    return {warp: f.warp, time: f.writes ? f.end : f.begin, source: f.source, text: f.what};
  }
  const site = block.memory.sites[block.site[id]];
  return {warp: block.warp[id], time: block.lands[id] || block.time[id], source: site.source,
          text: `${site.kind} of ${site.bytes} bytes per lane` +
                (site.what ? ` (${site.what})` : '')};
}

// "sK[1][17][40]" of a byte.
function elementAt(block, byte) {
  const m = block.members.find(some => byte >= some.offset && byte < some.offset + some.bytes);
  if (!m) return 'byte ' + byte;
  if (m.extents.length === 0) return m.bytes > m.element ? `${m.name}, byte ${byte - m.offset}`
                                                         : m.name;
  let rest = Math.floor((byte - m.offset) / m.element), text = '';
  for (const extent of [...m.extents].reverse()) {
    text = `[${rest % extent}]` + text;
    rest = Math.floor(rest / extent);
  }
  return m.name + text;
}

// Accesses by line of the kernel, with the worst of each: the most wavefronts above what its data
// need, then the most wavefronts.
function linesOf(block) {
  const lines = new Map(), {sites, shapes} = block.memory;
  for (let i = 0; i < block.count; ++i) {
    const site = sites[block.site[i]], {wavefronts, ideal} = shapes[block.shape[i]];
    const key = [site.source, site.kind, site.bytes, site.what].join('|');
    if (!lines.has(key))
      lines.set(key, {...site, count: 0, total: 0, needed: 0, worst: i, wavefronts, ideal});
    const line = lines.get(key);
    ++line.count;
    line.total += wavefronts;
    line.needed += ideal;
    const more = (wavefronts - ideal) - (line.wavefronts - line.ideal);
    if (more > 0 || (more === 0 && wavefronts > line.wavefronts))
      Object.assign(line, {worst: i, wavefronts, ideal});
  }
  return [...lines.values()].sort((a, b) => (b.total - b.needed) - (a.total - a.needed) ||
    a.source.localeCompare(b.source, 'en', {numeric: true}) || a.kind.localeCompare(b.kind));
}

if (typeof module !== 'undefined') module.exports = {readMemory, writersAt, linesOf};
