// A training program on ONNX Runtime Web: the same .onnx files as every other device runs.
// What a step moves stays in the tensors that it returned, and these are the next step's inputs: nothing is copied in
// JavaScript between steps. An array to be fed is {data, dims}.

import { Malformed } from "../protocol/errors.js";

const MOVED = ["w", "buffers", "velocity"];
const KEPT = ["anchor", "linear", "lr", "momentum", "mu"];
const roleOf = (name) => name.split("/")[0];

/** The array class of a dtype of program.json. */
export function arrayOf(dtype) {
  return { float32: Float32Array, float64: Float64Array }[dtype];
}

/** {function: the bytes of its file} -> an engine. Malformed("bad_program") for files that do not fit the program. */
export async function openEngine(ort, program, files) {
  const sessions = {};
  for (const [name, data] of Object.entries(files)) {
    let session;
    try {
      session = await ort.InferenceSession.create(data, { executionProviders: ["wasm"], enableMemPattern: false });
    } catch (wrong) {
      throw new Malformed("bad_program", `ONNX Runtime Web cannot load the file of ${name}: ${wrong.message}`.slice(0, 190));
    }
    const { inputs, outputs } = program.functions[name];
    if (session.inputNames.join() !== inputs.map((port) => port.name).join() || session.outputNames.length !== outputs.length) {
      throw new Malformed("bad_program", `the file of ${name} takes other inputs than its program says`);
    }
    sessions[name] = session;
  }
  return new Engine(ort, program, sessions);
}

/** One opened program. */
class Engine {
  constructor(ort, program, sessions) {
    Object.assign(this, { ort, program, sessions });
    this.fixedBatch = program.batch.onnx === "any" ? null : program.batch.onnx;
  }

  /** Begin a local update from all feeds of a step but the fresh ones. */
  update(feeds) {
    return new Update(this, this.tensors("step", feeds, (name) => [...MOVED, ...KEPT].includes(roleOf(name))));
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
  async run(name, tensors) {
    const session = this.sessions[name];
    const results = await session.run(tensors);
    return Object.fromEntries(
      this.program.functions[name].outputs.map((port, i) => [port.name, results[session.outputNames[i]]]),
    );
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
