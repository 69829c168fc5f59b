// Narrow windows: the tree of pages lies over the text and opens by a button. style.css does the
// rest. In the tree v2 comes before v10.
'use strict';

function naturally(a, b) { return a.localeCompare(b, 'en', {numeric: true}); }

// Doxygen's getNode(o, po) fills a node of the tree when it is opened. The nodes keep their
// numbers, by which Doxygen finds the page that is shown: only what is seen is put in order, and
// only lists in the order of characters. Sections and members stay as they are in the text.
if (typeof getNode === 'function') {
  const fill = getNode;
  getNode = (o, po) => {
    fill(o, po);
    const label = node => node.labelSpan.textContent.trim();
    const by_characters = po.children.every((node, i) => i === 0 ||
      label(po.children[i - 1]).toLowerCase() <= label(node).toLowerCase());
    if (!by_characters) return;
    [...po.children].sort((a, b) => naturally(label(a), label(b)))
      .forEach(node => po.getChildrenUL().appendChild(node.li));
  };
}

document.addEventListener('DOMContentLoaded', () => {
  const title = document.getElementById('projectname');
  if (!title) return;
  const button = document.createElement('button');
  button.id = 'tree-button';
  button.textContent = 'Pages';
  button.setAttribute('aria-controls', 'side-nav');
  const show = open => {
    document.body.classList.toggle('tree-open', open);
    button.setAttribute('aria-expanded', String(open));
  };
  show(false);
  button.addEventListener('click', () => show(!document.body.classList.contains('tree-open')));
  document.addEventListener('keydown', event => { if (event.key === 'Escape') show(false); });
  document.addEventListener('click', event => {
    if (event.target.closest('#doc-content, #nav-tree .label a')) show(false);
  });
  title.prepend(button);
});
