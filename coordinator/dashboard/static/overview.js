// The overview: key figures, charts and tables of the chosen run. Every number comes from state.js unchanged.

import * as charts from "./charts.js";
import { byId, bytes, centerColour, el, percent, seconds, setText } from "./dom.js";
import { countStates, deviceOrder, lastRound, runNamed, state } from "./state.js";

const SHOWN = 60; // devices in the table; a search by name finds the others
export const chosen = { run: null, byHand: false };

export function chooseRun() { // the running one, unless the user chose another
  const now = state.now.exchange?.run;
  if (!chosen.byHand) chosen.run = (runNamed(now) ?? (state.facts.done ? state.runs[0] : state.runs.at(-1)))?.run ?? null;
  if (!runNamed(chosen.run)) chosen.run = state.runs[0]?.run ?? null;
  return runNamed(chosen.run);
}

export function tabs(pick) {
  const node = byId("runs");
  node.hidden = state.runs.length < 2;
  if (node.dataset.runs === state.runs.map((run) => run.run).join() && node.dataset.chosen === chosen.run) return;
  node.dataset.runs = state.runs.map((run) => run.run).join();
  node.dataset.chosen = chosen.run;
  const focused = document.activeElement?.dataset?.run;
  node.replaceChildren(...state.runs.map((run) =>
    el("button", { type: "button", "data-run": run.run, "aria-pressed": String(run.run === chosen.run), onclick: () => { Object.assign(chosen, { run: run.run, byHand: true }); pick(); } }, run.run)));
  node.querySelector(`[data-run="${CSS.escape(focused ?? "")}"]`)?.focus();
}

const WORDS = { asking: "running", serving: "serving centers", compiling: "compiling" };

// Between two exchanges these phases last moments; they are shown only when they last LONG_MS.
const PASSING = ["aggregating", "waiting for devices"], LONG_MS = 1500;
let steadyWords = "", passingSince = 0;

function holdPhase(words) {
  if (!PASSING.includes(words) || !steadyWords) passingSince = 0;
  else if (words !== steadyWords) {
    passingSince ||= performance.now();
    if (performance.now() - passingSince < LONG_MS) {
      setTimeout(header, LONG_MS);
      return steadyWords;
    }
  }
  steadyWords = words;
  return words;
}

export function header() {
  const { phase, paused, exchange } = state.now;
  setText("federation", state.facts.federation ?? "fedcenters");
  document.title = `${state.facts.federation ?? "fedcenters"} · fedcenters`;
  const pill = byId("phase");
  const words = holdPhase(!state.alive ? "not connected" : phase === "paused" ? "paused" : paused ? "pausing after this exchange" : WORDS[phase] ?? phase);
  setText("phase", words);
  pill.className = `pill ${!state.alive || phase === "stopped" ? "gone" : paused ? "paused" : "live"}`;
  setText("doing", exchange ? `${exchange.run}, round ${exchange.round}` : state.facts.done ? "all runs are done" : "");
}

export function tiles(run, map) {
  const line = lastRound(run);
  const going = state.now.exchange?.run === run?.run ? state.now.exchange?.round : null;
  setText("t-round", run ? `${Math.max(line.round, going ?? 0)} / ${run.of}` : state.now.exchange ? `${state.now.exchange.round}` : "–");
  setText("t-round-more", run ? `${run.run} (${run.method}), ${line.round} done` : "");
  setText("t-accuracy", percent(line?.accuracy.micro));
  byId("t-accuracy").dataset.value = line?.accuracy.micro ?? "";
  setText("t-accuracy-more", line ? `macro ${percent(line.accuracy.macro)}, F1 ${percent(line.f1.micro)}` : "");
  setText("t-devices", String(state.fleet.ids.length));
  setText("t-devices-more", `${state.now.connected} connected`);
  const k = line?.per_center.length;
  setText("t-centers", k === undefined ? "–" : `${k}`);
  const apart = map?.silhouette;
  setText("t-centers-more", k > 1 ? `silhouette ${apart == null ? "–" : apart.toFixed(3)}` : k === 1 ? "one model for all" : "");
  byId("t-centers-more").dataset.value = apart ?? "";
  const traffic = state.now.bytes ?? { down: 0, up: 0 };
  setText("t-bytes", bytes(traffic.down + traffic.up));
  setText("t-bytes-more", `${bytes(traffic.down)} down, ${bytes(traffic.up)} up`);
}

