// Whole local updates, candidate models on samples, gradients: an engine fed batch by batch. Models are flat vectors
// [schema.size]. Samples are {n, x: Float32Array [n * input], labels: Int32Array [n] or targets: Float32Array [n * target]}.
// What a task may ask is decided in fit_probe.js; here everything fits.

import { arrayOf } from "../engines/onnx.js";
import { Malformed } from "../protocol/errors.js";
import { Pcg64 } from "../protocol/random.js";
import { sizeOf } from "../protocol/tensors.js";
import { Rule } from "./optimiser.js";

const range = (from, to) => Uint32Array.from({ length: to - from }, (_, i) => from + i);

/** See the file's head. */
export class Learner {
  constructor(engine) {
    this.engine = engine;
    this.program = engine.program;
    this.Type = arrayOf(this.program.dtype);
  }

  get fixedBatch() {
    return this.engine.fixedBatch;
  }

  /** SGD from `start` over `batches` (indices of samples) -> {vector [schema.size], losses}. `between` runs before each step. */
  async train({ task, start, anchor, linear, data, batches, weights }, between = async () => {}) {
    const rule = task.optimiser && new Rule(task.optimiser, task.lr);
    const still = rule ? { ...task, lr: 0, momentum: 0 } : task; // then the step's velocity is the gradient
    const update = this.engine.update(this.fixedFeeds(still, start, anchor, linear), rule);
    const losses = [];
    for (const index of batches) {
      const k = losses.length;
      await between(k, task.steps, losses);
      const q = this.Type.from(index, (i) => weights[i] / index.length);
      const fresh = { ...this.sampleFeeds(data, index), q: { data: q, dims: [index.length] } };
      losses.push(await update.step({ ...fresh, ...this.noiseFeeds(task.seed, k, index.length) }));
    }
    return { vector: this.flatten(update.read()), losses };
  }

  /** -> {losses: M arrays [n], logits: M arrays [n * classes]}; the rows that pad a fixed batch are dropped. */
  async evaluate(models, data, batch, between = async () => {}) {
    const width = this.fixedBatch ?? batch;
    const classes = sizeOf(this.program.target);
    const losses = models.map(() => new Float64Array(data.n));
    const logits = models.map(() => new Float64Array(data.n * classes));
    const feeds = models.map((model) => this.modelFeeds(model));
    for (let at = 0; at < data.n; at += width) {
      const count = Math.min(width, data.n - at);
      const index = this.fixedBatch ? Uint32Array.from({ length: width }, (_, i) => at + (i % count)) : range(at, at + count);
      const samples = this.sampleFeeds(data, index);
      for (const [m, model] of feeds.entries()) {
        await between();
        const found = await this.engine.evaluate({ ...model, ...samples });
        losses[m].set(found.loss.subarray(0, count), at);
        logits[m].set(found.logits.subarray(0, count * classes), at * classes);
      }
    }
    return { losses, logits };
  }

  /** [nParams] mean gradient over all samples: the velocity after steps of rate zero from zero velocity, summed. */
  async gradient(model, data, batch, seed, between = async () => {}) {
    const task = { lr: 0, momentum: 0, mu: 0 };
    const parts = this.weightedBatches(data.n, batch);
    const used = parts.reduce((sum, { q }) => sum + q.reduce((a, b) => a + b, 0), 0);
    const total = new Float64Array(this.program.schema.nParams);
    for (const [k, { index, q }] of parts.entries()) {
      await between();
      const update = this.engine.update(this.fixedFeeds(task, model));
      const weights = { data: this.Type.from(q, (value) => value / used), dims: [index.length] };
      await update.step({ ...this.sampleFeeds(data, index), q: weights, ...this.noiseFeeds(seed, k, index.length) });
      const moved = update.read();
      for (const { name, role } of this.program.schema.tensors) {
        if (role !== "p") continue;
        const [begin] = this.program.schema.spans[name];
        moved[`velocity/${name}`].forEach((value, i) => {
          total[begin + i] += value;
        });
      }
    }
    return Float32Array.from(total);
  }

