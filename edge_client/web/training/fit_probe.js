// What a device does with a task (PROTOCOL.md, section 8): `fit` runs SGD steps, `probe` evaluates candidate models. A local
// data set is {train, test}, samples as in learner.js. No network, no storage, no randomness but the task's seed.

import { Malformed } from "../protocol/errors.js";
import { Pcg64 } from "../protocol/random.js";
import { sizeOf } from "../protocol/tensors.js";
import { answerLooks } from "./answer_moments.js";
import { inputMoments } from "./input_moments.js";
import { leastLosses } from "./least_losses.js";

const SMALL = 1e-4; // a step moves a running statistic by a share of at least this, or does not move it at all
const MAX_COUNTED = 4096; // classes of a confusion matrix: 128 MiB of counts
const LABEL_PRIOR = 0.1; // samples of each class beside those that are counted

/**
 * Carry out a fit. `vectors` are the task's models by hash, `own` [schema.size] is the model kept in the task's slot, if
 * any, `posterior` the responsibilities [M][n] that this round's probe left. -> {vector [schema.size], loss, start, anchor}.
 */
export async function runFit(learner, task, data, { vectors, own, posterior, between }) {
  const { program } = learner;
  checkData(program, data);
  const weights = rowWeights(task, data, posterior);
  if (learner.fixedBatch !== null && learner.fixedBatch !== task.batch) {
    throw new Malformed("bad_task", `batch ${task.batch}, but this program runs batches of ${learner.fixedBatch}`);
  }
  const named = (field) => (task[field] ? vectors.get(task[field].sha256) : undefined);
  const sent = task.start === "own" ? (own ?? named("init")) : named("start");
  if (!sent) throw new Malformed("no_own_model", `no model in slot ${task.slot ?? "main"}, and the task brings none`);
  const start = task.buffers === "own" && own ? withBuffers(program, sent, own) : sent;
  const anchor = task.anchor === "start" ? sent : named("anchor");
  const batches = batchesOf(data.n, task, learner.fixedBatch !== null);
  const trained = await learner.train({ task, start, anchor, linear: named("linear"), data, batches, weights }, between);
  const loss = trained.losses.reduce((a, b) => a + b, 0) / trained.losses.length;
  const vector = Float32Array.from(trained.vector); // of a program in float64, too
  if (!Number.isFinite(loss) || !vector.every(Number.isFinite)) {
    throw new Malformed("not_finite", `training diverged; the learning rate ${task.lr} may be too high`);
  }
  return { vector, loss, start: sent, anchor };
}

/** Evaluate the task's models -> {n, loss, votes, posterior, confusion, errors, inputs, answers, grad, labels, shares}: what was asked for, and what stays. */
export async function runProbe(learner, task, local, { vectors, own, between }) {
  const { program } = learner;
  const data = probeData(task, local);
  checkData(program, data);
  const want = new Set(task.want);
  if (want.has("positions")) throw new Malformed("bad_task", "positions are of programs with several labels in a sample, which this page does not take");
  if (want.has("labels")) return { n: data.n, labels: labelCounts(program, data) };
  let models = task.models.map((model) => candidate(model, vectors, own));
  if (want.has("grad")) {
    if (models.length !== 1) throw new Malformed("bad_task", `a gradient is taken of one model, got ${models.length}`);
    return { n: data.n, grad: await learner.gradient(models[0], data, task.batch, task.seed, between) };
  }
  const kept = own.get("main");
  if (task.buffers === "own" && kept) {
    models = models.map((model, i) => ("own" in task.models[i] ? model : withBuffers(program, model, kept)));
  } else if (task.buffers === "batch") {
    const found = [];
    for (const model of models) found.push(await recalibrate(learner, model, local.train, task.batch, between));
    models = found;
  }
  const totals = task.label_totals?.map((row, m) => (own.has(task.models[m].own) ? null : row));
  const evaluate = async (numbers, samples) => {
    const found = await learner.evaluate(numbers.map((m) => models[m]), samples, task.batch, between);
    return totals ? withLabelPrior(program, found.logits, samples, local.train, numbers.map((m) => totals[m])) : found;
  };
  const mean = (row) => row.reduce((a, b) => a + b, 0) / row.length;
  if (task.least) {
    const one = async (m, index) => (await evaluate([m], subset(data, index))).losses[0];
    return { n: data.n, loss: (await leastLosses(one, models.length, data.n, learner.fixedBatch ?? task.batch)).map(mean) };
  }
  const { losses, logits } = await evaluate([...models.keys()], data);
  const shares = want.has("posterior") ? responsibilities(losses, task.prior) : null;
  return {
    n: data.n,
    loss: want.has("loss") ? losses.map(mean) : undefined,
    votes: want.has("votes") ? countVotes(losses) : undefined,
    posterior: shares ? shares.map(mean) : undefined,
    confusion: want.has("confusion") ? confusionMatrices(program, logits, data, task.prior) : undefined,
    errors: want.has("errors") ? meanErrors(program, logits, data, task.prior) : undefined,
    inputs: want.has("inputs") ? inputMoments([local.train, local.test].filter((part) => part?.n), program.input) : undefined,
    answers: want.has("answers") ? await answerLooks(learner, models, local, logits, task.batch, between) : undefined,
    shares: shares && (task.split ?? "train") === "train" && data.n === local.train.n ? shares : undefined,
  };
}

