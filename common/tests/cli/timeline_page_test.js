// Runs inside a page of --timeline, behind its scripts (timeline_page.sh): uses it as a reader does
// and writes what is wrong, and times, into an element that the test reads.
'use strict';
(() => {
  const {data, view} = timeline, canvas = document.getElementById('canvas'), lines = [];
  const check = (condition, what) => { if (!condition) lines.push('FAILED: ' + what); };
  const context = canvas.getContext('2d');
  const pixel = () => context.getImageData(0, 0, 1, 1);  // waits until the picture is there
  const key = (name, target = canvas) => target.dispatchEvent(
    new KeyboardEvent('keydown', {key: name, bubbles: true, cancelable: true}));
  const box = canvas.getBoundingClientRect();
  const point = (type, x, y, more = {}) => canvas.dispatchEvent(new PointerEvent(type, {
    pointerId: 1, bubbles: true, clientX: box.left + x, clientY: box.top + y, ...more}));
  const press = (x, y) => { point('pointerdown', x, y); point('pointerup', x, y); };
  const text = id => document.getElementById(id).textContent;

  try {
    pixel();
    const first = performance.now();
    const spans = data.kind.filter(kind => kind <= 4).length;  // others show flights once more
    lines.push(`spans ${spans}, flows ${data.flowTo.length}, first picture ` +
               `${first.toFixed(0)} ms`);

    const dark = matchMedia('(prefers-color-scheme: dark)').matches;
    const [red] = context.getImageData(canvas.width - 3, 2, 1, 1).data;
    const [page] = /\d+/.exec(getComputedStyle(document.body).backgroundColor);
    lines.push(dark ? 'dark' : 'light');
    check(dark ? page < 80 && red < 80 : page > 180 && red > 180, `paper ${page}, canvas ${red}`);

    // Zoom: keys and wheel keep the window's middle and the time under the pointer.
    timeline.show(0, data.end);
    let span = view.to - view.from;
    key('w');
    check(view.to - view.from < span, 'w does not zoom in');
    key('s');
    check(Math.abs(view.to - view.from - span) < 1, 's does not zoom out');
    const x = view.labels + (view.width - view.labels) * 0.4, under = view.from + 0.4 * span;
    canvas.dispatchEvent(new WheelEvent('wheel', {
      deltaY: -200, clientX: box.left + x, clientY: box.top + 60, bubbles: true,
      cancelable: true}));
    check(view.to - view.from < span, 'the wheel does not zoom');
    check(Math.abs(timeline.xOf(under) - x) < 1, 'the wheel loses the time under the pointer');

    // Pan: keys, and a drag, which takes the picture along.
    let from = view.from;
    key('d');
    check(view.from > from, 'd does not move');
    from = view.from;
    point('pointerdown', x, 60);
    point('pointermove', x + 50, 60);
    point('pointerup', x + 50, 60);
    check(view.from < from, 'a drag does not move');
    check(view.selected === -1, 'a drag selects');

    // A click selects the span that is drawn there.
    let tried = 0;
    for (const kind of [0, 2, 3, 4, 5, 6]) {
      const i = data.kind.findIndex((k, n) => k === kind && data.until[n] - data.begin[n] > 100);
      if (i < 0) continue;
      ++tried;
      timeline.select(i);
      timeline.show(data.begin[i] - 200, data.until[i] + 200);
      timeline.select(-1);
      press(timeline.xOf((data.begin[i] + data.until[i]) / 2), timeline.rowY(i));
      check(view.selected === i, `a click on span ${i} selects ${view.selected}`);
      check(text('details').includes(data.names[data.name[i]]), 'details lack the name');
    }
    check(tried > 0, 'no span to click');
    check(/source.*:\d/.test(text('details')) || !/hopper/.test(document.title),
          'details lack the source: ' + text('details'));

    // E leads from a wait to what ended it.
    const wait = data.endedBy.findIndex(a => a >= 0);
    if (wait >= 0) {
      timeline.select(wait);
      key('e');
      check(view.selected === data.endedBy[wait], 'e does not follow the arrow');
    }
    key('Escape');
    check(view.selected === -1, 'Escape does not deselect');

    // Search: as many hits as names that contain it; next and previous.
    const field = document.getElementById('search');
    field.value = 'WAIT';
    field.dispatchEvent(new Event('input'));
    const wanted = [...data.name].filter(
      (n, i) => data.kind[i] <= 4 && data.names[n].toLowerCase().includes('wait')).length;
    check(timeline.hits.list.length === wanted, `${timeline.hits.list.length} hits, not ${wanted}`);
    if (wanted > 1) {
      key('Enter', field);
      const one = view.selected;
      check(data.names[data.name[one]].includes('wait'), 'a hit of another name');
      key('Enter', field);
      check(view.selected !== one, 'Enter does not go on');
      document.getElementById('previous').click();
      check(view.selected === one, 'the button does not go back');
    }
    timeline.search('no such name', true);
    check(text('hits') === 'none', 'a search without hits says ' + text('hits'));
    key('Escape');

    // A range, by a drag on the axis; its summary.
    timeline.show(0, data.end);
    point('pointerdown', view.labels + 100, 8);
    point('pointermove', view.labels + 200, 8);
    point('pointerup', view.labels + 200, 8);
    check(view.range && view.range[1] > view.range[0], 'a drag on the axis selects no range');
    timeline.setRange(0, data.end);
    const all = summarise(data, 0, data.end);
    check(all.reduce((sum, line) => sum + line.spans, 0) === data.count, 'the summary lacks spans');
    check(all.every(line => line.kind >= 4 || line.share <= 1.0001), 'a share above 100 %');
    key('Escape');
    check(view.range === null, 'Escape keeps the range');

    // Nothing is wider than the window.
    check(document.documentElement.scrollWidth <= innerWidth,
          `${document.documentElement.scrollWidth} pixels wide, the window ${innerWidth}`);

    // All blocks open, all of the time: the most that is drawn.
    if (view.open.size < data.blocks.length) timeline.openAll();
    const times = [];
    for (let n = 0; n < 20; ++n) {
      timeline.show(n % 2 ? 0 : data.end / 50, data.end);
      const begin = performance.now();
      timeline.pan(0.01);
      timeline.draw();
      pixel();
      times.push(performance.now() - begin);
    }
    times.sort((a, b) => a - b);
    lines.push(`pan ${times[10].toFixed(1)} ms, at most ${times[19].toFixed(1)} ms`);
    if (first > 10000) lines.push('FAILED: the first picture takes more than 10 s');
  } catch (error) {
    lines.push('FAILED: ' + error.stack);
  }
  const result = document.createElement('pre');
  result.id = 'result';
  result.textContent = 'RESULT\n' + lines.join('\n') + '\nEND';
  document.body.append(result);
})();
