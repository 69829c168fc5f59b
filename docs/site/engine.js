// The text search of the site. Doxygen's search page asks a server (its "external search") and
// shows what it answers; this stands in for the server, so that the site needs none and works from
// a folder. The texts are in texts.js.
'use strict';

// Entries that hold all words of the query, best first: [{type, name, url, text, at, score}]. Words
// are looked for as they are, in any case: `cp.async` is one. "words in quotes" are one, too.
function findTexts(texts, query) {
  const words = (query.toLowerCase().match(/"[^"]+"|\S+/g) || [])
    .map(word => word.replace(/"/g, '')).filter(word => word);
  if (words.length === 0) return [];
  const inside = c => c !== undefined && /[a-z0-9_]/.test(c);
  const found = [];
  for (let i = 0; i + 3 < texts.length; i += 4) {
    const [type, name, url, text] = texts.slice(i, i + 4);
    const inName = name.toLowerCase(), inText = text.toLowerCase();
    let score = 0, at = -1;
    for (const word of words) {
      let hits = inName.includes(word) ? 20 : 0;  // a title says what the section is about
      // A whole word counts more.
      let place = inText.indexOf(word);
      for (let n = 0; place >= 0 && n < 10; ++n) {
        const end = place + word.length;
        hits += inside(inText[place - 1]) || inside(inText[end]) ? 1 : 2;
        if (at < 0) at = place;
        place = inText.indexOf(word, end);
      }
      if (hits === 0) { score = 0; break; }
      score += hits;
    }
    if (score === 0) continue;
    if (type === 'page') score += 10;  // what explains comes before what is explained
    found.push({type, name, url, text, words, at: Math.max(at, 0), score});
  }
  return found.sort((a, b) => b.score - a.score);
}

function escaped(s) { return s.replace(/[&<>"']/g, c => '&#' + c.charCodeAt(0) + ';'); }

// The words around the first hit, the hits marked; of a source the whole line.
function excerpt(hit) {
  let from = Math.max(hit.at - 80, 0), to = hit.at + 160;
  if (hit.type === 'source') {
    from = hit.text.lastIndexOf('\n', hit.at) + 1;
    to = (hit.text + '\n').indexOf('\n', hit.at);
  } else if (from > 0) {
    from = hit.text.indexOf(' ', from) + 1;
  }
  const some = hit.words.map(w => w.replace(/[.*+?^${}()|[\]\\]/g, '\\$&')).join('|');
  const parts = hit.text.slice(from, to).trim().split(new RegExp('(' + some + ')', 'i'));
  const marked = (part, n) => n % 2 ? '<span class="hl">' + part + '</span>' : part;
  return parts.map(escaped).map(marked).join('');
}

// What Doxygen's protocol calls an item. A source is opened at the line of the first hit.
function item(hit) {
  const line = hit.text.slice(0, hit.at).split('\n').length;
  const url = hit.type === 'source' ? hit.url + '#l' + String(line).padStart(5, '0') : hit.url;
  return {type: hit.type, name: hit.name, tag: '', url, fragments: [excerpt(hit)]};
}

function answer(texts, request) {
  const hits = findTexts(texts, request.q), first = request.n * request.p;
  return {query: request.q, hits: hits.length, first, count: request.n, page: request.p,
          pages: Math.ceil(hits.length / request.n),
          items: hits.slice(first, first + request.n).map(item)};
}

if (typeof jQuery !== 'undefined') {
  let texts = null;
  jQuery.getJSON = function (server, request, show) {
    if (texts) return show(answer(texts, request));
    // A script, for a browser fetches nothing else from a folder.
    const script = document.createElement('script');
    script.src = 'search/texts.js';
    script.onload = () => { texts = siteTexts; show(answer(texts, request)); };
    document.head.appendChild(script);
  };
}