/**
 * `steps` arrays of sample indices: one permutation per pass, cut in order; the short rest is used unless `fixed`. They are made while
 * they are read: a task may ask for a million steps.
 */
export function batchesOf(n, task, fixed) {
  if (n < 1 || (fixed && n < task.batch)) throw new Malformed("no_data", `${n} samples, a batch needs ${fixed ? task.batch : 1}`);
  return cutPasses(n, task, fixed ? n - (n % task.batch) : n);
}

function* cutPasses(n, { batch, seed, steps }, stop) {
  const stream = new Pcg64(seed);
  for (let done = 0; done < steps;) {
    const order = stream.permutation(n);
    for (let at = 0; at < stop && done < steps; at += batch, done += 1) yield order.slice(at, Math.min(at + batch, n));
  }
}

/**
 * Losses and logits of classifiers that are corrected from the samples of each class that they were trained on, `totals`
 * [M][C], to those of the device's training samples; a candidate whose entry is null stays as it is.
 */
function withLabelPrior(program, logits, data, train, totals) {
  const [c, counts] = [program.classes, labelCounts(program, train)];
  if (totals.some((row) => row && row.length !== c)) throw new Malformed("bad_task", `label_totals needs ${c} numbers for each model`);
  const shift = (row, k) => (row ? Math.log(counts[k] + LABEL_PRIOR) - Math.log(row[k] + LABEL_PRIOR) : 0);
  const scores = logits.map((rows, m) => Float64Array.from(rows, (value, at) => value + shift(totals[m], at % c)));
  const losses = scores.map((rows) => Float64Array.from({ length: data.n }, (_, i) => {
    const row = rows.subarray(i * c, (i + 1) * c);
    const top = Math.max(...row);
    const all = Math.log(row.reduce((sum, value) => sum + Math.exp(value - top), 0)) + top;
    return all - targetShares(data, i, c).reduce((sum, share, k) => sum + share * row[k], 0);
  }));
  return { losses, logits: scores };
}

/** Samples of each class [C]; soft labels count by their shares. */
function labelCounts(program, data) {
  checkClassifier(program, "a label prior");
  const counts = new Float64Array(program.classes);
  for (let i = 0; i < data.n; i += 1) targetShares(data, i, program.classes).forEach((share, k) => {
    counts[k] += share;
  });
  return counts;
}

/** A sample's target as shares of the classes [C]. */
function targetShares(data, i, c) {
  if (!data.labels) return data.targets.subarray(i * c, (i + 1) * c);
  return Array.from({ length: c }, (_, k) => Number(k === data.labels[i]));
}

function checkClassifier(program, what) {
  if (program.loss !== "cross-entropy") throw new Malformed("bad_task", `${what} needs a classifier`);
}

/** M losses [n] and prior weights [M] (uniform when absent) -> M shares [n]; each sample's sum to 1. */
export function responsibilities(losses, prior) {
  const found = losses.map((row) => new Float64Array(row.length));
  for (let i = 0; i < losses[0].length; i += 1) {
    const scores = losses.map((row, m) => (prior ? Math.log(prior[m]) : 0) - row[i]);
    const top = Math.max(...scores);
    if (!Number.isFinite(top)) throw new Malformed("bad_task", "every prior weight is zero, or a loss is not finite");
    const shares = scores.map((score) => Math.exp(score - top));
    const sum = shares.reduce((a, b) => a + b, 0);
    shares.forEach((share, m) => {
      found[m][i] = share / sum;
    });
  }
  return found;
}

