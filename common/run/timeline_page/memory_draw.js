// The pictures of the memory panel: the map of shared memory, one row per 128 bytes, and the banks
// of one access.
'use strict';

const kBanks = 32, kWord = 4, kLineBytes = kBanks * kWord;
const kMapLabels = 76;

function bankRowHeight(rows) { return rows > 16 ? 12 : 18; }
function warpHue(warp) { return (212 + 47 * warp) % 360; }
// A canvas of so many pixels, ready to draw.
function sized(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.style.height = height + 'px';
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext('2d');
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.font = '12px system-ui, sans-serif';
  context.textBaseline = 'middle';
  return context;
}
function stripes(context, colour, width) {
  const tile = document.createElement('canvas');
  tile.width = tile.height = 6;
  const pen = tile.getContext('2d');
  pen.strokeStyle = colour;
  pen.lineWidth = width;
  for (const x of [-6, 0, 6]) {
    pen.beginPath();
    pen.moveTo(x - 1, 7);
    pen.lineTo(x + 7, -1);
    pen.stroke();
  }
  return context.createPattern(tile, 'repeat');
}

// Where words lie: rows of 32 words, as high as there is room for.
function mapLayout(block, width, room) {
  const rows = Math.max(1, Math.ceil(block.bytes / kLineBytes));
  const height = Math.max(3, Math.min(18, Math.floor(room / rows)));
  const labels = width < 420 ? 58 : kMapLabels;
  return {rows, height, labels, cell: (width - labels - 1) / kBanks, width};
}
function byteAt(layout, x, y) {
  const bank = Math.floor((x - layout.labels) / layout.cell), row = Math.floor(y / layout.height);
  if (bank < 0 || bank >= kBanks || row < 0 || row >= layout.rows) return -1;
  const inWord = ((x - layout.labels) / layout.cell - bank) * kWord;
  return row * kLineBytes + bank * kWord + Math.min(3, Math.floor(inWord));
}
// visit(x, y, width) for the pixels of a range of bytes, a rectangle per row.
function eachRectangle(layout, first, bytes, visit) {
  for (let byte = first; byte < first + bytes;) {
    const row = Math.floor(byte / kLineBytes);
    const end = Math.min(first + bytes, (row + 1) * kLineBytes);
    const perByte = layout.cell / kWord, x = layout.labels + (byte - row * kLineBytes) * perByte;
    visit(x, row * layout.height, (end - byte) * perByte);
    byte = end;
  }
}

// state: {block, time, writers, flying, reads, selected, race}
function drawMap(canvas, colours, state, layout) {
  const {block} = state, h = layout.height;
  const context = sized(canvas, layout.width, layout.rows * h + 1);
  context.fillStyle = colours.paper;
  context.fillRect(0, 0, layout.width, layout.rows * h + 1);
  const fill = (first, bytes, style) => {
    context.fillStyle = style;
    eachRectangle(layout, first, bytes, (x, y, w) => context.fillRect(x, y, w, h > 3 ? h - 1 : h));
  };
  const never = stripes(context, colours.line, 1);
  const colourOfWriter = id => {
    if (id === kNever) return never;
    const {warp, time} = describe(block, id);
    const light = state.time - time < kJustNow ? colours.strong : colours.fill;
    return `hsl(${warpHue(warp)} 45% ${light})`;
  };
  for (let byte = 0; byte < block.bytes;) {  // runs of bytes of one writer
    let end = byte + 1;
    const id = state.writers[byte];
    while (end < block.bytes && state.writers[end] === id) ++end;
    fill(byte, end - byte, colourOfWriter(id));
    byte = end;
  }
  const each = (ids, styleOf) => ids.forEach(id => {
    const style = styleOf(id);
    eachRange(block, id, (first, bytes) => fill(first, bytes, style));
  });
  const pens = new Map();
  each(state.flying, id => {
    const {warp} = describe(block, id);
    if (!pens.has(warp))
      pens.set(warp, stripes(context, `hsl(${warpHue(warp)} 75% ${colours.strong})`, 3));
    return pens.get(warp);
  });
  // A bar in each word that is read.
  context.fillStyle = colours.ink;
  for (const id of state.reads)
    eachRange(block, id, (first, bytes) => eachRectangle(layout, first, bytes, (x, y, w) =>
      context.fillRect(x, y + Math.max(0, h - 4), w, h > 5 ? 2 : 1)));
  if (state.selected >= 0) {  // outlined; in rows that are too low for that, filled
    context.strokeStyle = context.fillStyle = colours.ink;
    context.lineWidth = 1.5;
    context.globalAlpha = h < 6 ? 0.6 : 1;
    eachRange(block, state.selected, (first, bytes) => eachRectangle(layout, first, bytes,
      (x, y, w) => h < 6 ? context.fillRect(x + 0.5, y, w - 1, h - 1)
                         : context.strokeRect(x, y, w, h - 1)));
    context.globalAlpha = 1;
  }
  for (const race of block.races)
    if (race.byte >= 0) {
      const x = layout.labels + race.byte % kLineBytes * layout.cell / kWord + layout.cell / 8;
      const y = Math.floor(race.byte / kLineBytes) * h + h / 2;
      context.strokeStyle = colours.wrong;
      context.lineWidth = 3;
      context.beginPath();
      context.arc(x, y, Math.max(7, h / 2 + 3), 0, 2 * Math.PI);
      context.stroke();
    }
  drawMapLabels(context, colours, block, layout);
}

