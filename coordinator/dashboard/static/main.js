// The page's entry point: applies the stream's events to state.js, and paints what they changed. One paint shows one state: it
// draws every part whose numbers have changed since it was drawn, and nothing is applied meanwhile.

import { Fleet, Map2D, drawGrid } from "./canvas.js";
import { heat } from "./charts.js";
import * as control from "./control.js";
import { byId, centerColour, el, setText } from "./dom.js";
import * as overview from "./overview.js";
import { showDevice, showEnded, showFiles, showJoin, shownDevice } from "./panels.js";
import { fetchJson, isLost, Refused, stream } from "./remote.js";
import * as devices from "./devices.js";
import { applyEvent, endStream, hidesCenters, isDone, lastError, place, state } from "./state.js";

const PAINT_MS = 200; // between two paints of what the stream brings; what a user does is painted in the next frame
const LEGEND = 16, HEAT = 24; // centers with a name beside the map, in the picture of their cosines
const TICK_MS = 1000; // between two readings of the clock, for elapsed times
const open = (id) => { location.hash = `#device/${encodeURIComponent(id)}`; };
const map = new Map2D(byId("map"), open), fleet = new Fleet(byId("fleet"), open);
const dirty = new Set();
let waits = 0, soon = 0, paintedMs = -Infinity, paintedRun = null, drawnMap = null;

function redraw(...parts) {
  for (const part of parts) dirty.add(part);
  waits ||= requestAnimationFrame(draw);
}

function redrawSoon(...parts) {
  for (const part of parts) dirty.add(part);
  soon ||= setTimeout(() => { soon = 0; redraw(); }, paintedMs + PAINT_MS - performance.now());
}

const ALL = ["head", "fleet", "run", "map", "grid", "events", "table"];
const PARTS = { snapshot: ALL, now: ["head", "fleet"], facts: ["head", "fleet", "table", "events"], fleet: ["head", "fleet", "table"], round: ALL, event: ["events"] };

function draw(time) {
  waits = 0;
  paintedMs = time;
  const run = overview.chooseRun();
  if (run?.run !== paintedRun) { // the user chose another, or a run began or ended
    paintedRun = run?.run;
    for (const part of ALL) dirty.add(part);
    fetchPictures();
  }
  overview.tabs(redraw);
  if (dirty.has("head")) { overview.header(); overview.tiles(run, state.maps[run?.run]); control.show(); }
  if (dirty.has("fleet")) drawFleet(run);
  if (dirty.has("run")) { showCharts(run); overview.secure(run); overview.drawMethods(); overview.drawCurves(run); overview.roundTable(run); }
  if (dirty.has("events")) overview.eventList();
  if (dirty.has("map")) drawMap(run);
  if (dirty.has("grid")) drawAssignment(run);
  if (dirty.has("table")) devices.table(run, redrawTable);
  dirty.clear();
}

function showCharts(run) { // there is nothing to draw before the first round
  for (const card of document.querySelectorAll("[data-rounds]")) card.hidden = !run;
  byId("events-card").classList.toggle("full", !run); // beside the rounds, which are not there yet
}

function drawFleet(run) {
  devices.legend(byId("fleet"));
  devices.tiles(run);
  overview.exchange();
  if (state.fleet.ids.length > devices.MAX_TILES) fleet.draw(state.fleet, devices.order(run), state.states, (i) => devices.centerOf(i, run), (i) => devices.words(i, run));
}

function drawMap(run) {
  const found = state.maps[run?.run];
  const secure = run?.lines.at(-1)?.secure;
  const missing = state.missing[run?.run];
  const before = run?.updates == null ? "The map appears after the first round." : "The map appears after the first updates.";
  const none = missing ? `No map ${run.updates == null ? "of" : "after"} ${pictureWords(run, missing.round)}: ${missing.why}.` : "The map is being loaded.";
  setText("map-empty", secure ? `No map: of this run the coordinator sees ${secure.sees}.` : run?.lines.length ? none : before);
  byId("map-empty").hidden = Boolean(found);
  byId("map-note").hidden = Boolean(secure);
  byId("cosine-card").hidden = !found || found.centers.length < 2; // one center has no cosine with another
  byId("map-plot").style.height = `${Math.min(420, 150 + 30 * Math.sqrt(found?.devices.length ?? state.fleet.ids.length))}px`;
  if (!found) { // what was drawn is of another run
    drawnMap = null;
    map.clear();
    setText("map-round", "");
    byId("map-legend").replaceChildren();
    byId("map").setAttribute("aria-label", "No map yet");
    return;
  }
  if (drawnMap === found) { map.frame(); return; }
  drawnMap = found;
  map.update(found);
  const spot = pictureWords(run, found.round);
  setText("map-round", `${found.run}, ${spot}`);
  const sizes = found.centers.map(() => 0);
  for (const k of found.assigned) if (k >= 0) sizes[k] += 1;
  const keys = sizes.slice(0, LEGEND).map((n, k) => el("span", {}, el("span", { class: "key dot", css: { background: centerColour(k) } }), `center ${k}: ${n}`));
  byId("map-legend").replaceChildren(...keys, sizes.length > LEGEND ? el("span", { class: "quiet" }, `and ${sizes.length - LEGEND} more centers`) : "");
  byId("map").setAttribute("aria-label", `Map of ${found.devices.length} devices, ${spot}: ${sizes.map((n, k) => `${n} at center ${k}`).join(", ")}`);
  const pairs = Math.min(HEAT, sizes.length);
  setText("cosine-more", pairs < sizes.length ? `centers 0 to ${pairs - 1} of ${sizes.length}` : "");
  heat(byId("cosine"), found.cosine.slice(0, pairs).map((row) => row.slice(0, pairs)), `Cosine of every pair of ${pairs} centers`);
}