export function fleetWords(canvas) {
  const found = countStates();
  const words = state.states.map((name, i) => [name, found[i]]);
  byId("fleet-legend").replaceChildren(...words.map(([name, n]) =>
    el("li", { class: n ? "some" : "", "data-state": name }, el("span", { class: "key", css: { background: `var(--${name})` } }), `${name} `, el("b", {}, String(n)))));
  canvas.setAttribute("aria-label", `${state.fleet.ids.length} devices: ${words.filter(([, n]) => n).map(([name, n]) => `${n} ${name}`).join(", ") || "none"}. The table of devices has each.`);
  byId("fleet-empty").hidden = state.fleet.ids.length > 0;
  const exchange = state.now.exchange;
  byId("exchange").hidden = !exchange;
  if (!exchange) return;
  setText("exchange-words", `Round ${exchange.round}, exchange ${exchange.exchange}: ${exchange.answered} of ${exchange.wanted} answers, quorum ${exchange.quorum}, ${Math.round(exchange.left_s)} s left`);
  byId("exchange-bar").max = exchange.wanted || 1;
  byId("exchange-bar").value = exchange.answered;
}

export function drawCurves(run) {
  const all = run?.lines ?? [];
  const k = lastRound(run)?.per_center.length ?? 0;
  const names = Array.from({ length: Math.min(k, 40) }, (_, i) => i);
  const of = (key) => names.map((i) => ({ name: `center ${i}`, short: `c${i}`, colour: centerColour(i), values: all.map((line) => [line.round, line[key]?.[i] ?? null]) }));
  const overall = { name: "all devices", short: "all", colour: "var(--all)", dashed: true, values: all.map((line) => [line.round, line.accuracy.micro]) };
  charts.lines(byId("accuracy"), { series: k > 1 ? [...of("per_center"), overall] : [overall], label: "Accuracy per center over rounds", format: percent, axis: (y) => `${Math.round(100 * y)} %`, to: 1, empty: "The first round is not over yet." });
  charts.lines(byId("loss"), { series: of("loss_per_center"), label: "Loss per center over rounds", format: (y) => y.toFixed(y < 1 ? 3 : 2), axis: (y) => String(+y.toFixed(3)), from: 0, empty: all.length ? "This run's devices did not report a loss." : "The first round is not over yet." });
  const traffic = (key, name, colour) => ({ name, colour, values: all.map((line) => [line.round, line.bytes[key]]) });
  charts.bars(byId("bytes"), { stacks: [traffic("down", "down", "var(--training)"), traffic("up", "up", "var(--uploading)")], label: "Bytes per round", format: bytes, axis: (n) => (n ? bytes(n).replace(/\.0 /, " ") : "0"), empty: "The first round is not over yet." });
  charts.bars(byId("seconds"), { stacks: [{ name: "time", colour: "var(--answered)", values: all.map((line) => [line.round, line.seconds]) }], label: "Time per round", format: seconds, axis: (s) => (s < 120 ? `${+s.toFixed(2)} s` : seconds(s)), empty: "The first round is not over yet." });
}

