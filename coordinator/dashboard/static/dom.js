// DOM elements from plain values. Text is inserted as text nodes; no markup is parsed anywhere on the page.

const SVG = "http://www.w3.org/2000/svg";
export const byId = (id) => document.getElementById(id);

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "css") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
export const el = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => build(document.createElementNS(SVG, tag), attributes, children);

export function setText(id, text) {
  const node = byId(id);
  if (node.textContent !== text) node.textContent = text;
}

export const centerColour = (k) => (k === null || k === undefined || k < 0 ? "var(--no-center)" : `var(--c${k % 8})`);
export const onCenter = (k) => (k === null || k === undefined || k < 0 ? "var(--on-no-center)" : `var(--on${k % 8})`); // text on it
let sheet = null;
const colours = new Map();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => colours.clear());
export function cssColour(variable) { // the value of "var(--c0)", for a canvas
  if (!colours.has(variable)) {
    sheet ??= getComputedStyle(document.documentElement);
    colours.set(variable, sheet.getPropertyValue(variable.slice(4, -1)).trim());
  }
  return colours.get(variable);
}

export function percent(x) { // a tie is rounded to the even digit, as in the lines that the coordinator prints
  if (x === null || x === undefined) return "–";
  const scaled = 100 * x;
  return `${(scaled % 1 === 0.25 ? scaled - 0.05 : scaled).toFixed(1)} %`;
}
export function onAxis(value, step) { // with the digits that the step has, so that equal steps look equal
  if (step < 1e-4 || step >= 1e6) return value ? (+value.toPrecision(4)).toExponential() : "0";
  let digits = 0;
  while (digits < 8 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6) digits += 1;
  return value.toFixed(digits);
}
export const percentOnAxis = (x, step) => `${onAxis(100 * x, 100 * step)} %`;
export const lossInWords = (y) => (y >= 1e6 ? y.toExponential(1) : y && y < 0.01 ? y.toPrecision(2) : y.toFixed(y < 1 ? 3 : 2));
export const seconds = (s) => (s < 10 ? `${s.toFixed(2)} s` : s < 120 ? `${s.toFixed(0)} s` : `${(s / 60).toFixed(1)} min`);
export function duration(exact) { // of a run, in words; rounded first, so that no part of it reaches 60
  const s = Math.round(exact), min = Math.round(exact / 60);
  if (s < 60) return `${s} s`;
  return s < 3600 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${Math.floor(min / 60)} h ${min % 60} min`;
}
export const ago = (s) => (s < 2 ? "now" : s < 90 ? `${Math.round(s)} s ago` : s < 5400 ? `${Math.round(s / 60)} min ago` : s < 172800 ? `${Math.round(s / 3600)} h ago` : `${Math.round(s / 86400)} days ago`);
export function moment(ms) { // the clock time, with the date on another day
  const at = new Date(ms);
  const day = at.toDateString() === new Date().toDateString() ? {} : { dateStyle: "short" };
  return at.toLocaleString([], { ...day, timeStyle: "short", hourCycle: "h23" });
}
// At most so many characters, with the end, which often tells a name from others.
export const shortened = (text, most) => (text.length > most ? `${text.slice(0, Math.ceil(most / 2) - 1)}…${text.slice(-Math.floor(most / 2))}` : text);
export function bytes(n) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (n >= size) return `${(n / size).toFixed(n >= 100 * size ? 0 : 1)} ${unit}`;
  return `${n} B`;
}

// Fit a canvas to its parent at the screen's resolution; -> its context and its size in CSS pixels.
export function fitCanvas(canvas) {
  const { width, height } = canvas.parentElement.getBoundingClientRect();
  const scale = Math.min(devicePixelRatio || 1, 2);
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

let tip = null;
export function showTip(text, x, y) {
  tip ??= document.body.appendChild(el("div", { class: "tip", "aria-hidden": "true" }));
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.min(x + 12, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.max(8, y - 32)}px`;
}

export async function ask({ title, words, yes, field, danger }) { // -> the field's text, true without a field, null when cancelled
  const dialog = byId("ask");
  setText("ask-title", title);
  setText("ask-words", words);
  byId("ask-field").hidden = !field;
  if (field) setText("ask-label", field);
  byId("ask-input").value = "";
  const button = byId("ask-yes");
  button.textContent = yes;
  button.className = danger ? "danger" : "primary";
  dialog.showModal();
  (field ? byId("ask-input") : byId("ask-no")).focus();
  return new Promise((done) => {
    const end = (value) => { dialog.close(); done(value); };
    byId("ask-form").onsubmit = (event) => { event.preventDefault(); end(field ? byId("ask-input").value.trim() : true); };
    byId("ask-no").onclick = () => end(null);
    dialog.oncancel = () => done(null);
  });
}
