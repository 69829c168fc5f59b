// The picture: lanes of spans on a canvas. A row draws at most about one rectangle per pixel: the
// time of a picture depends on its width and not on the number of spans.
'use strict';

const kRow = 17, kLanePad = 3, kHeader = 22, kAxis = 24;
const kWarpgroupHues = [212, 28, 320, 95];
const kBarrierHues = [150, 285, 50, 350, 180, 255, 75, 5, 120, 320];
const kMarkHues = [185, 265, 350, 120, 60, 300];
const kLeastWidth = 2;  // pixels of a span
const kMostArrows = 80;  // more would hide the spans

// What a picture needs beside the data: window of time, what is open and selected.
function newView(t) {
  return {
    from: 0, to: t.end, scroll: 0, width: 0, height: 0, labels: 0, items: [], total: 0,
    open: new Set(t.blocks.slice(0, 1)), selected: -1, hovered: -1, range: null, hits: null,
    colours: {}, groupHue: groupHues(t), widths: new Map(),
  };
}

// A hue per warpgroup, per barrier and per mark: the same name has the same hue on all tracks.
function groupHues(t) {
  const warpgroups = new Map(), barriers = new Map(), marks = new Map();
  return t.groups.map(group => {
    const key = group.base.replace(/^(TMA|wgmma of|cp.async of) /, '');
    const hues = /^warp/.test(key) ? warpgroups : group.kind === kMark ? marks : barriers;
    const list = hues === warpgroups ? kWarpgroupHues
                                     : hues === marks ? kMarkHues : kBarrierHues;
    if (!hues.has(key)) hues.set(key, list[hues.size % list.length]);
    return hues.get(key);
  });
}

function readColours(view) {
  const style = getComputedStyle(document.documentElement);
  for (const name of ['ink', 'soft', 'paper', 'panel', 'line', 'link', 'range', 'fill', 'wait',
                      'bar', 'strong', 'colour', 'wrong', 'wrongFill', 'rightFill'])
    view.colours[name] = style.getPropertyValue('--' + name).trim();
}

// Fill of a span; stages of a ring differ a little in lightness.
function colourOf(t, view, i) {
  const {colours} = view, hue = view.groupHue[t.group[i]], kind = t.kind[i];
  if (kind === kWait || kind === kTileWrite) return `hsl(${hue} 30% ${colours.wait})`;
  if (kind === kArrive) return `hsl(${hue} 60% ${colours.strong})`;
  return `hsl(${hue} ${colours.colour} ${parseFloat(colours.fill) - 6 * t.stage[i]}%)`;
}
function barColour(view, hue) { return `hsl(${hue} 55% ${view.colours.bar})`; }

// Where lanes lie, from the top of the picture without scrolling.
function layOut(t, view) {
  view.items = [];
  let y = 0;
  const push = (height, block, lane) => {
    view.items.push({y, height, block, lane});
    y += height;
  };
  for (const block of t.blocks) {
    push(kHeader, block, null);
    if (view.open.has(block))
      for (const lane of block.lanes) push(lane.rows * kRow + kLanePad, block, lane);
  }
  view.total = y;
  view.scroll = Math.max(0, Math.min(view.scroll, y - (view.height - kAxis)));
}

function xOf(view, time) {
  return view.labels + (time - view.from) / (view.to - view.from) * (view.width - view.labels);
}
function timeOf(view, x) {
  return view.from + (x - view.labels) / (view.width - view.labels) * (view.to - view.from);
}

function draw(t, view, context) {
  const {width, height, colours} = view;
  context.fillStyle = colours.paper;
  context.fillRect(0, 0, width, height);
  context.font = '12px system-ui, sans-serif';
  context.textBaseline = 'middle';
  const colourCache = new Map();
  for (const item of view.items) {
    const y = item.y - view.scroll + kAxis;
    if (y + item.height < kAxis || y > height) continue;
    if (!item.lane) {
      drawHeader(t, view, context, item, y, colourCache);
      continue;
    }
    for (let row = 0; row < item.lane.rows; ++row)
      drawRow(t, view, context, item.lane.firstRow + row, y + row * kRow, kRow - 2, colourCache);
    context.fillStyle = colours.line;
    context.fillRect(0, y + item.height - kLanePad + 0.5, width, 1);
  }
  drawRange(view, context);
  drawArrows(t, view, context);
  drawLabels(t, view, context);
  drawAxis(view, context);
}

