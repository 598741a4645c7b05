// Elements from data. Data becomes text, never markup.

/** An element with a class and with children, which are elements or text. */
export function element(name, className = "", ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

/** A table with a caption for those who hear it. */
export function table(caption, heads, rows) {
  const head = element("tr", "", ...heads.map((text) => headCell(text, "col")));
  const body = rows.map(([first, ...cells]) => {
    return element("tr", "", headCell(first, "row"), ...cells.map((text) => element("td", "", text)));
  });
  return element("table", "", element("caption", "unseen", caption), element("thead", "", head),
    element("tbody", "", ...body));
}

function headCell(text, scope) {
  const cell = element("th", "", text);
  cell.scope = scope;
  return cell;
}

/** A table that is made when its details are opened; returns what makes it anew if it is open. */
export function lazyTable(details, make) {
  const place = details.querySelector(".scroll");
  const fill = () => place.replaceChildren(...(details.open ? [make()] : []));
  details.addEventListener("toggle", fill);
  return fill;
}

/** A number of things. */
export function counted(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

/** Number and unit, short. */
export function milliseconds(ms) {
  if (ms >= 10000) return `${(ms / 1000).toFixed(1)} s`;
  return `${ms >= 100 ? ms.toFixed(0) : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2)} ms`;
}
