// Narrow windows: the tree of pages lies over the text and opens by a button. style.css does the
// rest.
'use strict';

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