export function roundTable(run) {
  const table = byId("rounds");
  const k = Math.min(lastRound(run)?.per_center.length ?? 0, 12);
  const wide = ["Round", "Accuracy", ...Array.from({ length: k > 1 ? k : 0 }, (_, i) => `Center ${i}`), "Moved", "Down", "Up", "Time"];
  table.tHead.replaceChildren(el("tr", {}, ...wide.map((word, i) => el("th", { scope: "col", class: i ? "number" : "" }, word))));
  const cell = (value, text) => el("td", { class: "number", "data-value": value ?? "" }, text);
  table.tBodies[0].replaceChildren(...(run?.lines ?? []).slice(-100).reverse().map((line) => el("tr", { "data-round": line.round },
    el("td", {}, String(line.round)), cell(line.accuracy.micro, percent(line.accuracy.micro)),
    ...(k > 1 ? line.per_center.slice(0, k).map((x) => cell(x, percent(x))) : []),
    cell(line.moved, String(line.moved)), cell(line.bytes.down, bytes(line.bytes.down)), cell(line.bytes.up, bytes(line.bytes.up)), cell(line.seconds, seconds(line.seconds)))));
}

function emptyRow() {
  return el("tr", {}, el("td", {}, el("a", {})), el("td", {}), el("td", {}), el("td", { class: "number" }), el("td", {}));
}

function fillRow(row, id, name, center, samples, engine) { // only a row that changed: the table is redrawn twice a second
  const now = [id, name, center, samples, engine].join("\n");
  if (row.dataset.now === now) return;
  Object.assign(row.dataset, { now, device: id });
  const [link, does, at, count, runs] = [...row.cells];
  link.firstChild.textContent = id;
  link.firstChild.setAttribute("href", `#device/${encodeURIComponent(id)}`);
  does.replaceChildren(el("span", { class: "key", css: { background: `var(--${name})` } }), name);
  at.replaceChildren(...(center < 0 ? ["–"] : [el("span", { class: "key dot", css: { background: centerColour(center) } }), String(center)]));
  count.textContent = String(samples);
  runs.textContent = engine;
}

export function deviceTable(run) {
  const select = byId("only");
  if (select.options.length === 1) select.append(...state.states.map((name) => el("option", { value: name }, name)));
  const find = byId("find").value.trim().toLowerCase(), only = state.states.indexOf(select.value);
  const { ids, state: codes, samples, engine } = state.fleet;
  const rows = byId("devices").tBodies[0].rows;
  let matches = 0;
  for (const i of deviceOrder()) {
    if ((only >= 0 && codes[i] !== only) || (find && !ids[i].toLowerCase().includes(find))) continue;
    matches += 1;
    if (matches > SHOWN) continue;
    const row = rows[matches - 1] ?? byId("devices").tBodies[0].appendChild(emptyRow());
    fillRow(row, ids[i], state.states[codes[i]], run?.centers[i] ?? -1, samples[i], engine[i]);
  }
  while (rows.length > Math.min(matches, SHOWN)) rows[rows.length - 1].remove();
  setText("devices-more", matches > SHOWN ? `${SHOWN} of ${matches} devices; type a part of a name to find others.` : "");
}

const EVENT_TEXTS = {
  start: (e) => `the coordinator leads ${e.federation}, epoch ${e.epoch}`,
  program: (e) => `training program of ${e.model} compiled, ${seconds(e.seconds)}`,
  joined: (e) => (e.devices > 1 ? `${e.devices} devices joined, ${e.device} last` : `${e.device} joined: ${e.engine}, ${e.n} samples`),
  "run-done": (e) => `${e.run} is done after ${e.rounds} rounds`,
  bundle: () => "the centers are published",
  served: (e) => `${e.device} took center ${e.center} as ${e.format}`,
  done: (e) => `all done in ${seconds(e.seconds)}`,
  error: (e) => `error: ${e.message}`,
};

export function eventList() {
  const node = byId("events");
  node.replaceChildren(...state.events.slice(-100).reverse().map((event) =>
    el("li", { class: event.event === "error" ? "bad" : "" }, EVENT_TEXTS[event.event]?.(event) ?? event.event)));
  if (!node.children.length) node.append(el("li", { class: "quiet" }, "Nothing yet."));
}