function withBuffers({ schema }, model, other) {
  const found = Float32Array.from(model);
  found.set(other.subarray(schema.nParams), schema.nParams);
  return found;
}

/** The statistics of these samples in place of running ones: two steps of rate zero, from 0 and from 1, tell how far a step moves them. */
async function recalibrate(learner, model, data, batch, between) {
  const n = learner.program.schema.nParams;
  const size = learner.fixedBatch ?? batch;
  const all = Array.from({ length: data.n }, (_, i) => i);
  const cuts = [];
  for (let at = 0; at < data.n; at += size) cuts.push(Uint32Array.from(all.slice(at, at + size)));
  let whole = cuts.filter((cut) => cut.length === size);
  if (!whole.length && learner.fixedBatch === null) whole = cuts.slice(0, 1);
  if (n === model.length || !whole.length || whole[0].length === 1) return model;
  const task = { lr: 0, momentum: 0, mu: 0, seed: 0 };
  const weights = new Float64Array(data.n).fill(1);
  const moved = async (value) => {
    const start = Float32Array.from(model).fill(value, n);
    const sum = new Float64Array(model.length - n);
    for (const cut of whole) {
      const { vector } = await learner.train({ task, start, data, batches: [cut], weights }, () => between());
      vector.subarray(n).forEach((each, i) => {
        sum[i] += each / whole.length;
      });
    }
    return sum;
  };
  const [zero, one] = [await moved(0), await moved(1)];
  const found = Float32Array.from(model);
  zero.forEach((value, i) => {
    const share = 1 - (one[i] - value);
    if (share > SMALL) found[n + i] = value / share;
  });
  return found;
}

/** Malformed("no_data") for samples that the program cannot read. */
export function checkData(program, data) {
  if (!data || data.n === 0) throw new Malformed("no_data", "no samples on this device");
  if (data.x.length !== data.n * sizeOf(program.input)) {
    throw new Malformed("no_data", `these samples have another shape than the program reads, which is [${program.input}]: take samples of that shape`);
  }
  if (data.labels) {
    if (program.loss === "squared-error") throw new Malformed("no_data", "the samples have class labels, the program predicts numbers: take samples with targets");
    const most = data.labels.reduce((a, b) => Math.max(a, b), 0);
    if (most >= program.classes) throw new Malformed("no_data", `a sample has the label ${most}, the program has ${program.classes} classes: use 0 to ${program.classes - 1}`);
  } else if (data.targets.length !== data.n * sizeOf(program.target)) {
    throw new Malformed("no_data", `these targets have another shape than the program predicts, which is [${program.target}]: take targets of that shape`);
  }
}

function rowWeights(task, data, posterior) {
  if ((task.rows ?? "ones") === "ones") return new Float64Array(data.n).fill(1);
  const [kind, number] = task.rows.split(":");
  if (kind === "all-but") return allBut(Number(number), data.n);
  const row = posterior?.[Number(number)];
  if (!row || row.length !== data.n) throw new Malformed("no_posterior", `rows ${task.rows}, but no probe left such weights`);
  return row;
}

/** The first samples of each part, as many as `sizes` {train, test} says; all where it says nothing. */
export function firstSamples({ train, test }, sizes = {}) {
  const first = (data, n) => (n < data.n ? subset(data, Array.from({ length: n }, (_, i) => i)) : data);
  return { train: first(train, sizes.train), test: first(test, sizes.test) };
}

/** No weight for the first m samples of a probe's order with seed 0; the others have the mean weight 1 of all. */
function allBut(m, n) {
  if (m >= n) throw new Malformed("no_data", `${m} of ${n} samples are to be held out, and none is left to train on`);
  const weights = new Float64Array(n).fill(n / (n - m));
  for (const i of probed(n, m, 0)) weights[i] = 0;
  return weights;
}

/** Which of n samples a probe with this limit below n evaluates. */
function probed(n, limit, seed) {
  return new Pcg64(seed).permutation(n).slice(0, limit);
}

function candidate(model, vectors, own) {
  if (!("own" in model)) return vectors.get(model.sha256);
  const found = own.get(model.own) ?? (model.init ? vectors.get(model.init.sha256) : undefined);
  if (!found) throw new Malformed("no_own_model", `no model in slot ${model.own}, and the task brings none`);
  return found;
}

