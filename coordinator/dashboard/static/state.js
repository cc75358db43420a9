// The page's state: the server's snapshot with every later event applied. Draws nothing.

export const state = {
  now: { phase: "connecting", paused: false, connected: 0, exchange: null, bytes: { down: 0, up: 0 } },
  facts: {}, states: [], fleet: { ids: [], engine: [], samples: [], state: [] },
  runs: [], events: [], maps: {}, grids: {}, alive: false,
};

const handlers = {
  snapshot(data) { sorted = []; Object.assign(state, data); },
  now(data) { state.now = data; },
  facts(data) { state.facts = data; },
  fleet(data) {
    const fleet = state.fleet;
    for (const id of data.new ?? []) {
      fleet.ids.push(id); fleet.engine.push(""); fleet.samples.push(0); fleet.state.push(state.states.indexOf("away"));
    }
    for (const [at, engine, samples] of data.facts ?? []) { fleet.engine[at] = engine; fleet.samples[at] = samples; }
    for (const [code, which] of data.states ?? []) for (const at of which) fleet.state[at] = code;
  },
  round(data) {
    let run = state.runs.find((one) => one.run === data.run);
    if (!run) state.runs.push(run = { run: data.run, method: data.method, of: data.of, lines: [], centers: [] });
    run.lines.push(data.line);
    run.centers = data.centers;
  },
  event(data) {
    if (data.devices > 1 && state.events.at(-1)?.event === "joined") state.events.pop(); // the new line counts the old one's devices too
    state.events.push(data);
    if (state.events.length > 300) state.events.shift();
  },
  map() {},
};

export const applyEvent = (kind, data) => handlers[kind]?.(data);
export const runNamed = (name) => state.runs.find((run) => run.run === name);
export const lastRound = (run) => run?.lines.at(-1);
let sorted = [];
export const deviceOrder = () => { // device indices, sorted by name
  if (sorted.length !== state.fleet.ids.length) {
    const { ids } = state.fleet;
    sorted = ids.map((_, i) => i).sort((a, b) => (ids[a] < ids[b] ? -1 : 1));
  }
  return sorted;
};
export const countStates = () => {
  const found = state.states.map(() => 0);
  for (const code of state.fleet.state) found[code] += 1;
  return found;
};