function pictureWords(run, round) { // the round of a map; of a run without rounds how many updates there were
  const line = run.lines.findLast((one) => one.round === round);
  return run.updates == null ? `round ${round}` : `${line ? place(run, line) : "earlier"} updates`;
}

function drawAssignment(run) {
  const grid = state.grids[run?.run];
  const newest = run?.lines.at(-1), hidden = hidesCenters(newest);
  byId("assignment-empty").hidden = Boolean(grid?.rows.length) && !hidden;
  setText("assignment-empty", hidden ? `No assignment: of this run the coordinator sees ${newest.secure.sees}.` : `One column per ${run?.updates == null ? "round" : "record"}, one row per device.`);
  byId("assignment").hidden = hidden;
  if (hidden) { setText("assignment-more", ""); return; }
  const line = grid?.rows.length && run.lines.findLast(({ round }) => round === grid.first + grid.rows[0].length - 1);
  if (!line) return; // the picture may be ahead of the stream
  drawGrid(byId("assignment"), grid, run.of);
  setText("assignment-more", grid.rows.length < grid.of ? `${grid.rows.length} of ${grid.of} devices` : `${line.moved} moved ${run.updates == null ? "in round" : "with the last of"} ${place(run, line)}${run.updates == null ? "" : " updates"}`);
  byId("assignment").setAttribute("aria-label", `Centers of ${grid.rows.length} devices over ${grid.rows[0].length} ${run.updates == null ? "rounds" : "records"}; in the newest, ${line.sizes.map((n, k) => `${n} at center ${k}`).join(", ")}`);
}

// The grid, the map and a device's page are too large for the stream: they are fetched when they change, one request at a time.
let asking = false, again = false;
async function fetchPictures() {
  const run = overview.chooseRun();
  if (!run) return;
  if (asking) { again = true; return; }
  asking = true;
  try {
    const name = encodeURIComponent(run.run);
    const [grid, found] = await Promise.all([fetchJson(`api/grid?run=${name}`), fetchJson(`api/map?run=${name}`)]);
    state.grids[run.run] = grid;
    state.missing[run.run] = found.missing;
    if (found.map && found.map.round !== state.maps[run.run]?.round) state.maps[run.run] = found.map;
    redraw("grid", "map", "head");
    await refreshDevice();
  } catch (wrong) {
    if (!(wrong instanceof Refused) && !isLost(wrong)) throw wrong;
  } finally {
    asking = false;
    if (again) { again = false; fetchPictures(); }
  }
}

function onEvent(kind, data) {
  applyEvent(kind, data);
  if (kind === "snapshot") { state.alive = true; control.notice(""); showJoin().catch(() => {}); showFiles().catch(() => {}); }
  if (kind === "snapshot" || kind === "round" || kind === "map") fetchPictures();
  if (kind === "event" && data.event === "bundle") showFiles().catch(() => {});
  redrawSoon(...(PARTS[kind] ?? []));
}

async function followStream() {
  for (let wait = 500; ; wait = Math.min(8000, wait * 2)) {
    try {
      await stream((kind, data) => { wait = 500; onEvent(kind, data); });
    } catch (wrong) {
      if (wrong instanceof Refused && wrong.status === 401) {
        if ((await control.askToken("read", "Reading needs a token: the operator has it.")) === null) return;
        wait = 250;
        continue;
      }
      if (wrong instanceof Refused) control.notice(`The coordinator answers: ${wrong.message}.`);
    }
    const before = state.alive;
    endStream();
    const why = lastError();
    const ended = why || state.now.phase === "stopped" || state.facts.done;
    if (before) control.notice(why ? `The coordinator has ended with an error: ${why}` : ended ? "The coordinator has ended. This page shows its last state." : "The connection is lost; trying again.", { plain: isDone() && !why });
    if (before && ended) showEnded();
    redraw("head", "fleet");
    await new Promise((done) => setTimeout(done, wait));
  }
}

async function refreshDevice() { // the shown one, in its place
  if (!shownDevice()) return;
  const focused = byId("device").contains(document.activeElement), back = await showDevice(shownDevice());
  if (focused) back?.focus({ preventScroll: true });
}

async function route() {
  const id = shownDevice();
  byId("overview").hidden = Boolean(id);
  byId("device").hidden = !id;
  if (!id) { redraw(...ALL); return; }
  try {
    (await showDevice(id))?.focus();
    scrollTo(0, 0);
  } catch (wrong) {
    byId("device").replaceChildren(el("a", { href: "#" }, "← Overview"), el("p", { class: "empty" }, wrong instanceof Refused ? wrong.message : "The coordinator does not answer."));
  }
}

function redrawTable() {
  redraw("table");
}

function foldOnPhones() { // a narrow page begins with its sections folded; each opens with a tap
  const narrow = matchMedia("(max-width: 560px)");
  const fold = () => { for (const card of document.querySelectorAll("details[data-fold]")) card.open = !narrow.matches; };
  narrow.addEventListener("change", fold);
  fold();
  for (const card of document.querySelectorAll("details.card")) card.addEventListener("toggle", () => { map.frame(); redraw(...ALL); });
}

control.begin();
byId("find").oninput = byId("only").onchange = redrawTable;
foldOnPhones();
setInterval(() => { if (state.alive && !document.hidden) redraw("head", "fleet", "table"); }, TICK_MS);
addEventListener("hashchange", route);
new ResizeObserver(() => { map.frame(); redraw("fleet", "run", "map", "grid"); }).observe(byId("content"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawnMap = null; redraw(...ALL); });
if (shownDevice()) route();
followStream();