// The name of a block; of a closed one also its first unit, as an overview.
function drawHeader(t, view, context, item, y, colourCache) {
  context.fillStyle = view.colours.panel;
  context.fillRect(0, y, view.width, item.height - 1);
  if (view.open.has(item.block) || item.block.lanes.length === 0) return;
  drawRow(t, view, context, item.block.lanes[0].firstRow, y + 2, item.height - 5, colourCache);
}

function drawRow(t, view, context, row, y, height, colourCache) {
  const last = t.rowStart[row + 1], scale = (view.width - view.labels) / (view.to - view.from);
  // As the canvas writes them back: "#rrggbb", which it need not parse at length.
  const cached = (key, make) => {
    if (!colourCache.has(key)) {
      context.fillStyle = make();
      colourCache.set(key, context.fillStyle);
    }
    return colourCache.get(key);
  };
  for (let i = firstAfter(t, row, view.from); i < last && t.begin[i] < view.to;) {
    const x0 = Math.max(view.labels - 2, view.labels + (t.begin[i] - view.from) * scale);
    const x1 = Math.min(view.width + 2, view.labels + (t.until[i] - view.from) * scale);
    if (view.hits) context.globalAlpha = view.hits.has(t.name[i]) ? 1 : 0.25;
    const key = t.group[i] * 4 + t.stage[i];
    context.fillStyle = cached(key, () => colourOf(t, view, i));
    const wide = Math.max(x1 - x0, kLeastWidth);
    context.fillRect(x0, y, wide > 3 ? wide - 0.5 : wide, height);
    if (t.kind[i] === kWait || t.kind[i] === kTileWrite) {
      const bar = () => barColour(view, view.groupHue[t.group[i]]);
      context.fillStyle = cached(t.group[i] * 4 + 3, bar);
      context.fillRect(x0, y + height - 3, wide > 3 ? wide - 0.5 : wide, 3);
    }
    if (wide > 24 && t.kind[i] !== kArrive) drawName(t, view, context, i, x0, x1, y + height / 2);
    ++i;
    // All that ends within its width is drawn by a short span.
    if (x1 - x0 < kLeastWidth && i < last && t.until[i] < t.until[i - 1] + kLeastWidth / scale)
      i = firstAfter(t, row, view.from + (x0 + kLeastWidth - view.labels) / scale, i);
  }
  context.globalAlpha = 1;
  for (const i of [view.hovered, view.selected]) {
    if (i < 0 || t.row[i] !== row) continue;
    const x0 = Math.max(xOf(view, t.begin[i]), view.labels - 4);
    const x1 = Math.min(xOf(view, t.until[i]), view.width + 4);
    context.strokeStyle = i === view.selected ? view.colours.ink : view.colours.soft;
    context.lineWidth = i === view.selected ? 2 : 1;
    context.strokeRect(x0 - 0.5, y, Math.max(x1 - x0, 2), height);
  }
}

// As much of the name as there is room for.
function drawName(t, view, context, i, x0, x1, y) {
  const left = Math.max(x0, view.labels) + 4, room = Math.min(x1, view.width) - left - 3;
  const widthOf = some => {
    if (!view.widths.has(some)) view.widths.set(some, context.measureText(some).width);
    return view.widths.get(some);
  };
  let text = t.names[t.name[i]];
  if (widthOf(text) > room) text = text.replace('of warpgroup', 'WG').replace('warpgroup', 'WG');
  if (widthOf(text) > room) {
    const letters = Math.floor(text.length * (room - widthOf('…')) / widthOf(text));
    if (letters < 2) return;
    text = text.slice(0, letters) + '…';
  }
  context.fillStyle = view.colours.ink;
  context.fillText(text, left, y);
}

function drawRange(view, context) {
  if (!view.range) return;
  const x0 = xOf(view, view.range[0]), x1 = xOf(view, view.range[1]);
  context.fillStyle = view.colours.range;
  context.fillRect(x0, 0, Math.max(x1 - x0, 1), view.height);
  context.fillStyle = view.colours.link;
  context.fillRect(x0, 0, 1, view.height);
  context.fillRect(x1, 0, 1, view.height);
}

// The middle of a span's row, or undefined where its block is closed.
function rowY(t, view, i) {
  const lane = t.lanes[t.lane[i]];
  const item = view.items.find(some => some.lane === lane);
  if (!item) return undefined;
  return item.y - view.scroll + kAxis + (t.row[i] - lane.firstRow) * kRow + kRow / 2 - 1;
}

function isShown(view, i) { return i === view.selected || i === view.hovered; }

