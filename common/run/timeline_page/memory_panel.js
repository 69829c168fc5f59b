// The memory panel: which block, which moment, which access. `timeline.memory` is what tests use.
'use strict';

timeline.memory = (() => {
  const $ = id => document.getElementById(id);
  const {data: t, view, element, link} = timeline, source = $('memory');
  if (!source) return null;
  const text = source.textContent;
  const state = {memory: null, block: null, time: 0, writers: null, flying: [], reads: [],
                 selected: -1, bring: false, layout: null, open: false};
  let pending = false;

  function blockName(block) {
    const known = t.blocks.find(some => some.pid === block.pid);
    return known ? known.name : 'block ' + block.pid;
  }

  // ---- state -----------------------------------------------------------------------------------
  function load() {
    if (state.memory) return;
    state.memory = readMemory(JSON.parse(text));
    for (const block of state.memory.blocks)
      $('memory-block').append(element('option', blockName(block)));
    chooseBlock(state.memory.blocks[0], false);
    const {leftOut} = state.memory;
    $('memory-left').textContent = leftOut ? 'Left out: ' + leftOut : '';
    view.overlay = context => drawMoment(t, view, context, state);
  }
  function chooseBlock(block, redraw = true) {
    if (state.block === block) return;
    state.block = block;
    state.selected = -1;
    $('memory-block').selectedIndex = state.memory.blocks.indexOf(block);
    showLines();
    showRaces();
    if (redraw) setTime(state.time);
  }
  function setTime(time, keep = false) {
    state.time = Math.max(0, Math.min(time, t.end));
    if (!keep) state.selected = -1;
    if (!pending) requestAnimationFrame(drawAll);
    pending = true;
  }
  function selectAccess(id) {
    const {block} = state, at = id < block.count ? block.time[id] : block.flights[id - block.count]
      .begin;
    state.selected = id;
    state.bring = true;
    setTime(at, true);
    if (at < view.from || at > view.to) {
      const half = (view.to - view.from) / 2;
      timeline.show(at - half, at + half);
    }
  }
  // From one access to the next, of the selected warp if there is one.
  function step(by) {
    const {block, selected} = state;
    let i = selected >= 0 && selected < block.count ? selected + by
                                                    : firstAccess(block, state.time) - (by < 0);
    if (selected >= 0 && selected < block.count)
      while (i >= 0 && i < block.count && block.warp[i] !== block.warp[selected]) i += by;
    if (i >= 0 && i < block.count) selectAccess(i);
  }
  function open(shown = !state.open) {
    load();
    state.open = shown;
    $('memory-panel').hidden = !shown;
    if (shown && state.time === 0) state.time = t.end / 2;
    view.clicked = shown ? clicked : null;
    setTime(state.time, true);
    timeline.redraw();
  }
  // On the picture of the lanes.
  function clicked(time, block) {
    const chosen = block && state.memory.blocks.find(some => some.pid === block.pid);
    if (chosen) chooseBlock(chosen, false);
    setTime(time);
  }

  // ---- pictures --------------------------------------------------------------------------------
  function drawAll() {
    pending = false;
    if (!state.open || !state.block) return timeline.redraw();
    const {block, time} = state, box = $('memory-map-box');
    state.writers = writersAt(block, time);
    state.flying = inFlightAt(block, time);
    state.reads = readsAt(block, time);
    state.layout = mapLayout(block, box.clientWidth - 2, box.clientHeight - 2);
    drawMap($('memory-map'), view.colours, state, state.layout);
    const slider = $('memory-time');
    slider.max = t.end;
    slider.value = time;
    $('memory-at').textContent = inMicroseconds(time) + ' us';
    showNow();
    showBanks();
    timeline.redraw();
    if (!state.bring) return;
    state.bring = false;
    eachRange(block, state.selected, first => {  // into the middle, unless it is in view
      const y = Math.floor(first / kLineBytes) * state.layout.height, room = box.clientHeight;
      if (y < box.scrollTop || y > box.scrollTop + room - 20) box.scrollTop = y - room / 2;
    });
  }
  function share(ids) {
    const seen = new Uint8Array(state.block.bytes);
    for (const id of ids)
      eachRange(state.block, id, (first, bytes) => seen.fill(1, first, first + bytes));
    return seen.reduce((sum, one) => sum + one, 0);
  }
  function showNow() {
    const {block, writers} = state;
    const never = writers.reduce((sum, id) => sum + (id === kNever), 0);
    const warps = new Set();
    let last = kNever;
    for (const id of writers)
      if (id !== last) {
        if (id !== kNever) warps.add(describe(block, id).warp);
        last = id;
      }
    const bytes = n => n.toLocaleString('en') + ' bytes';
    const parts = [...warps].sort((a, b) => a - b).map(warp => swatch(
      `hsl(${warpHue(warp)} 45% ${view.colours.fill})`, 'warp ' + warp));
    $('memory-now').replaceChildren(
      element('span', 'Last written by: '), ...parts,
      element('span', ` Striped: in flight, ${bytes(share(state.flying))}. ` +
        `Underlined: being read, ${bytes(share(state.reads))}. ` +
        `Hatched: never written, ${bytes(never)} of ${bytes(block.bytes)}.`));
  }
  function swatch(colour, label) {
    const box = element('span', '');
    box.className = 'swatch';
    box.style.background = colour;
    const both = element('span', '');
    both.append(box, label + '. ');
    return both;
  }
  function showBanks() {
    const {block, selected} = state, canvas = $('memory-banks');
    const shape = selected >= 0 && selected < block.count
      ? block.memory.shapes[block.shape[selected]] : null;
    canvas.hidden = !shape || shape.wavefronts === 0;
    if (selected < 0) {
      $('memory-access').textContent = 'Select a line below, or click on the map.';
      return;
    }
    const {warp, source, text: what} = describe(block, selected);
    let line = `warp ${warp}: ${what} at ${source}`;
    if (shape && shape.wavefronts > 0)
      line += `: ${shape.wavefronts} wavefront${shape.wavefronts > 1 ? 's' : ''}, ` +
              `${shape.ideal} without bank conflicts`;
    $('memory-access').textContent = line;
    if (!canvas.hidden)
      drawBanks(canvas, view.colours, canvas.parentElement.clientWidth, shape,
                block.memory.sites[block.site[selected]].bytes);
  }
  function showLines() {
    const table = element('table', ''), head = element('tr', '');
    for (const name of ['line', 'access', 'times', 'worst'])
      head.append(element('th', name));
    table.append(head);
    for (const line of linesOf(state.block)) {
      const worst = element('td', line.wavefronts ? `${line.wavefronts} of ${line.ideal}` : '');
      if (line.wavefronts > line.ideal) worst.className = 'wrong';
      table.append(element('tr', '',
        element('td', '', link(line.source.replace(/^.*\//, ''), () => selectAccess(line.worst))),
        element('td', `${line.kind} ${line.bytes} B ${line.what}`),
        element('td', line.count.toLocaleString('en')), worst));
    }
    $('memory-lines').replaceChildren(table);
  }
  function showRaces() {
    const {block} = state, box = $('memory-races');
    box.replaceChildren();
    for (const race of block.races) {
      const item = element('p', race.text + ' ');
      item.className = 'wrong';
      for (const side of [race.first, race.second])
        if (side && side.at >= 0)
          item.append(link(`warp ${side.warp}, ${side.source.replace(/^.*\//, '')}`,
                           () => selectSide(race, side)));
      box.append(item);
    }
  }
  // The access of a race nearest to its time, or only the time.
  function selectSide(race, side) {
    const {block} = state;
    let best = -1;
    const isIt = i => block.warp[i] === side.warp && touches(block, i, race.byte) &&
                      block.memory.sites[block.site[i]].source === side.source;
    for (let i = 0; i < block.count; ++i)
      if (isIt(i) && (best < 0 || Math.abs(block.time[i] - side.at) <=
                                  Math.abs(block.time[best] - side.at))) best = i;
    if (best >= 0) selectAccess(best); else setTime(side.at);
  }

  // ---- map under the pointer -------------------------------------------------------------------
  function byteUnder(event) {
    const box = $('memory-map').getBoundingClientRect();
    const byte = byteAt(state.layout, event.clientX - box.left, event.clientY - box.top);
    return byte < state.block.bytes ? byte : -1;
  }
  function wordText(byte) {
    const {block, writers} = state, id = writers[byte], parts = [elementAt(block, byte)];
    if (id === kNever) {
      parts.push('never written');
    } else {
      const {warp, source, time} = describe(block, id);
      parts.push(`last written by warp ${warp} at ${source}, ${inMicroseconds(time)} us`);
    }
    const flying = state.flying.find(some => touches(block, some, byte));
    if (flying !== undefined) {
      const {warp, source} = describe(block, flying);
      parts.push(`a copy of warp ${warp} at ${source} is in flight`);
    }
    const reads = state.reads.filter(some => touches(block, some, byte));
    if (reads.length > 0)
      parts.push('being read by ' + [...new Set(reads.map(some => {
        const {warp, source} = describe(block, some);
        return `warp ${warp} at ${source}`;
      }))].join(', '));
    return parts.join('; ');
  }
  $('memory-map').addEventListener('pointermove', event => {
    const byte = byteUnder(event);
    $('memory-word').textContent = byte < 0 ? '' : wordText(byte);
  });
  // What was done last to a byte.
  $('memory-map').addEventListener('click', event => {
    const byte = byteUnder(event), {block} = state;
    if (byte < 0) return;
    $('memory-word').textContent = wordText(byte);
    for (let i = firstAccess(block, state.time) - 1; i >= 0; --i)
      if (touches(block, i, byte)) return selectAccess(i);
  });
  $('memory-block').onchange = event =>
    chooseBlock(state.memory.blocks[event.target.selectedIndex]);
  $('memory-time').addEventListener('input', event => setTime(Number(event.target.value)));
  $('memory-earlier').onclick = () => step(-1);
  $('memory-later').onclick = () => step(1);
  $('memory-close').onclick = () => open(false);
  $('memory-open').onclick = () => open();
  $('memory-open').hidden = false;
  Object.assign(timeline.keys, {m: () => open(), '[': () => state.open && step(-1),
                                ']': () => state.open && step(1)});
  new ResizeObserver(() => state.open && setTime(state.time, true)).observe($('memory-map-box'));
  matchMedia('(prefers-color-scheme: dark)').addEventListener(
    'change', () => state.open && setTime(state.time, true));

  if (/"races":\[\{/.test(text)) {  // the page was written for it
    load();
    const block = state.memory.blocks.find(some => some.races.length > 0);
    const race = block.races[block.races.length - 1];
    const times = [race.first, race.second].filter(side => side && side.at >= 0)
      .map(side => side.at);
    t.end = Math.max(t.end, ...times);  // after the last span, if the launch ended there
    open(true);
    chooseBlock(block, false);
    timeline.show(Math.min(...times) - 400, Math.max(...times) + 400);
    selectSide(race, race.second);
  }
  return {state, open, setTime, selectAccess, chooseBlock, step, wordText, draw: drawAll,
          lines: () => linesOf(state.block)};
})();
