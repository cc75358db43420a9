// The fleet: a tile per device, coloured by its center, and the table of devices with its sortable columns.

import { ago, byId, centerColour, el, lossInWords, onCenter, percent, setText } from "./dom.js";
import { clock, countStates, state } from "./state.js";

const SHOWN = 60; // devices in the table; a search by name finds the others
export const MAX_TILES = 48; // a larger fleet is drawn on a canvas

const trainedAt = (i, run) => run?.centers[i] ?? -1;
// A device that no round assigned may have fetched one of the published centers; they are those of one run.
export const fetchedCenter = (i, run) => (trainedAt(i, run) < 0 && run && run.run === state.facts.served ? state.fleet.fetched[i] : -1);
export const centerOf = (i, run) => Math.max(trainedAt(i, run), fetchedCenter(i, run));
const centerWords = (i, run) => (centerOf(i, run) < 0 ? "no center" : `${fetchedCenter(i, run) < 0 ? "" : "fetched "}center ${centerOf(i, run)}`);

const COLUMNS = [ // [key, title, value of device i in a run, first click sorts upwards]
  ["device", "Device", (i) => state.fleet.ids[i], true],
  ["center", "Center", centerOf, true],
  ["accuracy", "Accuracy", (i, run) => run?.accuracy[i] ?? null, true],
  ["loss", "Loss", (i, run) => run?.loss[i] ?? null, false],
  ["state", "State", (i) => state.states[state.fleet.state[i]], true],
  ["heard", "Last seen", (i) => state.fleet.heard[i] || null, true],
  ["refusals", "Refused", (i) => state.fleet.refusals[i], false],
  ["samples", "Samples", (i) => state.fleet.samples[i], true],
  ["engine", "Engine", (i) => state.fleet.engine[i], true],
];
const NUMBERS = ["accuracy", "loss", "heard", "refusals", "samples"];
const sorting = { key: "accuracy", up: true };

let named = { ids: null, byName: [], rank: [] }; // kept, for a large fleet is drawn twice a second
function sortNames() {
  const { ids } = state.fleet;
  if (named.ids === ids && named.rank.length === ids.length) return named;
  const byName = ids.map((_, i) => i).sort((a, b) => (ids[a] < ids[b] ? -1 : 1));
  const rank = [];
  byName.forEach((i, at) => { rank[i] = at; });
  named = { ids, byName, rank };
  return named;
}

export function order(run, key = "device", up = true) { // device indices; a device without the value comes last
  const { byName, rank } = sortNames();
  if (key === "device") return up ? byName : byName.toReversed();
  const value = COLUMNS.find(([name]) => name === key)[2];
  const keys = rank.map((_, i) => value(i, run));
  const compare = (a, b) => (a === b ? 0 : a === null ? 1 : b === null ? -1 : (a < b) === up ? -1 : 1);
  return rank.map((_, i) => i).sort((a, b) => compare(keys[a], keys[b]) || rank[a] - rank[b]);
}

export const seen = (i) => (state.fleet.heard[i] ? `seen ${ago(clock() / 1000 - state.fleet.heard[i])}` : "");
const stateName = (i) => state.states[state.fleet.state[i]];
const link = (id) => `#device/${encodeURIComponent(id)}`;

export function words(i, run) { // one line about a device
  const facts = [centerWords(i, run), percent(run?.accuracy[i]), stateName(i), seen(i)];
  return `${state.fleet.ids[i]}: ${facts.filter((fact) => fact && fact !== "–").join(", ")}`;
}

export function tiles(run) {
  const n = state.fleet.ids.length;
  byId("tiles").hidden = n > MAX_TILES;
  byId("fleet-plot").hidden = n <= MAX_TILES;
  if (n > MAX_TILES) { byId("tiles").replaceChildren(); return; }
  const rows = byId("tiles").children;
  order(run).forEach((i, at) => {
    const row = rows[at] ?? byId("tiles").appendChild(el("li", {}, el("a", {}, el("b", {}), el("span", {}), el("small", {}))));
    const id = state.fleet.ids[i], center = centerOf(i, run), name = stateName(i);
    const tested = trainedAt(i, run) < 0 ? "" : ` · ${percent(run.accuracy[i])}`;
    const shown = [id, `${centerWords(i, run)}${tested}`, [name, seen(i)].filter(Boolean).join(" · ")];
    if (row.dataset.now === shown.join("\n")) return;
    row.dataset.now = shown.join("\n");
    const tile = row.firstChild;
    tile.setAttribute("href", link(id));
    tile.style.setProperty("background", centerColour(center));
    tile.style.setProperty("color", onCenter(center));
    [...tile.children].forEach((node, k) => { node.textContent = shown[k]; });
  });
  while (rows.length > n) rows[rows.length - 1].remove();
}