  /** All samples once. Rows that pad a fixed batch weigh nothing; under batch norm they would count, so there the rest is dropped. */
  weightedBatches(n, batch) {
    const { schema } = this.program;
    const width = this.fixedBatch ?? batch;
    const found = [];
    for (let at = 0; at < n; at += width) {
      const count = Math.min(width, n - at);
      if (this.fixedBatch === null || count === width) {
        found.push({ index: range(at, at + count), q: new Float64Array(count).fill(1) });
      } else if (schema.nParams === schema.size) {
        found.push({
          index: Uint32Array.from({ length: width }, (_, i) => at + (i % count)),
          q: Float64Array.from({ length: width }, (_, i) => (i < count ? 1 : 0)),
        });
      } else if (n < width) {
        throw new Malformed("no_data", `${n} samples, a batch needs ${width}`);
      }
    }
    return found;
  }

  /** What an update keeps between its steps. Velocity starts at zero; an absent anchor has no force (mu = 0). */
  fixedFeeds(task, start, anchor, linear) {
    const zero = new Float32Array(this.program.schema.size);
    const feeds = this.modelFeeds(start);
    for (const [prefix, vector] of [["velocity", zero], ["anchor", anchor ?? zero], ["linear", linear ?? zero]]) {
      Object.assign(feeds, this.tensorFeeds(prefix, vector, "p"));
    }
    for (const name of ["lr", "momentum", "mu"]) feeds[name] = { data: this.Type.of(task[name]), dims: [] };
    return feeds;
  }

  modelFeeds(vector) {
    return { ...this.tensorFeeds("w", vector, "p"), ...this.tensorFeeds("buffers", vector, "b") };
  }

  tensorFeeds(prefix, vector, role) {
    const { schema } = this.program;
    if (vector.length !== schema.size) {
      throw new Malformed("bad_schema", `a model of ${vector.length} values, the program has ${schema.size}`);
    }
    const chosen = schema.tensors.filter((tensor) => tensor.role === role);
    return Object.fromEntries(
      chosen.map(({ name, shape }) => [`${prefix}/${name}`, { data: this.Type.from(vector.subarray(...schema.spans[name])), dims: shape }]),
    );
  }

  flatten(moved) {
    const { schema } = this.program;
    const flat = new this.Type(schema.size);
    for (const { name, role } of schema.tensors) flat.set(moved[`${role === "p" ? "w" : "buffers"}/${name}`], schema.spans[name][0]);
    return flat;
  }

  /** `x` [b, ...input] and `y`: one-hot [b, classes] for class labels, the targets as they are otherwise. */
  sampleFeeds(data, index) {
    const { input, target } = this.program;
    const [width, height] = [sizeOf(input), sizeOf(target)];
    const x = new this.Type(index.length * width);
    const y = new this.Type(index.length * height);
    index.forEach((sample, row) => {
      x.set(data.x.subarray(sample * width, (sample + 1) * width), row * width);
      if (data.labels) y[row * height + data.labels[sample]] = 1;
      else y.set(data.targets.subarray(sample * height, (sample + 1) * height), row * height);
    });
    return { x: { data: x, dims: [index.length, ...input] }, y: { data: y, dims: [index.length, ...target] } };
  }

  /** What a step of a model with dropout draws from; nothing for a model that draws nothing. */
  noiseFeeds(seed, step, count) {
    const port = this.program.functions.step.inputs.find(({ name }) => name === "noise");
    if (!port) return {};
    const shape = port.shape.slice(1);
    const drawn = new Pcg64(seed, step).floats(count * sizeOf(shape));
    return { noise: { data: this.Type === Float32Array ? drawn : this.Type.from(drawn), dims: [count, ...shape] } };
  }
}
