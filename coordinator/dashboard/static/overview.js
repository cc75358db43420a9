// The overview: key figures, charts and tables of the chosen run. Every number comes from state.js unchanged.

import * as charts from "./charts.js";
import { fetchedCenter } from "./devices.js";
import { byId, bytes, centerColour, duration, el, lossInWords, moment, onAxis, percent, percentOnAxis, seconds, setText, shortened } from "./dom.js";
import { bestSoFar, countReady, hidesCenters, isDone, isTested, lastRound, lastTest, place, placeTested, placeWords, runNamed, state, timing, unit } from "./state.js";

const REFERENCE = "fedavg"; // the method that learns one model for all
const HUES = ["var(--training)", "var(--uploading)", "var(--late)", "var(--answered)", "var(--c3)", "var(--c5)"];
const END_PX = 110, LETTER_PX = 6.6; // for the names at the ends of curves: their room, and a letter
export const chosen = { run: null, byHand: false };

// The running one, unless the user chose another. Between two runs the newest; once all are trained the one whose centers
// are published, else the best.
export function chooseRun() {
  const { served } = state.facts;
  const trained = isDone() || served || ["exporting", "serving"].includes(state.now.phase);
  const automatic = runNamed(state.now.exchange?.run) ?? (trained ? runNamed(served) ?? bestSoFar()?.run : state.runs.at(-1));
  if (!chosen.byHand) chosen.run = automatic?.run ?? null;
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
export const isOver = () => isDone() && !state.alive;

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

function reached() { // where a pause between two exchanges stands
  const run = state.runs.at(-1);
  return run ? `${run.run}, ${run.updates == null ? `after round ${lastRound(run).round} of ${run.of}` : `after ${run.updates} updates`}` : "before the first round";
}

export function header() {
  const { phase, paused, exchange } = state.now;
  setText("federation", state.facts.federation ?? "fedcenters");
  document.title = `${state.facts.federation ?? "fedcenters"} · fedcenters`;
  const pill = byId("phase");
  const words = isOver() ? "finished" : holdPhase(!state.alive ? "not connected" : ["paused", "no broker"].includes(phase) ? phase : paused ? "pausing after this exchange" : WORDS[phase] ?? phase);
  setText("phase", words);
  pill.className = `pill ${isOver() ? "done" : !state.alive || phase === "stopped" || phase === "no broker" ? "gone" : paused ? "paused" : "live"}`;
  const waits = phase === "waiting for devices" && !state.runs.length && countReady() < state.facts.needs && state.facts.needs;
  setText("doing", waits ? `${countReady()} of ${waits} devices` : exchange ? `${exchange.run}, ${exchange.updates ? "without rounds" : `round ${exchange.round}`}` : isDone() ? "all runs are done" : phase === "paused" ? reached() : "");
}

const names = (run) => (run.run === run.method ? run.run : `${run.run} (${run.method})`);

// Scores beside accuracy: of targets that are no classes, of tokens, and the user's own.
const otherScores = (metrics) => Object.entries(metrics ?? {}).filter(([, value]) => value !== null).map(([name, value]) => `${name.replaceAll("_", " ")} ${Number(value.toPrecision(4))}`);

// Nothing where the loss is the squared error among the other scores.
function lossOfOnesOwn(loss, metrics) {
  const [shown, squared] = [loss?.micro, metrics?.squared_error].map((value) => (value == null ? null : Number(value.toPrecision(4))));
  return shown === null || shown === squared ? [] : [`loss ${shown}`];
}

function scores(run, { accuracy, centers, f1_of_devices, f1_pooled, loss, metrics }) {
  const others = otherScores(metrics);
  if (accuracy.micro === null && (others.length || loss)) return [names(run), ...lossOfOnesOwn(loss, metrics), ...others].join("; ");
  const alone = centers?.accuracy.micro != null ? ` as served; the centers alone ${percent(centers.accuracy.micro)}` : "";
  const pooled = f1_pooled === null ? "" : `, pooled ${percent(f1_pooled)}`;
  return `${names(run)}${alone}; macro ${percent(accuracy.macro)}, F1 of devices ${percent(f1_of_devices.weighted)}${pooled}${others.map((text) => `, ${text}`).join("")}`;
}

function showTime() {
  const { elapsed, off, left } = timing();
  const spent = elapsed === null ? "" : `${duration(elapsed)}${isDone() ? " in all" : " so far"}`;
  const rest = left ? `about ${duration(left)} left${state.now.phase === "paused" ? " once resumed" : ""}` : "";
  setText("t-round-more", [spent, off >= 1 && spent ? `without ${duration(off)} off` : "", rest].filter(Boolean).join(", "));
}

export function tiles(run, map) {
  const line = lastTest(run), mine = state.now.exchange?.run === run?.run ? state.now.exchange : null;
  const updates = run?.updates ?? (mine?.updates ? 0 : null), going = mine?.round;
  setText("h-round", updates === null ? "Round" : "Updates");
  if (updates !== null) setText("t-round", String(updates + (mine?.updates?.counted ?? 0)));
  else setText("t-round", run ? `${Math.max(lastRound(run).round, going ?? 0)} / ${run.of}` : state.now.exchange ? `${state.now.exchange.round}` : "–");
  showTime();
  wordsOf(updates !== null);
  setText("t-accuracy", percent(line?.accuracy.micro));
  byId("t-accuracy").dataset.value = line?.accuracy.micro ?? "";
  setText("t-accuracy-more", line ? scores(run, line) : "");
  const fetched = state.fleet.ids.filter((_, i) => fetchedCenter(i, run) >= 0).length;
  setText("t-devices", String(state.fleet.ids.length));
  const unseen = state.now.connected > state.fleet.ids.length && `the first ${state.fleet.ids.length} are shown`; // the view has a limit
  setText("t-devices-more", [isOver() ? "" : `${state.now.connected} connected`, unseen, hidesCenters(lastRound(run)) ? "" : `${run?.centers.filter((k) => k >= 0).length ?? 0} with a center`, fetched ? `${fetched} fetched one` : ""].filter(Boolean).join(", "));
  const k = line?.per_center.length;
  setText("t-centers", k === undefined ? "–" : `${k}`);
  const apart = map?.silhouette;
  const mapped = run?.lines.findLast(({ round }) => round === map?.round); // a map comes later than its round
  const since = !mapped || mapped === lastRound(run) ? "" : ` ${placeWords(run, place(run, mapped))}`;
  setText("t-centers-more", k === 1 ? "one model for all" : !apart ? "" : `silhouette ${apart.toFixed(3)}${since}`);
  byId("t-centers-more").dataset.value = apart ?? "";
  const all = state.now.bytes ?? { down: 0, up: 0 };
  const [down, up] = ["down", "up"].map((way) => state.runs.reduce((sum, one) => sum + one.sent[way], 0)); // as the demo's table and its report count
  setText("t-bytes", state.runs.length ? bytes(down + up) : "–");
  const rounds = state.runs.length ? `${bytes(down)} down, ${bytes(up)} up; ` : "";
  setText("t-bytes-more", `${rounds}in all ${bytes(all.down)} down, ${bytes(all.up)} up${state.now.since_ms ? ` since ${moment(state.now.since_ms)}` : ""}`);
}

// What the page calls the parts of a run.
function wordsOf(withoutRounds) {
  const each = withoutRounds ? "record" : "round";
  setText("h-assignment", withoutRounds ? "Assignment over updates" : "Assignment over rounds");
  setText("h-bytes", `Bytes per ${each}`);
  setText("h-seconds", `Time per ${each}`);
  setText("h-rounds", withoutRounds ? "Updates" : "Rounds");
  setText("h-sent", withoutRounds ? "Sent in the run" : "Sent in the rounds");
}

// What a run on sums hides from the coordinator, and the newest round's sums that were not made.
export function secure(run) {
  const { mode, sees, failed = [] } = lastRound(run)?.secure ?? {};
  byId("secure").hidden = !mode;
  if (!mode) return;
  const missing = failed.length ? ` No sum in round ${lastRound(run).round}: ${failed.join("; ")}.` : "";
  setText("secure", `secure = ${mode}: the coordinator sees ${sees}.${missing}`);
}

export function exchange() {
  const { exchange } = state.now;
  byId("exchange").hidden = !exchange;
  if (!exchange) return;
  const { updates } = exchange;
  if (updates) {
    const test = updates.test ? `; test: ${updates.test.answered} of ${updates.test.wanted} answers` : "";
    setText("exchange-words", `${exchange.asked} devices at work (of at most ${updates.concurrency}), ${updates.counted} of ${exchange.wanted} updates until the next record, versions of the centers: ${updates.versions.join(", ")}${test}`);
  } else setText("exchange-words", `Round ${exchange.round}, exchange ${exchange.exchange}: ${exchange.answered} of ${exchange.wanted} answers, quorum ${exchange.quorum}, ${Math.round(exchange.left_s)} s left`);
  byId("exchange-bar").max = exchange.wanted || 1;
  byId("exchange-bar").value = updates ? updates.counted : exchange.answered;
}

// Every run on one axis: the reference dashed, the best so far thick and with a ring at its highest round.
export function drawMethods() {
  const best = bestSoFar();
  const most = Math.max(END_PX, Math.min(2 * END_PX, 0.3 * byId("methods").clientWidth));
  const ends = state.runs.map((run) => `${shortened(run.run, Math.floor(most / LETTER_PX) - 9)} ${percent(lastTest(run).accuracy.micro)}`);
  const series = state.runs.map((run, i) => {
    const isBest = best?.run === run, reference = run.method === REFERENCE;
    return {
      name: names(run), short: ends[i], dashed: reference && !isBest, thick: isBest,
      colour: isBest ? "var(--accent)" : reference ? "var(--all)" : HUES[i % HUES.length],
      mark: isBest ? [best.at, `best so far ${percent(best.accuracy)}`] : null,
      values: run.lines.filter(isTested).map((line) => [placeTested(run, line), line.accuracy.micro]),
    };
  });
  charts.lines(byId("methods"), { series, unit: unit(state.runs[0]), label: `Accuracy of every run over ${over(state.runs[0])}`, format: percent, axis: percentOnAxis, to: 1, right: Math.max(END_PX, ...ends.map((end) => 15 + LETTER_PX * end.length)), empty: notYet(state.runs[0]) });
  setText("verdict", best ? verdict(best) : "");
}

function notYet(run) {
  if (run?.lines.some(isTested)) return "The tests of this run tell no accuracy.";
  return run?.lines.length || unit(run) !== "round" ? "No test is over yet." : "The first round is not over yet.";
}
const over = (run) => (unit(run) === "round" ? "rounds" : "updates");

function verdict({ run, at, accuracy }) {
  const reference = state.runs.find((one) => one.method === REFERENCE);
  const other = lastTest(reference)?.accuracy.micro, own = lastTest(run).accuracy.micro;
  if (!reference || reference === run || other == null || own == null) return `best so far: ${run.run}, ${percent(accuracy)} ${placeWords(run, at)}`;
  const difference = 100 * (own - other);
  return `${run.run} is ${Math.abs(difference).toFixed(1)} points ${difference < 0 ? "below" : "above"} ${reference.run}`;
}

export function drawCurves(run) {
  const all = run?.lines ?? [], tested = all.filter(isTested), axis = unit(run);
  const k = lastRound(run)?.per_center.length ?? 0;
  const centers = Array.from({ length: Math.min(k, 40) }, (_, i) => i);
  const of = (key) => centers.map((i) => ({ name: `center ${i}`, short: `c${i}`, colour: centerColour(i), values: tested.map((line) => [placeTested(run, line), line[key]?.[i] ?? null]) }));
  const overall = { name: "all devices", short: "all", colour: "var(--all)", dashed: true, values: tested.map((line) => [placeTested(run, line), line.accuracy.micro]) };
  charts.lines(byId("accuracy"), { series: k > 1 ? [...of("per_center"), overall] : [overall], unit: axis, label: `Accuracy per center over ${over(run)}`, format: percent, axis: percentOnAxis, to: 1, empty: notYet(run) });
  charts.lines(byId("loss"), { series: of("loss_per_center"), unit: axis, label: `Loss per center over ${over(run)}`, format: lossInWords, axis: onAxis, from: 0, empty: tested.length ? "This run's devices did not report a loss." : notYet(run) });
  const traffic = (key, name, colour) => ({ name, colour, values: all.map((line) => [place(run, line), line.bytes[key]]) });
  charts.bars(byId("bytes"), { stacks: [traffic("down", "down", "var(--training)"), traffic("up", "up", "var(--uploading)")], unit: axis, label: axis === "round" ? "Bytes per round" : "Bytes per record", format: bytes, axis: (n) => (n ? bytes(n).replace(/\.0 /, " ") : "0"), empty: notYet(run) });
  charts.bars(byId("seconds"), { stacks: [{ name: "time", colour: "var(--answered)", values: all.map((line) => [place(run, line), line.seconds]) }], unit: axis, label: axis === "round" ? "Time per round" : "Time per record", format: seconds, axis: (s, step) => (s < 120 ? `${onAxis(s, step)} s` : seconds(s)), empty: notYet(run) });
}

export function roundTable(run) {
  const table = byId("rounds"), all = lastRound(run)?.per_center.length ?? 0;
  const k = Math.min(all, 12);
  setText("rounds-more", k < all ? `centers 0 to ${k - 1} of ${all}` : "");
  const wide = [unit(run) === "round" ? "Round" : "Updates", "Accuracy", ...Array.from({ length: k > 1 ? k : 0 }, (_, i) => `Center ${i}`), "Moved", "Down", "Up", "Time"];
  table.tHead.replaceChildren(el("tr", {}, ...wide.map((word, i) => el("th", { scope: "col", class: i ? "number" : "" }, word))));
  const cell = (value, text) => el("td", { class: "number", "data-value": value ?? "" }, text);
  table.tBodies[0].replaceChildren(...(run?.lines ?? []).slice(-100).reverse().map((line) => el("tr", { "data-round": line.round },
    el("td", {}, String(place(run, line))), cell(line.accuracy.micro, percent(line.accuracy.micro)),
    ...(k > 1 ? line.per_center.slice(0, k).map((x) => cell(x, percent(x))) : []),
    cell(line.moved, hidesCenters(line) ? "–" : String(line.moved)), cell(line.bytes.down, bytes(line.bytes.down)), cell(line.bytes.up, bytes(line.bytes.up)), cell(line.seconds, seconds(line.seconds)))));
}

const withoutRounds = (name) => runNamed(name)?.updates != null;

const EVENT_TEXTS = {
  start: (e) => `the coordinator leads ${e.federation}, epoch ${e.epoch}`,
  program: (e) => `training program of ${e.model} compiled, ${seconds(e.seconds)}`,
  joined: (e) => (e.devices > 1 ? `${e.devices} devices are connected, ${e.device} last` : `${e.device} ${e.n ? `joined: ${e.engine}, ${e.n} samples` : `is connected: ${e.engine}; it is not in the training`}`),
  offers: (e) => `${e.device} offers ${e.n} samples for training`,
  "let-in": (e) => `${e.device} takes part ${withoutRounds(e.run) ? "from now on in" : `from round ${e.round} of`} ${e.run}`,
  "left-out": (e) => `${e.device} is left out: ${e.why}`,
  revoked: (e) => `${e.device} was revoked, and takes part no more`,
  "run-done": (e) => `${e.run} is done${withoutRounds(e.run) ? ` after ${runNamed(e.run).updates} updates` : ` after ${e.rounds} rounds`}`,
  bundle: () => "the centers are published",
  served: (e) => `${e.device} took center ${e.center} as ${e.format}`,
  done: (e) => `all done in ${duration(e.seconds)}${state.facts.off ? ", counted from the last start" : ""}`,
  refused: (e) => `${e.run}${withoutRounds(e.run) ? "" : `, round ${e.round}`}: ${e.count > 1 ? `${e.count} answers` : `the answer of ${e.device}`} did not count (${e.reason})`,
  error: (e) => e.message,
};
const SEVERITY = { error: "error", refused: "warning", "left-out": "warning", revoked: "warning" };

export function eventList() {
  const node = byId("events");
  node.replaceChildren(...state.events.slice(-100).reverse().map((event) => {
    const severity = SEVERITY[event.event] ?? "info", at = event.unix_ms && new Date(event.unix_ms);
    return el("li", { "data-severity": severity },
      el("time", at ? { datetime: at.toISOString(), title: at.toLocaleString() } : {}, at ? at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false }) : ""),
      el("span", {}, severity === "info" ? null : el("b", {}, `${severity} `), EVENT_TEXTS[event.event]?.(event) ?? event.event));
  }));
  if (!node.children.length) node.append(el("li", { class: "quiet" }, "Nothing yet."));
}
