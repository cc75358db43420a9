// The golden run (PROTOCOL.md, section 8): does this browser's runtime compute what torch computes? Inputs are drawn from the
// program's seed, to the bit as edge_client/engines/golden_run.py draws them; losses and digests are compared with the program's.

import { arrayOf } from "./onnx.js";
import { Malformed } from "../protocol/errors.js";
import { Pcg64 } from "../protocol/random.js";
import { sizeOf } from "../protocol/tensors.js";

const POOL = 65_521;
const DIGEST = 8;
const [MOMENTUM, MU] = [0.5, 0.25];
const SHORT = 0.625; // of the batch, in the last step
const SPREAD = 24;
const FRESH = ["x", "y", "q", "noise"];
const SMALLEST = 1.1754943508222875e-38; // float32's least normal number
export const FAR = 1e9; // stands for what is not finite

/** POOL uniform numbers in [0, 1), read one after another and again from the first. */
class Numbers {
  constructor(seed) {
    this.pool = new Pcg64(seed).floats(POOL);
    this.at = 0;
  }

  /** `count` values of `Type`, each a form of the next number and its place. */
  fill(Type, count, form) {
    const found = new Type(count);
    for (let i = 0; i < count; i += 1) {
      found[i] = form(this.pool[this.at], i);
      this.at = this.at + 1 === POOL ? 0 : this.at + 1;
    }
    return found;
  }
}

/** -> {start, steps, signs}: what an update begins with, what each step reads, the signs of the digests by tensor. */
export function goldenInputs(program, golden, fixed) {
  const numbers = new Numbers(golden.seed);
  const ports = program.functions.step.inputs;
  const start = {};
  for (const port of ports) {
    if (!FRESH.includes(port.name)) start[port.name] = { data: startValue(port, numbers, golden, start), dims: port.shape };
  }
  const last = golden.losses.length - 1;
  const steps = golden.losses.map((_, k) => {
    const rows = k < last ? golden.batch : Math.max(1, Math.floor(SHORT * golden.batch));
    const width = fixed ? golden.batch : rows;
    const fresh = ports.filter((port) => FRESH.includes(port.name));
    return Object.fromEntries(fresh.map((port) => {
      const dims = [width, ...port.shape.slice(1)];
      return [port.name, { data: stepValue(port, numbers, program, golden, { rows, width, count: sizeOf(dims) }), dims }];
    }));
  });
  const signs = {};
  for (const { name, role } of program.schema.tensors) {
    const port = portOf(name, role);
    signs[port] = numbers.fill(Int8Array, start[port].data.length, (u) => (u < 0.5 ? -1 : 1));
  }
  return { start, steps, signs };
}

/** Train with `engine`, and give the largest relative difference; FAR for what is not finite, or a runtime that fails. */
export async function runGolden(engine, golden) {
  const { program } = engine;
  const { start, steps, signs } = goldenInputs(program, golden, engine.fixedBatch !== null);
  let losses;
  let end;
  try {
    const update = engine.update(start);
    losses = [];
    for (const fresh of steps) losses.push(await update.step(fresh));
    end = update.read();
  } catch (wrong) {
    if (wrong instanceof RangeError) throw wrong; // no memory
    console.warn("the golden run fails:", wrong.message);
    return FAR;
  }
  const weights = digest(program, "p", (port, i) => end[port][i] - start[port].data[i], signs);
  const buffers = digest(program, "b", (port, i) => end[port][i], signs);
  const off = Math.max(relativeDifference(losses, golden.losses), relativeDifference(weights, golden.weights), relativeDifference(buffers, golden.buffers));
  return off < FAR ? off : FAR; // NaN is not below
}

/** Malformed("no_engine") for a runtime that is `off` by too much. */
export function refusedRuntimeError(runtime, off, { tolerance }) {
  const detail = `${runtime} computes wrongly in this browser: ${off.toExponential(1)} from the program's golden run, `
    + `at most ${tolerance}; try another browser, or a newer one`;
  return new Malformed("no_engine", detail);
}

function digest(program, wanted, value, signs) {
  const sums = new Float64Array(DIGEST);
  let any = false;
  for (const { name, role } of program.schema.tensors) {
    if (role !== wanted) continue;
    any = true;
    const port = portOf(name, role);
    const root = Math.sqrt(signs[port].length);
    for (let i = 0; i < signs[port].length; i += 1) sums[i % DIGEST] += (value(port, i) * signs[port][i]) / root;
  }
  return any ? [...sums] : [];
}

function relativeDifference(got, wanted) {
  if (!wanted.length) return 0;
  return Math.hypot(...wanted.map((value, i) => got[i] - value)) / Math.max(Math.hypot(...wanted), SMALLEST);
}

const portOf = (name, role) => `${role === "p" ? "w" : "buffers"}/${name}`;

/** What an update begins with. Scalars draw nothing; an anchor stands beside its weight. */
function startValue({ name, dtype, shape }, numbers, { lr, pull }, start) {
  const Type = arrayOf(dtype);
  const scalars = { lr, momentum: MOMENTUM, mu: MU };
  if (Object.hasOwn(scalars, name)) return Type.of(scalars[name]);
  const [kind] = name.split("/", 1);
  const draw = (form) => numbers.fill(Type, sizeOf(shape), form);
  if (kind === "w" && shape.length > 1) {
    const width = Math.sqrt(SPREAD / Math.max(1, sizeOf(shape.slice(1))));
    return draw((u) => (u - 0.5) * width);
  }
  if (kind === "w") return draw((u) => 0.5 + 0.5 * (u - 0.5));
  if (kind === "buffers") return draw((u) => 0.5 + u);
  if (kind === "anchor") {
    const weight = start[`w${name.slice(kind.length)}`].data;
    return draw((u, i) => weight[i] + 16 * pull * (u - 0.5));
  }
  return draw((u) => 4 * pull * (u - 0.5));
}

/** What a step reads: `rows` of `width` weigh something. */
function stepValue({ name, dtype }, numbers, program, { tokens }, { rows, width, count }) {
  const Type = arrayOf(dtype);
  if (name === "y" && program.loss === "cross-entropy") {
    const y = new Type(count);
    numbers.fill(Uint32Array, width, (u) => Math.floor(u * program.classes)).forEach((label, row) => {
      y[row * program.classes + label] = 1;
    });
    return y;
  }
  const forms = {
    x: tokens ? (u) => Math.floor(u * tokens) : (u) => 4 * (u - 0.5),
    y: (u) => 2 * (u - 0.5),
    q: (u, i) => (i < rows ? (u + 0.5) / rows : 0),
    noise: (u) => u,
  };
  return numbers.fill(Type, count, forms[name]);
}