// Those of the selected span and of the one under the pointer, and all in view if they are few.
function drawArrows(t, view, context) {
  const visible = [];
  for (let f = 0; f < t.flowTo.length; ++f) {
    const a = t.flowFrom[f], b = t.flowTo[f];
    const selected = isShown(view, a) || isShown(view, b);
    if (!selected && (visible.length > kMostArrows || !view.open.has(t.lanes[t.lane[b]].block)))
      continue;
    if (t.until[b] >= view.from && t.begin[a] <= view.to) visible.push(f);
  }
  const few = visible.length <= kMostArrows;
  context.save();
  context.beginPath();
  context.rect(view.labels, kAxis, view.width, view.height);
  context.clip();
  for (const f of visible) {
    const a = t.flowFrom[f], b = t.flowTo[f];
    const selected = isShown(view, a) || isShown(view, b);
    if (!selected && !few) continue;
    const y0 = rowY(t, view, a), y1 = rowY(t, view, b);
    if (y0 === undefined || y1 === undefined) continue;
    const x0 = xOf(view, t.until[a]), x1 = xOf(view, t.until[b]);
    context.strokeStyle = context.fillStyle = selected ? view.colours.ink : view.colours.soft;
    context.globalAlpha = selected ? 1 : 0.45;
    context.lineWidth = selected ? 1.5 : 1;
    const bend = Math.max(12, (x1 - x0) / 2);
    context.beginPath();
    context.moveTo(x0, y0);
    context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
    context.stroke();
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x1 - 6, y1 - 3.5);
    context.lineTo(x1 - 6, y1 + 3.5);
    context.fill();
  }
  context.restore();
}

// Names of the lanes and blocks, which stay where they are.
function drawLabels(t, view, context) {
  const {colours} = view;
  for (const item of view.items) {
    const y = item.y - view.scroll + kAxis;
    if (y + item.height < kAxis || y > view.height) continue;
    if (item.lane || !view.open.has(item.block)) {
      context.fillStyle = item.lane ? colours.paper : colours.panel;
      context.fillRect(0, y, view.labels, item.height - 1);
    }
    context.fillStyle = item.lane ? colours.soft : colours.ink;
    const mark = view.open.has(item.block) ? '▾ ' : '▸ ';
    let text = item.lane ? item.lane.name.replace(' (quarter 0)', '') : mark + item.block.name;
    const room = item.lane || !view.open.has(item.block) ? view.labels - 10 : view.width;
    if (view.labels < 130) {  // a narrow window
      text = text.replace('special-function unit', 'special function').replace('block ', '');
      if (!view.open.has(item.block)) text = text.replace(/ on SM.*/, '');
    }
    while (context.measureText(text).width > room && text.length > 4)
      text = text.replace(/.…?$/, '…');
    context.fillText(text, 6, y + (item.lane ? kRow / 2 : item.height / 2));
  }
  context.fillStyle = colours.line;
  context.fillRect(view.labels - 1, kAxis, 1, view.height);
  const shown = view.height - kAxis;
  if (view.total > shown) {  // how far down the picture is
    context.fillStyle = colours.soft;
    context.fillRect(view.width - 4, kAxis + view.scroll / view.total * shown, 3,
                     shown * shown / view.total);
  }
}

// Microseconds, with as many digits as a step of `ns` needs.
function inMicroseconds(ns, step = 1) {
  const digits = Math.min(3, Math.max(0, Math.ceil(3 - Math.log10(step) - 1e-9)));
  return (ns / 1000).toFixed(digits);
}

function drawAxis(view, context) {
  const {colours} = view;
  context.fillStyle = colours.panel;
  context.fillRect(0, 0, view.width, kAxis - 1);
  const perTick = (view.to - view.from) * 80 / (view.width - view.labels);
  const power = Math.pow(10, Math.floor(Math.log10(perTick)));
  const step = Math.max(1, [1, 2, 5, 10].map(n => n * power).find(n => n >= perTick));
  context.fillStyle = colours.soft;
  context.fillText('us', 6, kAxis / 2);
  for (let time = Math.ceil(view.from / step) * step; time <= view.to; time += step) {
    const x = xOf(view, time);
    context.fillStyle = colours.line;
    context.fillRect(x, kAxis - 6, 1, 5);
    context.fillStyle = colours.soft;
    const text = inMicroseconds(time, step);
    if (x + 4 + context.measureText(text).width < view.width) context.fillText(text, x + 3, 11);
  }
  if (view.range) {
    context.fillStyle = colours.range;
    const x0 = Math.max(view.labels, xOf(view, view.range[0]));
    context.fillRect(x0, 0, Math.max(xOf(view, view.range[1]) - x0, 1), kAxis - 1);
  }
}