function drawMapLabels(context, colours, block, layout) {
  const h = layout.height;
  let free = 0;  // pixels down to which there is a name
  for (const m of block.members) {
    const y = Math.floor(m.offset / kLineBytes) * h;
    context.fillStyle = colours.soft;
    if (y >= free) context.fillRect(0, y, layout.labels - 2, 1);
    if (m.bytes * h < 3 * kLineBytes && y + 1 < free) continue;
    const at = Math.max(y, free) + 8;
    context.fillStyle = colours.ink;
    let shown = m.name;
    while (context.measureText(shown).width > layout.labels - 8 && shown.length > 3)
      shown = shown.replace(/.…?$/, '…');
    context.fillText(shown, 2, at);
    free = at + 7;
  }
}

// The wavefronts of an access: a row each, 32 banks wide, with the lanes that it serves.
function drawBanks(canvas, colours, width, shape, bytes) {
  const words = Math.max(1, bytes / kWord), labels = 24, cell = (width - labels - 1) / kBanks;
  const rows = shape.rows, top = 16, high = bankRowHeight(rows.length);
  const context = sized(canvas, width, top + rows.length * high + 2);
  context.fillStyle = colours.paper;
  context.fillRect(0, 0, width, top + rows.length * high + 2);
  context.textAlign = 'center';
  context.fillStyle = colours.soft;
  context.font = `${cell < 13 ? 8 : 10}px system-ui, sans-serif`;
  for (let bank = 0; bank < kBanks; bank += cell < 16 ? 4 : 2)
    context.fillText(String(bank), labels + (bank + 0.5) * cell, 8);
  rows.forEach((row, r) => {
    const y = top + r * high;
    context.fillStyle = colours.soft;
    context.fillText(String(r + 1), labels / 2, y + high / 2);
    context.fillStyle = colours.panel;
    context.fillRect(labels, y, kBanks * cell, high - 1);
    const at = new Map();  // lanes by their bank
    for (const [lane, bank] of row.lanes) at.set(bank, [...(at.get(bank) || []), lane]);
    for (const [bank, lanes] of at) {
      context.fillStyle = row.extra ? colours.wrongFill : colours.rightFill;
      context.fillRect(labels + bank * cell + 0.5, y, words * cell - 1, high - 1);
      context.fillStyle = colours.ink;
      const text = lanes.length > 1 && words * cell > 26 ? `${lanes[0]}+${lanes.length - 1}`
                                                         : String(lanes[0]);
      if (context.measureText(text).width <= words * cell + 2)
        context.fillText(text, labels + (bank + words / 2) * cell, y + high / 2);
    }
  });
}

// In the lanes: the moment of the map, the selected access, and the two sides of each race.
function drawMoment(t, view, context, state) {
  const x = xOf(view, state.time);
  context.save();
  context.beginPath();
  context.rect(view.labels, 0, view.width, view.height);
  context.clip();
  context.fillStyle = view.colours.link;
  context.fillRect(x - 0.5, 0, 1.5, view.height);
  context.beginPath();
  context.moveTo(x - 6, 0);
  context.lineTo(x + 6, 0);
  context.lineTo(x, 8);
  context.fill();
  for (const block of state.memory.blocks)
    for (const race of block.races) {
      const ends = [race.first, race.second].filter(side => side && side.at >= 0 && side.warp >= 0)
        .map(side => [xOf(view, side.at), laneY(t, view, block.pid, side.warp)])
        .filter(([, y]) => y !== undefined);
      context.strokeStyle = context.fillStyle = view.colours.wrong;
      context.lineWidth = 2;
      context.beginPath();
      ends.forEach(([at, y], n) => n ? context.lineTo(at, y) : context.moveTo(at, y));
      context.stroke();
      for (const [at, y] of ends) {
        context.beginPath();
        context.arc(at, y, 5, 0, 2 * Math.PI);
        context.fill();
      }
    }
  context.restore();
}
// The middle of a warp's first row; undefined where its block is closed.
function laneY(t, view, pid, warp) {
  const item = view.items.find(some => some.lane && some.lane.block.pid === pid &&
                                       some.lane.key === 1 + warp);
  return item && item.y - view.scroll + kAxis + kRow / 2 - 1;
}
