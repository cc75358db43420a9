// A training program on ONNX Runtime Web: the same .onnx files as every other device runs.
// What a step moves stays in the tensors that it returned, and these are the next step's inputs: nothing is copied in
// JavaScript between steps. An array to be fed is {data, dims}.

import { decodeVector } from "../protocol/codecs.js";
import { Malformed } from "../protocol/errors.js";

const MOVED = ["w", "buffers", "velocity"];
const KEPT = ["anchor", "linear", "lr", "momentum", "mu"];
const NO_MEMORY = /bad_alloc|allocat/; // as the runtime says it
const MAX_THREADS = 4; // half of the cores, so many at most, where the page's address names no number
const roleOf = (name) => name.split("/")[0];

/** How many threads to train with on so many cores; `search` of the page's address may ask for another number of them. */
export function threadCount(search, cores = 1) {
  const asked = Math.min(cores, Math.floor(Number(new URLSearchParams(search).get("threads"))));
  return asked >= 1 ? asked : Math.min(MAX_THREADS, Math.max(1, Math.floor(cores / 2)));
}

/** The array class of a dtype of program.json. */
export function arrayOf(dtype) {
  return { float32: Float32Array, float64: Float64Array }[dtype];
}

/**
 * {function: the bytes of its file}, `frozen` the file of the frozen tensors -> an engine. Malformed for files that do not
 * fit the program.
 */
export async function openEngine(ort, program, { frozen: file, ...files }) {
  const sessions = {};
  const frozen = file ? frozenTensors(ort, program, file) : {};
  try {
    for (const [name, data] of Object.entries(files)) {
      sessions[name] = await openSession(ort, name, data);
      const { inputNames, outputNames } = sessions[name];
      const { inputs, outputs } = program.functions[name];
      const wanted = [...inputs.map((port) => port.name), ...Object.keys(frozen)];
      if (inputNames.join() !== wanted.join() || outputNames.length !== outputs.length) {
        throw new Malformed("bad_program", `the file of ${name} takes other inputs than its program says`);
      }
    }
  } catch (wrong) {
    // else each try takes more of the memory that was too little; a runtime that has broken down releases nothing
    for (const session of Object.values(sessions)) await session.release().catch(() => {});
    throw wrong;
  }
  return new Engine(ort, program, sessions, frozen);
}

async function openSession(ort, name, data) {
  try {
    return await ort.InferenceSession.create(data, { executionProviders: ["wasm"], enableMemPattern: false });
  } catch (wrong) {
    checkMemory(wrong);
    throw new Malformed("bad_program", `ONNX Runtime Web cannot load the file of ${name}: ${wrong.message}`.slice(0, 190));
  }
}

/** RangeError where memory has ended, as JavaScript's own says it: then neither the program nor the runtime is to blame. */
function checkMemory(wrong) {
  if (NO_MEMORY.test(wrong.message)) throw new RangeError("too little memory");
}

/** {input: tensor} in the program's order. */
function frozenTensors(ort, program, file) {
  const values = program.frozen.split(decodeVector(file, program.frozen, { kind: "frozen" }));
  return Object.fromEntries(Object.entries(values).map(([name, { shape, data }]) => (
    [`frozen/${name}`, new ort.Tensor(program.dtype, arrayOf(program.dtype).from(data), shape)]
  )));
}

/** One opened program. */
class Engine {
  constructor(ort, program, sessions, frozen) {
    Object.assign(this, { ort, program, sessions, frozen });
    this.fixedBatch = program.batch.onnx === "any" ? null : program.batch.onnx;
  }

  /** Begin a local update from all feeds of a step but the fresh ones. With a `rule` steps give gradients, and it moves the weights. */
  update(feeds, rule) {
    const tensors = this.tensors("step", feeds, (name) => [...MOVED, ...KEPT].includes(roleOf(name)));
    return rule ? new RuledUpdate(this, tensors, rule) : new Update(this, tensors);
  }

  /** `loss` [batch] and `logits` [batch, classes]; batch norm in inference mode. */
  async evaluate(feeds) {
    const results = await this.run("evaluate", this.tensors("evaluate", feeds));
    return { loss: results.loss.data, logits: results.logits.data };
  }

  /** Let go of the sessions' memory. */
  async close() {
    for (const session of Object.values(this.sessions)) await session.release();
  }

  tensors(name, feeds, wanted = () => true) {
    const ports = this.program.functions[name].inputs.filter((port) => wanted(port.name));
    return Object.fromEntries(ports.map((port) => {
      const { data, dims } = feeds[port.name];
      return [port.name, new this.ort.Tensor(port.dtype, data, dims)];
    }));
  }

  /** Tensors by the program's names; outputs are taken by position, since a file may call them otherwise. */
  async run(name, tensors, wanted = () => true) {
    const session = this.sessions[name];
    const outputs = this.program.functions[name].outputs.map((port, i) => [port.name, session.outputNames[i]]);
    const fetched = outputs.filter(([port]) => wanted(port));
    const results = await session.run({ ...tensors, ...this.frozen }, fetched.map(([, output]) => output)).catch((wrong) => {
      checkMemory(wrong);
      throw wrong;
    });
    return Object.fromEntries(fetched.map(([port, output]) => [port, results[output]]));
  }
}

class Update {
  constructor(engine, tensors) {
    this.engine = engine;
    this.state = tensors;
  }

  /** One step on `x` [b, ...], `y` [b, ...], `q` [b] (and `noise`); the loss before it. */
  async step(fresh) {
    const given = this.engine.tensors("step", fresh, (name) => Object.hasOwn(fresh, name));
    const { loss, ...moved } = await this.engine.run("step", { ...this.state, ...given });
    Object.assign(this.state, moved);
    return Number(loss.data[0]);
  }

  /** {name: array} of what moved. */
  read() {
    const moved = Object.entries(this.state).filter(([name]) => MOVED.includes(roleOf(name)));
    return Object.fromEntries(moved.map(([name, tensor]) => [name, tensor.data]));
  }
}

/** The weights are one array, which the rule moves; the step's tensors are views of it. */
class RuledUpdate extends Update {
  constructor(engine, tensors, rule) {
    super(engine, tensors);
    this.rule = rule;
    this.names = Object.keys(tensors).filter((name) => roleOf(name) === "w").map((name) => name.slice(2));
    const parts = this.names.map((name) => tensors[`w/${name}`]);
    const Type = parts[0].data.constructor;
    this.w = new Type(parts.reduce((size, { data }) => size + data.length, 0));
    this.g = new Type(this.w.length);
    parts.reduce((at, { type, data, dims }, i) => {
      const view = this.w.subarray(at, at + data.length);
      view.set(data);
      this.state[`w/${this.names[i]}`] = new engine.ort.Tensor(type, view, dims);
      return at + data.length;
    }, 0);
  }

  async step(fresh) {
    const given = this.engine.tensors("step", fresh, (name) => Object.hasOwn(fresh, name));
    const { loss, ...found } = await this.engine.run("step", { ...this.state, ...given }, (name) => roleOf(name) !== "w");
    this.names.reduce((at, name) => {
      const { data } = found[`velocity/${name}`];
      this.g.set(data, at);
      delete found[`velocity/${name}`]; // a step's velocity stays zero, so that it gives the gradient alone
      return at + data.length;
    }, 0);
    Object.assign(this.state, found);
    this.rule.move(this.w, this.g);
    return Number(loss.data[0]);
  }
}