function probeData(task, local) {
  const data = task.split === "test" ? local.test : local.train;
  if (!data || !data.n) throw new Malformed("no_data", task.split === "test" ? "no held-out samples on this device" : "no samples on this device");
  if (task.limit === undefined || task.limit >= data.n) return data;
  return subset(data, probed(data.n, task.limit, task.seed));
}

/** The samples of these numbers, in their order. */
export function subset(data, index) {
  const pick = (values) => {
    if (!values) return undefined;
    const width = values.length / data.n;
    const found = new values.constructor(index.length * width);
    index.forEach((from, to) => found.set(values.subarray(from * width, (from + 1) * width), to * width));
    return found;
  };
  return { n: index.length, x: pick(data.x), labels: pick(data.labels), targets: pick(data.targets) };
}

/** How many samples each model explains best, [M][n] losses -> [M]. A loss that is NaN is the worst. */
export function countVotes(losses) {
  const loss = (m, i) => (Number.isNaN(losses[m][i]) ? Infinity : losses[m][i]);
  const votes = losses.map(() => 0);
  for (let i = 0; i < losses[0].length; i += 1) {
    let best = 0;
    for (let m = 1; m < losses.length; m += 1) if (loss(m, i) < loss(best, i)) best = m;
    votes[best] += 1;
  }
  return votes;
}

/** [M][C][C] counts, rows true class, columns predicted; with `prior` [1][C][C], of the mixture of probabilities. */
function confusionMatrices(program, logits, data, prior) {
  checkClassifier(program, "a confusion matrix");
  const c = program.classes;
  if (c > MAX_COUNTED) throw new Malformed("bad_task", `a confusion matrix is of at most ${MAX_COUNTED} classes`);
  const scores = prior ? [mixture(logits, prior, data.n, c)] : logits;
  return scores.map((rows) => {
    const counts = Array.from({ length: c }, () => new Array(c).fill(0));
    for (let i = 0; i < data.n; i += 1) {
      const row = rows.subarray(i * c, (i + 1) * c);
      const truth = data.labels ? data.labels[i] : argmax(data.targets.subarray(i * c, (i + 1) * c));
      counts[truth][argmax(row)] += 1;
    }
    return counts;
  });
}

/** [M][3]: mean squared error, mean absolute error, mean variance of each target; with `prior` [1][3], of the weighted mean. */
export function meanErrors(program, outputs, { n, targets }, prior) {
  if (program.loss !== "squared-error") throw new Malformed("bad_task", "errors are of targets that are no classes");
  const width = targets.length / n;
  if (outputs.some((rows) => rows.length !== targets.length)) throw new Malformed("bad_task", "errors compare outputs with targets of their shape");
  let variance = 0;
  for (let k = 0; k < width; k += 1) {
    let [mean, squares] = [0, 0];
    for (let i = k; i < targets.length; i += width) mean += targets[i] / n;
    for (let i = k; i < targets.length; i += width) squares += (targets[i] - mean) ** 2;
    variance += squares / n / width;
  }
  const total = prior?.reduce((a, b) => a + b, 0);
  const mixed = () => Float64Array.from(targets, (_, i) => outputs.reduce((sum, rows, m) => sum + (prior[m] / total) * rows[i], 0));
  return (prior ? [mixed()] : outputs).map((rows) => {
    let [squared, absolute] = [0, 0];
    for (let i = 0; i < targets.length; i += 1) {
      squared += (rows[i] - targets[i]) ** 2;
      absolute += Math.abs(rows[i] - targets[i]);
    }
    return [squared / targets.length, absolute / targets.length, variance];
  });
}

function mixture(logits, prior, n, c) {
  const found = new Float64Array(n * c);
  logits.forEach((rows, m) => {
    for (let i = 0; i < n; i += 1) softmax(rows.subarray(i * c, (i + 1) * c)).forEach((p, k) => {
      found[i * c + k] += prior[m] * p;
    });
  });
  return found;
}

/** Logits -> probabilities. */
export function softmax(row) {
  const top = Math.max(...row);
  const found = Array.from(row, (value) => Math.exp(value - top));
  const sum = found.reduce((a, b) => a + b, 0);
  return found.map((value) => value / sum);
}

/** The place of the largest value, the first one on ties. */
export function argmax(row) {
  let best = 0;
  for (let k = 1; k < row.length; k += 1) if (row[k] > row[best]) best = k;
  return best;
}
