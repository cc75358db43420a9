// The page's state: the server's snapshot with every later event applied. Draws nothing.

export const state = {
  now: { phase: "connecting", paused: false, connected: 0, exchange: null, bytes: { down: 0, up: 0 } },
  facts: {}, states: [], fleet: { ids: [], engine: [], samples: [], state: [], heard: [], refusals: [], fetched: [] },
  runs: [], events: [], maps: {}, missing: {}, grids: {}, alive: false,
};

let skew = null; // this machine's clock less the server's, ms
function readClock({ unix_ms }) {
  if (unix_ms) skew = Date.now() - unix_ms;
}
// The server's wall time in ms; once the stream has ended, that of its end.
export const clock = () => state.frozen ?? (skew === null ? null : Date.now() - skew);

const handlers = {
  snapshot(data) {
    if (data.facts.began !== state.facts.began) Object.assign(state, { maps: {}, missing: {}, grids: {} }); // another federation, or one begun anew
    Object.assign(state, data, { frozen: null });
    readClock(data.now);
  },
  now(data) { state.now = data; readClock(data); },
  facts(data) { state.facts = data; },
  fleet(data) {
    const { fleet } = state;
    for (const id of data.new ?? []) {
      fleet.ids.push(id);
      for (const [key, value] of Object.entries({ engine: "", samples: 0, state: state.states.indexOf("away"), heard: 0, refusals: 0, fetched: -1 })) fleet[key].push(value);
    }
    for (const [at, engine, samples] of data.facts ?? []) { fleet.engine[at] = engine; fleet.samples[at] = samples; }
    for (const [code, which] of data.states ?? []) for (const at of which) fleet.state[at] = code;
    for (const key of ["heard", "refusals", "fetched"]) for (const [at, value] of data[key] ?? []) fleet[key][at] = value;
  },
  round({ line, kept, ...newest }) {
    let run = runNamed(newest.run);
    if (!run) state.runs.push(run = { lines: [] });
    Object.assign(run, newest);
    run.lines.push(line);
    run.lines.splice(0, run.lines.length - kept); // as many as the server keeps, so that a page that stays open holds no more than a new one
  },
  event(data) {
    if (data.devices > 1 && state.events.at(-1)?.event === "joined") state.events.pop(); // the new line counts the old one's devices too
    state.events.push(data);
    if (state.events.length > 300) state.events.shift();
  },
  map() {},
};

export const applyEvent = (kind, data) => handlers[kind]?.(data);
export const endStream = () => { state.frozen = clock(); state.alive = false; };
export const runNamed = (name) => state.runs.find((run) => run.run === name);
export const lastRound = (run) => run?.lines.at(-1);
// Of a run without rounds a record has scores only where a test ended; so has each that `evaluate-every` leaves out.
export const isTested = (line) => line.accuracy.micro !== null || line.loss != null || Object.values(line.metrics ?? {}).some((value) => value !== null);
export const lastTest = (run) => run?.lines.findLast(isTested) ?? lastRound(run);
// Of some runs on masked sums the coordinator does not know which device has which center.
export const hidesCenters = (line) => Boolean(line?.secure) && !line.sizes.some(Boolean);
// A run without rounds counts updates; the place of a record on an axis, and the words for it.
export const unit = (run) => (run?.updates == null ? "round" : "updates");
export const place = (run, line) => (unit(run) === "round" ? line.round : line.updates ?? 0);
export const placeTested = (run, line) => (unit(run) === "round" ? line.round : line.tested ?? 0);
export const placeWords = (run, x) => (unit(run) === "round" ? `in round ${x}` : `after ${x} updates`);
// What ended the coordinator, if an error did; a later start forgets it.
export const lastError = () => state.events.findLast(({ event }) => ["start", "error"].includes(event))?.message?.replace(/\s*\n+\s*/g, "; ");
export const isDone = () => Boolean(state.facts.done);

// The seconds since the first start without those `off` in which the coordinator did not run, and the seconds that the missing rounds will take at the pace of each run's last five.
export function timing() {
  const { began, ended, off = 0, rounds = {} } = state.facts;
  const now = ended ?? clock();
  const elapsed = began && now ? (now - began - off) / 1000 : null;
  let left = 0, known = false, pace = null;
  for (const run of state.runs) {
    const recent = run.lines.slice(1).slice(-5).map((line) => line.seconds); // the first round also fetches the program
    if (recent.length) pace = recent.reduce((sum, s) => sum + s, 0) / recent.length;
    if (pace === null) continue;
    known = true;
    left += pace * (run.of - lastRound(run).round);
  }
  const waiting = Object.entries(rounds).filter(([name]) => !runNamed(name));
  for (const [, of] of waiting) left += (pace ?? 0) * of;
  return { elapsed, off: off / 1000, left: known && !isDone() ? left : null };
}

// The run with the highest accuracy so far, and where it has it: the round, or the updates.
export function bestSoFar() {
  return state.runs.reduce((best, run) => (run.best && !(best?.accuracy >= run.best.accuracy) ? { run, ...run.best } : best), null);
}

export const countReady = () => // devices that are here with samples
  state.fleet.ids.filter((_, i) => state.fleet.samples[i] > 0 && !["away", "sleeping"].includes(state.states[state.fleet.state[i]])).length;
export const countStates = () => {
  const found = state.states.map(() => 0);
  for (const code of state.fleet.state) found[code] += 1;
  return found;
};