export function legend(canvas) {
  const found = countStates();
  const counts = state.states.map((name, i) => [name, found[i]]);
  byId("fleet-legend").replaceChildren(...counts.map(([name, n]) => el("li", { hidden: !n, "data-state": name }, `${name} `, el("b", {}, String(n)))));
  canvas.setAttribute("aria-label", `${state.fleet.ids.length} devices: ${counts.filter(([, n]) => n).map(([name, n]) => `${n} ${name}`).join(", ") || "none"}. The table of devices has each.`);
  byId("fleet-empty").hidden = state.fleet.ids.length > 0;
}

function emptyRow() {
  return el("tr", {}, ...COLUMNS.map(([key]) => el("td", { class: NUMBERS.includes(key) ? "number" : "" }, key === "device" ? el("a", {}) : null)));
}

function fillRow(row, i, run) { // only a row that changed: the table is redrawn twice a second
  const id = state.fleet.ids[i], center = centerOf(i, run), loss = run?.loss[i];
  const texts = [id, center < 0 ? "–" : fetchedCenter(i, run) < 0 ? String(center) : `${center}, fetched`, percent(run?.accuracy[i]), loss == null ? "–" : lossInWords(loss), stateName(i),
    seen(i).replace("seen ", "") || "–", String(state.fleet.refusals[i] || "–"), String(state.fleet.samples[i] || "–"), state.fleet.engine[i]];
  const now = texts.join("\n");
  if (row.dataset.now === now) return;
  Object.assign(row.dataset, { now, device: id });
  row.cells[0].firstChild.setAttribute("href", link(id));
  texts.forEach((text, k) => { (k ? row.cells[k] : row.cells[0].firstChild).textContent = text; });
  if (center >= 0) row.cells[1].prepend(el("span", { class: "key dot", css: { background: centerColour(center) } }));
  row.cells[4].prepend(el("span", { class: "key", css: { background: `var(--${texts[4]})` } }));
}

function heads(redraw) {
  const row = byId("devices").tHead.rows[0];
  if (!row.cells.length) {
    row.append(...COLUMNS.map(([key, title, , up]) => el("th", { scope: "col", class: NUMBERS.includes(key) ? "number" : "" },
      el("button", { type: "button", "data-key": key, onclick: () => { Object.assign(sorting, sorting.key === key ? { up: !sorting.up } : { key, up }); redraw(); } }, title))));
  }
  for (const cell of row.cells) {
    const { key } = cell.firstChild.dataset;
    if (key === sorting.key) cell.setAttribute("aria-sort", sorting.up ? "ascending" : "descending");
    else cell.removeAttribute("aria-sort");
  }
}

export function table(run, redraw) {
  heads(redraw);
  const select = byId("only");
  if (select.options.length === 1) select.append(...state.states.map((name) => el("option", { value: name }, name)));
  const find = byId("find").value.trim().toLowerCase(), only = state.states.indexOf(select.value);
  const { ids, state: codes } = state.fleet;
  const rows = byId("devices").tBodies[0].rows;
  let matches = 0;
  for (const i of order(run, sorting.key, sorting.up)) {
    if ((only >= 0 && codes[i] !== only) || (find && !ids[i].toLowerCase().includes(find))) continue;
    matches += 1;
    if (matches <= SHOWN) fillRow(rows[matches - 1] ?? byId("devices").tBodies[0].appendChild(emptyRow()), i, run);
  }
  while (rows.length > Math.min(matches, SHOWN)) rows[rows.length - 1].remove();
  setText("devices-more", matches > SHOWN ? `${SHOWN} of ${matches} devices; type a part of a name to find others.` : "");
}
