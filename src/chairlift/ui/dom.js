// Elements, always with their text as text: nothing on this page is ever parsed as markup.

export const byId = (id) => document.getElementById(id);

/** Make an element: `h("td", { class: "number" }, "12", other)`. */
export function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "value") made.value = value;
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Set an element's text, if it has changed. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Fill a list with elements from `make`, kept from one call to the next by their key. */
export function fill(parent, items, keyOf, make, update) {
  const known = parent.known ?? (parent.known = new Map());
  const keys = new Set();
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    keys.add(key);
    let element = known.get(key);
    if (!element) known.set(key, (element = make(item)));
    update?.(element, item);
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
  }
  for (const [key, element] of known) {
    if (keys.has(key)) continue;
    element.remove();
    known.delete(key);
  }
}

/** Put a text on the clipboard. A page that came over plain HTTP from another machine has no `navigator.clipboard`. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = h("textarea", { class: "visually-hidden", value: text, "aria-hidden": "true" });
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  if (!isCopied) throw new Error("this browser copies only from pages over HTTPS");
}

/** A canvas as large as its element in the screen's own pixels; true if its size has changed. */
export function fit(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = Math.round(canvas.clientWidth * scale);
  const height = Math.round(canvas.clientHeight * scale);
  if (canvas.width === width && canvas.height === height) return false;
  canvas.width = width;
  canvas.height = height;
  return true;
}

let colours = null;
const watchers = [];

/** The page's colours by the names of its style sheet, for canvases. */
export function palette() {
  if (colours) return colours;
  const style = getComputedStyle(document.documentElement);
  const names = ["panel", "line", "ink", "dim", "prefill", "decode", "cached", "accepted", "rejected", "preempted"];
  names.push("finished", "discarded", "own", "free", "held", "shared", "host", "disk", "budget");
  return (colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()])));
}

export function onColours(changed) {
  watchers.push(changed);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colours = null;
  for (const changed of watchers) changed();
});

export const wantsStillness = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
