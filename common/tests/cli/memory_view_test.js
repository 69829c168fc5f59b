// Runs inside a page of --timeline of tests/memory_chapter.cpp, behind its scripts
// (memory_view.sh): uses the memory panel as a reader does. `expected` stands before it.
'use strict';
(() => {
  const {data, view, memory} = timeline, {state} = memory, lines = [];
  const check = (condition, what) => { if (!condition) lines.push('FAILED: ' + what); };
  const canvas = document.getElementById('canvas'), map = document.getElementById('memory-map');
  const text = id => document.getElementById(id).textContent;
  const key = name => canvas.dispatchEvent(
    new KeyboardEvent('keydown', {key: name, bubbles: true, cancelable: true}));
  const at = line => `tests/memory_chapter.cpp:${expected.lines[line]}`;
  const moment = time => { memory.setTime(time); memory.draw(); };
  // The colour at a point of a canvas, in CSS pixels.
  const colour = (of, x, y) => {
    const scale = window.devicePixelRatio || 1;
    return of.getContext('2d').getImageData(Math.round(x * scale), Math.round(y * scale), 1, 1)
      .data.slice(0, 3).join();
  };
  const painted = value => {
    const one = document.createElement('canvas'), pen = one.getContext('2d');
    pen.fillStyle = value;
    pen.fillRect(0, 0, 1, 1);
    return pen.getImageData(0, 0, 1, 1).data.slice(0, 3).join();
  };
  const colourOfByte = byte => {  // of the map, in the upper left corner of the byte's word
    const {labels, cell, height} = state.layout;
    return colour(map, labels + (Math.floor(byte / 4) % 32 + 0.3) * cell,
                  Math.floor(byte / 128) * height + 1);
  };

  try {
    lines.push(matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
    check(state.open === (expected.race === true), 'open at the start: ' + state.open);
    if (!state.open) key('m');
    check(!document.getElementById('memory-panel').hidden, 'M does not open the panel');
    memory.draw();
    const block = state.block, rowBytes = 4 * expected.stride;
    const member = name => block.members.find(m => m.name === name);
    check(block.members.map(m => m.name).join() === 'tile,copied,unused',
          'members ' + block.members.map(m => m.name));
    const accesses = line => [...Array(block.count).keys()]
      .filter(i => describe(block, i).source === at(line));
    const writes = accesses('write'), reads = accesses('read'), copies = accesses('copy');

    // Bank conflicts: of a column that each of two warps reads, and none of the rows.
    const wanted = memory.lines().find(line => line.source === at('read'));
    if (!expected.race) {
      check(reads.length === 2, `${reads.length} reads of a column, not 2`);
      check(writes.length === 32, `${writes.length} writes of rows, not 32`);
      check(copies.length === 1, `${copies.length} copies, not 1`);
      const rows = memory.lines().find(line => line.source === at('write'));
      check(rows.wavefronts === 1 && rows.count === 32, 'rows: ' + JSON.stringify(rows));
      check(wanted && wanted.wavefronts === expected.wavefronts && wanted.ideal === 1,
            'a column: ' + JSON.stringify(wanted));
      const button = [...document.querySelectorAll('#memory-lines button')]
        .find(some => some.textContent === `memory_chapter.cpp:${expected.lines.read}`);
      button.click();
      memory.draw();
      const wave = expected.wavefronts === 1 ? '1 wavefront,' : expected.wavefronts +
                                                                ' wavefronts,';
      check(text('memory-access').includes(wave) && text('memory-access').includes(at('read')),
            'banks: ' + text('memory-access'));
      const banks = document.getElementById('memory-banks'), width = banks.clientWidth;
      const high = bankRowHeight(expected.wavefronts);
      check(banks.clientHeight === 18 + high * expected.wavefronts,
            `${banks.clientHeight} pixels of banks`);
      const cell = (width - 25) / 32, {shape} = {shape: block.memory.shapes[
        block.shape[state.selected]]};
      shape.rows.forEach((row, r) => {
        const [, bank] = row.lanes[0], fill = r > 0 ? '--wrongFill' : '--rightFill';
        const style = getComputedStyle(document.documentElement).getPropertyValue(fill).trim();
        const seen = colour(banks, 24 + bank * cell + 1.5, 16 + high * (r + 1) - 2);
        check(seen === painted(style), `row ${r} of the banks: ${seen}, not ${painted(style)}`);
      });
      check(/wrong/.test(button.closest('tr').innerHTML) === expected.wavefronts > 1,
            'the list of lines: ' + button.closest('tr').innerHTML);
    }

    // Who wrote which bytes last: warp 0 even rows, warp 1 odd ones; `unused` nobody.
    const end = expected.race ? block.time[writes[writes.length - 1]] : data.end;
    moment(end + 100);
    if (!expected.race) {
      for (let row = 0; row < 32; ++row) {
        const id = state.writers[row * rowBytes + 8];
        check(id >= 0 && describe(block, id).warp === row % 2 &&
              describe(block, id).source === at('write'), `row ${row} is of another warp`);
      }
      const known = [0, 1, 2].map(row => colourOfByte(row * rowBytes));
      check(known[0] !== known[1] && known[0] === known[2], 'colours of rows ' + known.join(' '));
      check(state.writers[member('unused').offset] === -1, '`unused` has a writer');
      check(/^unused\[0\]; never written$/.test(memory.wordText(member('unused').offset)),
            memory.wordText(member('unused').offset));
      check(memory.wordText(rowBytes).startsWith(
        `tile[1][0]; last written by warp 1 at ${at('write')}`), memory.wordText(rowBytes));
    }

    // A copy in flight: it lands later, then warp 1 has written.
    const copied = member('copied').offset, copy = copies[0];
    if (!expected.race) {
      const begin = block.time[copy], lands = block.lands[copy];
      check(lands > begin + 300, `a copy from ${begin} to ${lands}`);
      moment(begin + 1);
      check(state.flying.join() === String(copy) && state.writers[copied] === -1,
            'no copy in flight');
      check(memory.wordText(copied).includes('a copy of warp 1 at ' + at('copy')),
            memory.wordText(copied));
      check(/in flight, 512 bytes/.test(text('memory-now')), text('memory-now'));
      moment(lands + 1);
      check(state.flying.length === 0 && state.writers[copied] === copy, 'the copy has not landed');
      // What is being read, and what was before all writes.
      moment(block.time[reads[0]]);
      check(state.reads.includes(reads[0]), 'no read is shown');
      moment(0);
      check(state.writers.every(id => id === -1), 'a write before the first');
      // A click in the picture chooses the moment.
      const box = canvas.getBoundingClientRect();
      const x = timeline.xOf(0) + 40;
      for (const type of ['pointerdown', 'pointerup'])
        canvas.dispatchEvent(new PointerEvent(type, {
          pointerId: 1, bubbles: true, clientX: box.left + x, clientY: box.top + 60}));
      check(Math.abs(timeline.xOf(state.time) - x) < 1, 'a click does not choose the moment');
    } else {
      const race = block.races[block.races.length - 1], wrong = painted(view.colours.wrong);
      check(race.byte < member('copied').offset, 'the byte ' + race.byte);
      const sources = [race.first.source, race.second.source].sort().join();
      check(sources === [at('read'), at('write')].sort().join(), 'lines ' + sources);
      check(race.first.warp !== race.second.warp, 'one warp alone');
      check(race.first.at >= 0 && race.second.at > race.first.at,
            `times ${race.first.at} and ${race.second.at}`);
      check(text('memory-races').includes(race.text), 'the list of races');
      check(text('about').includes('Failed: race:'), text('about'));
      timeline.draw();
      for (const side of [race.first, race.second]) {
        const seen = colour(canvas, timeline.xOf(side.at),
                            laneY(data, view, block.pid, side.warp) + 3);
        check(seen === wrong, `no mark in the lane of warp ${side.warp}: ${seen} at ` +
              `${timeline.xOf(side.at)}, ${laneY(data, view, block.pid, side.warp)}`);
      }
      const {labels, cell, height} = state.layout, radius = Math.max(7, height / 2 + 3);
      const seen = colour(map, labels + race.byte % 128 / 4 * cell + cell / 8 + radius,
                          Math.floor(race.byte / 128) * height + height / 2);
      const away = seen.split(',').reduce(
        (sum, part, n) => sum + Math.abs(part - wrong.split(',')[n]), 0);
      check(away < 90, 'no mark in the map: ' + seen);  // at the edge of a circle
    }

    check(document.documentElement.scrollWidth <= innerWidth,
          `${document.documentElement.scrollWidth} pixels wide, the window ${innerWidth}`);
    for (const part of document.querySelectorAll(
      '#memory-panel :is(button, canvas, input, output, select, table)')) {
      const {right, width} = part.getBoundingClientRect();
      check(width === 0 || right <= innerWidth + 0.5, `${part.id || part.textContent} is cut off`);
    }
    const times = [];
    for (let n = 0; n < 20; ++n) {
      timeline.show(n % 2 ? 0 : data.end / 50, data.end);
      const begin = performance.now();
      timeline.pan(0.01);
      timeline.draw();
      canvas.getContext('2d').getImageData(0, 0, 1, 1);
      times.push(performance.now() - begin);
    }
    times.sort((a, b) => a - b);
    lines.push(`pan with the panel ${times[10].toFixed(1)} ms`);
    const begin = performance.now();
    moment(data.end / 3);
    map.getContext('2d').getImageData(0, 0, 1, 1);
    lines.push(`another moment ${(performance.now() - begin).toFixed(1)} ms`);
  } catch (error) {
    lines.push('FAILED: ' + error.stack);
  }
  const result = document.createElement('pre');
  result.id = 'result';
  result.textContent = 'RESULT\n' + lines.join('\n') + '\nEND';
  document.body.append(result);
})();
