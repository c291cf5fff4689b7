// Makes and updates elements. All texts are inserted as text: nothing here or elsewhere makes HTML from strings.

const SVG = "http://www.w3.org/2000/svg";

function fill(made, attributes, content) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...content.flat().filter((one) => one !== null && one !== undefined && one !== false));
  return made;
}

// Return a new element. An attribute whose value is a function listens to the event of that name.
export function element(name, attributes = {}, ...content) {
  return fill(document.createElement(name), attributes, content);
}

export function svg(name, attributes = {}, ...content) {
  return fill(document.createElementNS(SVG, name), attributes, content);
}

// Set what has changed only, so that selected text and what a screen reader has read stay as they are.
export function setText(node, text) {
  if (node.textContent !== String(text)) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (value === null || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

// Let `parent` hold one child for each item in this order. Children of items that stay are kept, with the focus.
export function reconcile(parent, items, keyOf, make, update) {
  const known = parent.reconciled ?? (parent.reconciled = new Map());
  const wanted = new Set(items.map(keyOf));
  for (const [key, child] of known) {
    if (wanted.has(key)) continue;
    child.node.remove();
    known.delete(key);
  }
  let before = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    if (!known.has(key)) known.set(key, make(item));
    const child = known.get(key);
    if (child.node === before) before = before.nextElementSibling;
    else parent.insertBefore(child.node, before);
    update(child, item);
  }
}

// Return the classes of a column: {name, number, widest: hidden below 1280 px, wide: below 1000 px, mid: below 640 px}.
export function classes(column) {
  return ["number", "widest", "wide", "mid"].filter((kind) => column[kind]).join(" ") || null;
}

export function table(caption, columns) {
  const body = element("tbody");
  const heads = columns.map((column) => element("th", { scope: "col", class: classes(column) }, column.name));
  const node = element("table", {}, element("caption", { class: "unseen" }, caption), element("thead", {}, element("tr", {}, heads)), body);
  // It can be scrolled with the keys where it does not fit.
  return { node: element("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": caption }, node), body };
}
