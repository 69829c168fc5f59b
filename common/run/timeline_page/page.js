// The page: keys, pointers, search and lists. `window.timeline` is what tests use.
'use strict';

const timeline = (() => {
  const $ = id => document.getElementById(id);
  const t = readTimeline(JSON.parse($('data').textContent));
  const view = newView(t), canvas = $('canvas'), context = canvas.getContext('2d');
  const hits = {list: [], at: -1};
  let pending = false, summaryTimer = 0;

  // ---- picture ---------------------------------------------------------------------------------
  function drawNow() {
    pending = false;
    draw(t, view, context);
    if (view.overlay) view.overlay(context);
  }
  function redraw() {
    if (!pending) requestAnimationFrame(drawNow);
    pending = true;
    clearTimeout(summaryTimer);
    summaryTimer = setTimeout(showSummary, 120);
  }
  function resize() {
    const scale = window.devicePixelRatio || 1;
    view.width = canvas.clientWidth;
    view.height = canvas.clientHeight;
    view.labels = view.width < 600 ? 104 : 158;
    canvas.width = Math.round(view.width * scale);
    canvas.height = Math.round(view.height * scale);
    context.setTransform(scale, 0, 0, scale, 0, 0);
    layOut(t, view);
    drawNow();
  }

  // ---- window of time --------------------------------------------------------------------------
  function show(from, to) {
    const span = Math.min(Math.max(to - from, 20), t.end * 1.04);
    const middle = (from + to) / 2;
    view.from = Math.max(-0.02 * t.end, Math.min(middle - span / 2, 1.02 * t.end - span));
    view.to = view.from + span;
    redraw();
  }
  function zoom(factor, x = (view.labels + view.width) / 2) {
    const at = timeOf(view, Math.max(x, view.labels));
    show(at - (at - view.from) * factor, at + (view.to - at) * factor);
  }
  function pan(share) {
    const by = share * (view.to - view.from);
    show(view.from + by, view.to + by);
  }
  function scroll(by) {
    view.scroll += by;
    layOut(t, view);
    redraw();
  }
  function openAll() {
    const all = view.open.size < t.blocks.length;
    view.open = new Set(all ? t.blocks : t.blocks.slice(0, 1));
    layOut(t, view);
    redraw();
  }
  function toggle(block) {
    if (!view.open.delete(block)) view.open.add(block);
    layOut(t, view);
    redraw();
  }

  // ---- spans -----------------------------------------------------------------------------------
  // The span at a point of the picture, within a few pixels; -1 if there is none.
  function spanAt(x, y) {
    const item = itemAt(y);
    if (!item || !item.lane || x < view.labels) return -1;
    const inLane = Math.floor((y - kAxis + view.scroll - item.y) / kRow);
    const row = item.lane.firstRow + Math.min(inLane, item.lane.rows - 1);
    const near = 3 * (view.to - view.from) / (view.width - view.labels), time = timeOf(view, x);
    let best = -1, least = near;
    for (let i = firstAfter(t, row, time - near); i < t.rowStart[row + 1]; ++i) {
      const away = Math.max(t.begin[i] - time, time - t.until[i], 0);
      if (t.begin[i] > time + near) break;
      if (away < least) [best, least] = [i, away];
    }
    return best;
  }
  function itemAt(y) {
    const at = y - kAxis + view.scroll;
    return y < kAxis ? undefined
                     : view.items.find(item => item.y <= at && at < item.y + item.height);
  }
  function inView(i) {
    const lane = t.lanes[t.lane[i]];
    if (!view.open.has(lane.block)) {
      view.open.add(lane.block);
      layOut(t, view);
    }
    const item = view.items.find(some => some.lane === lane), shown = view.height - kAxis;
    const below = item.y + item.height + kRow - shown;
    view.scroll = Math.min(Math.max(view.scroll, below), Math.max(item.y - kHeader, 0));
    layOut(t, view);
    const span = Math.max(view.to - view.from, 1);
    if (t.begin[i] < view.from || t.until[i] > view.to) {
      const middle = (t.begin[i] + t.until[i]) / 2, half = Math.max(span, t.until[i] - t.begin[i]);
      show(middle - half / 2, middle + half / 2);
    }
  }
  function select(i) {
    view.selected = i;
    if (i >= 0) inView(i);
    showDetails();
    redraw();
  }
  function facts(i) {
    const args = t.events[t.event[i]].args || {}, lane = t.lanes[t.lane[i]];
    const list = [
      ['track', lane.block.name + ', ' + lane.name], ['start', inMicroseconds(t.begin[i]) + ' us'],
      ['duration', inMicroseconds(t.until[i] - t.begin[i]) + ' us']];
    if (args.source) list.push(['source', args.source]);
    if (args.bytes) list.push(['bytes', args.bytes.toLocaleString('en')]);
    if (args.wgmma) list.push(['MMAs', `${args.wgmma} wgmma m64n${args.n}`]);
    if (args.writes) list.push(['writes', args.writes]);
    if (args.reads) list.push(['reads', args.reads]);
    if (args.issuer) list.push(['issued by', 'warp ' + (args.issuer - 1)]);
    return list;
  }
  function titleOf(i) {
    const kind = {wait: 'wait: ', arrive: 'arrival: '}[kKinds[t.kind[i]]] || '';
    return kind + t.names[t.name[i]];
  }

  // ---- lists -----------------------------------------------------------------------------------
  function element(name, text, ...children) {
    const made = document.createElement(name);
    made.textContent = text;
    made.append(...children);
    return made;
  }
  function link(text, action) {
    const button = element('button', text);
    button.addEventListener('click', action);
    return button;
  }
  function showDetails() {
    const i = view.selected, box = $('details');
    if (i < 0) return box.replaceChildren(element('p', 'Select a span for its details.'));
    box.replaceChildren(element('h2', titleOf(i)));
    const list = element('dl', '');
    for (const [what, value] of facts(i)) list.append(element('dt', what), element('dd', value));
    const also = (what, j) => list.append(element('dt', what), element('dd', '', link(
      `${titleOf(j)}, ${t.lanes[t.lane[j]].name}`, () => select(j))));
    if (t.endedBy[i] >= 0) also('ended by', t.endedBy[i]);
    const ends = [...t.flowTo].filter((_, f) => t.flowFrom[f] === i);
    ends.slice(0, 4).forEach(j => also('ends', j));
    if (ends.length > 4)
      list.append(element('dt', ''), element('dd', `and ${ends.length - 4} more`));
    box.append(list);
  }
  function showSummary() {
    const [from, to] = view.range || [Math.max(view.from, 0), Math.min(view.to, t.end)];
    const box = $('summary'), lines = summarise(t, from, to);
    box.replaceChildren(
      element('h2', `${view.range ? 'Range' : 'In view'}: ${inMicroseconds(to - from)} us`),
      element('p', `${inMicroseconds(from)} to ${inMicroseconds(to)} us, all blocks. ` +
                   'Share of the time of the tracks on which a name occurs.'));
    box.lastChild.className = 'note';
    const titles = [[kUnit, 'Units'], [kMark, 'Marks'], [kWait, 'Waits by barrier'],
                    [kFlight, 'In flight at a time, per block'],
                    [kTileRead, 'Shared memory is read'], [kTileWrite, 'Shared memory is written'],
                    [kArrive, 'Arrivals']];
    for (const [kind, title] of titles) {
      const some = lines.filter(line => line.kind === kind);
      if (some.length === 0) continue;
      const table = element('table', '');
      for (const line of some) {
        const name = link(line.label.replace(' (quarter 0)', ''), () => search(line.base, true));
        const swatch = element('span', '');
        swatch.className = 'swatch';
        swatch.style.background = barColour(view, view.groupHue[line.group]);
        name.prepend(swatch);
        const share = kind === kFlight ? line.share.toFixed(2)
                                       : (100 * line.share).toFixed(1) + ' %';
        table.append(element('tr', '', element('td', '', name), element('td', line.spans + ' x'),
                             element('td', kind === kArrive ? '' : share)));
      }
      box.append(element('h3', title), table);
    }
  }

  // ---- search ----------------------------------------------------------------------------------
  function search(text, alsoField = false) {
    if (alsoField) $('search').value = text;
    hits.list = findNames(t, text);
    hits.at = -1;
    view.hits = text.trim() ? new Set(hits.list.map(i => t.name[i])) : null;
    showHits();
    redraw();
    return hits.list.length;
  }
  function showHits() {
    const of = hits.list.length;
    const at = hits.at < 0 ? '' : hits.at + 1 + ' of ';
    $('hits').value = !view.hits ? '' : of === 0 ? 'none' : at + of;
  }
  // The first step goes to the first hit in view.
  function step(by) {
    const of = hits.list.length;
    if (of === 0) return;
    if (hits.at < 0) {
      const first = hits.list.findIndex(i => t.begin[i] >= view.from);
      hits.at = by > 0 ? Math.max(first, 0) : (first <= 0 ? of : first) - 1;
    } else {
      hits.at = (hits.at + by + of) % of;
    }
    showHits();
    select(hits.list[hits.at]);
  }

  // ---- keys ------------------------------------------------------------------------------------
  const keys = {
    w: () => zoom(0.7), '+': () => zoom(0.7), '=': () => zoom(0.7),
    s: () => zoom(1 / 0.7), '-': () => zoom(1 / 0.7),
    a: () => pan(-0.15), ArrowLeft: () => pan(-0.15),
    d: () => pan(0.15), ArrowRight: () => pan(0.15),
    ArrowUp: () => scroll(-3 * kRow), ArrowDown: () => scroll(3 * kRow),
    PageUp: () => scroll(-view.height / 2), PageDown: () => scroll(view.height / 2),
    0: () => show(0, t.end), Home: () => show(0, t.end), b: openAll, n: () => step(1),
    p: () => step(-1), ',': () => neighbour(-1), '.': () => neighbour(1),
    '/': () => $('search').focus(),
    e: () => {
      if (view.selected >= 0 && t.endedBy[view.selected] >= 0) select(t.endedBy[view.selected]);
    },
    f: () => around(0.5, (from, to) => show(from, to)),
    r: () => around(0, setRange),
    Escape: () => { setRange(null); select(-1); search('', true); canvas.focus(); },
  };
  function neighbour(by) {
    const next = view.selected + by;
    if (t.count === 0) return;
    if (view.selected < 0) return select(t.rowStart[t.lanes[0].firstRow]);
    if (next >= 0 && next < t.count && t.row[next] === t.row[view.selected]) select(next);
  }
  function around(margin, action) {
    if (view.selected < 0) return;
    const from = t.begin[view.selected], to = t.until[view.selected];
    action(from - margin * (to - from), to + margin * (to - from));
  }
  function setRange(from, to) {
    view.range = from === null ? null : [Math.max(0, Math.min(from, to)),
                                         Math.min(t.end, Math.max(from, to))];
    redraw();
  }
  document.addEventListener('keydown', event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.tagName === 'INPUT';
    if (typing && event.key !== 'Escape') {
      if (event.key === 'Enter') step(event.shiftKey ? -1 : 1);
      return;
    }
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    const scrolls = key.startsWith('Arrow') || key.startsWith('Page') || key === 'Home';
    const elsewhere = event.target !== canvas && event.target !== document.body;
    if (!keys[key] || (scrolls && elsewhere)) return;
    event.preventDefault();
    keys[key]();
  });

  // ---- pointers --------------------------------------------------------------------------------
  const pointers = new Map();
  let drag = null;
  const place = event => {
    const box = canvas.getBoundingClientRect();
    return {x: event.clientX - box.left, y: event.clientY - box.top};
  };
  canvas.addEventListener('wheel', event => {
    event.preventDefault();
    const {x} = place(event);
    if (x < view.labels || event.shiftKey) return scroll(event.deltaY || event.deltaX);
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) return pan(event.deltaX / view.width);
    zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), x);
  }, {passive: false});
  canvas.addEventListener('pointerdown', event => {
    const at = place(event);
    pointers.set(event.pointerId, at);
    if (event.isTrusted) canvas.setPointerCapture(event.pointerId);
    drag = {...at, from: view.from, to: view.to, scroll: view.scroll, moved: false,
            range: event.shiftKey || at.y < kAxis, two: [...pointers.values()]};
  });
  canvas.addEventListener('pointermove', event => {
    const at = place(event);
    if (!pointers.has(event.pointerId)) return hover(at);
    pointers.set(event.pointerId, at);
    const perPixel = (drag.to - drag.from) / (view.width - view.labels);
    if (pointers.size === 2) {
      const [a, b] = [...pointers.values()], [c, d] = drag.two;
      const factor = Math.abs(c.x - d.x) / Math.max(Math.abs(a.x - b.x), 20);
      const middle = drag.from + ((c.x + d.x) / 2 - view.labels) * perPixel;
      show(middle - (middle - drag.from) * factor, middle + (drag.to - middle) * factor);
      drag.moved = true;
      return;
    }
    if (Math.abs(at.x - drag.x) + Math.abs(at.y - drag.y) > 4) drag.moved = true;
    if (!drag.moved) return;
    if (drag.range) return setRange(timeOf(view, drag.x), timeOf(view, at.x));
    const by = (drag.x - at.x) * perPixel;
    view.scroll = drag.scroll + drag.y - at.y;
    layOut(t, view);
    show(drag.from + by, drag.to + by);
  });
  const release = event => {
    if (!pointers.delete(event.pointerId) || event.type !== 'pointerup' || drag.moved) return;
    const at = place(event), item = itemAt(at.y);
    if (drag.range) return setRange(null);
    if (view.clicked && at.x > view.labels)
      view.clicked(timeOf(view, at.x), item && item.block);
    if (item && !item.lane) return toggle(item.block);
    select(spanAt(at.x, at.y));
  };
  canvas.addEventListener('pointerup', release);
  canvas.addEventListener('pointercancel', release);
  canvas.addEventListener('pointerleave', () => hover({x: -1, y: -1}));
  function hover(at) {
    const i = spanAt(at.x, at.y), tip = $('tip');
    if (i !== view.hovered) redraw();
    view.hovered = i;
    tip.hidden = i < 0;
    if (i < 0) return;
    tip.replaceChildren(element('strong', titleOf(i)));
    for (const [what, value] of facts(i).slice(1)) tip.append(element('div', `${what}: ${value}`));
    tip.style.left = Math.max(0, Math.min(at.x + 14, view.width - tip.offsetWidth - 4)) + 'px';
    tip.style.top = (at.y + 18 + tip.offsetHeight > view.height ? at.y - tip.offsetHeight - 10
                                                                 : at.y + 18) + 'px';
  }

  // ---- start -----------------------------------------------------------------------------------
  const about = t.about;
  document.title = $('title').textContent = [about.chapter, about.step].join(' ');
  const what = `${inMicroseconds(t.end, 100)} us, ${about.what}`;
  $('about').textContent = [about.warning, about.failed && 'Failed: ' + about.failed, what,
                            about.problem,
                            about.lost && 'Lost: ' + about.lost,
                            about.left_out && 'Left out: ' + about.left_out]
    .filter(Boolean).join('. ');
  $('in').onclick = keys.w;
  $('out').onclick = keys.s;
  $('fit').onclick = keys[0];
  $('blocks').onclick = openAll;
  $('blocks').hidden = t.blocks.length < 2;
  $('previous').onclick = keys.p;
  $('next').onclick = keys.n;
  $('search').addEventListener('input', event => search(event.target.value));
  const dark = matchMedia('(prefers-color-scheme: dark)');
  const recolour = () => { readColours(view); redraw(); };
  dark.addEventListener('change', recolour);
  recolour();
  show(-0.01 * t.end, 1.01 * t.end);
  new ResizeObserver(resize).observe(canvas);
  resize();
  showDetails();
  showSummary();
  return {data: t, view, hits, show, zoom, pan, select, spanAt, rowY: i => rowY(t, view, i),
          xOf: time => xOf(view, time), keys, element, link, redraw,
          search, step, setRange, openAll, draw: drawNow,
          firstPicture: performance.now()};
})();
window.timeline = timeline;
