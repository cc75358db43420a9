// What a device adds to a sum: its choice of a center, its clipped and quantised contribution, its evaluation. The numbers are those of
// edge_client/training/summed.py and summed_work.py. A trained choice is {models: one or K, weights [K], order: the centers from the best
// to the worst, null for soft weights}. `task` is that of readSummedFit.

import { Malformed } from "../protocol/errors.js";
import { Pcg64 } from "../protocol/random.js";
import { compared, SCORE_LEVELS, SOFT } from "../protocol/summed_task.js";
import { argmax, runFit, runProbe } from "./fit_probe.js";
import { SecretNumbers, withNoise } from "./skellam.js";

const MIDDLE = "middle"; // stands for the hash of a model that was made here
const LOTS = 2; // spawn key of the task's seed
const QUANTITY = { loss: "loss", shares: "votes", posterior: "posterior" };

const bad = (detail) => new Malformed("bad_task", detail);
const sum = (values) => values.reduce((a, b) => a + b, 0);
const LEAST_PART = 0.999; // of 1 / K: a device with such a weight in one of K centers counts itself there
const alone = (k, chosen) => Array.from({ length: k }, (_, m) => Number(m === chosen));
/** The places of the greatest values first; equal ones stay in their order. */
const falling = (values) => Array.from(values, (_, k) => k).sort((a, b) => values[b] - values[a] || a - b);

/**
 * Carry out a summed fit. `memory` is {trained: in this round, if it was; choice: the last weights [K]; own: kept models by slot}.
 * -> {words, trained, choice, own: [slot, model] where the device has trained one}
 */
export async function addWords(learner, task, local, memory, given) {
  let { trained, choice } = memory;
  let own;
  if (!trained) ({ trained, own } = await train(learner, task, local, memory, given));
  if (["choose", "add"].includes(task.part) && task.choose !== "given") {
    if (task.points && task.part === "choose") trained = chooseNearest(task, trained.models, undefined);
    choice = trained.order === null ? Array.from(trained.weights) : among(trained, task.open); // soft weights stay, also in closed centers
  }
  return { words: contribution(task, trained), trained, choice, own };
}

async function train(learner, task, local, memory, { vectors, between }) {
  const { scores, posterior } = await chooseBefore(learner, task, local, memory.choice, { vectors, between });
  const known = new Map(vectors);
  const models = [];
  let kept;
  for (let fit of plainFits(task, scores, memory.choice, known)) {
    const slot = fit.slot ?? "main";
    for (let again = 1; again <= task.repeats; again += 1) {
      const given = { vectors: known, own: memory.own.get(slot), posterior, between };
      const { vector, start } = await runFit(learner, fit, local.train, given);
      kept = vector;
      if (again === task.repeats && task.move >= 1) models.push(vector);
      else if (fit.start === "own") throw bad("a repeated fit starts at a model that is sent");
      else {
        const move = Math.fround(task.move);
        const moved = vector.map((value, i) => start[i] + Math.fround(move * Math.fround(value - start[i])));
        known.set(MIDDLE, moved);
        fit = { ...fit, start: { sha256: MIDDLE }, anchor: fit.mu > 0 ? "start" : undefined, seed: (fit.seed + 1) % 2 ** 53 };
        if (again === task.repeats) models.push(moved);
      }
    }
  }
  const own = models.length === 1 ? [task.work.slot ?? "main", kept] : undefined;
  return { trained: chooseAfter(task, models, scores, memory.choice), own };
}

/** Scores [K] by which the device chooses before it trains, undefined: by its trained model; and the responsibilities that it saw. */
async function chooseBefore(learner, task, local, kept, given) {
  const { choose, work, centers } = task;
  const last = kept?.length === centers.length ? kept : undefined;
  if (choose === "only") return { scores: centers.map(() => 1) };
  if (choose === "given") {
    if (!(task.group < centers.length)) throw bad("no center is given");
    return { scores: alone(centers.length, task.group) };
  }
  if (choose === "nearest") return {};
  if (choose === "shares" && last && !task.refresh) return { scores: last };
  const prior = choose === "posterior" ? last : undefined;
  const probe = { job: "probe", models: task.sum.centers, want: [QUANTITY[choose]], prior, batch: work.batch, seed: work.seed };
  const found = await runProbe(learner, probe, local, { ...given, own: new Map() });
  if (found.votes) return { scores: found.votes.map((votes) => Math.max(votes / sum(found.votes), task.sigma)) };
  if (found.loss) return { scores: found.loss.map((loss) => (Number.isNaN(loss) ? -Infinity : -loss)) };
  return { scores: found.posterior, posterior: found.shares };
}

/** The fits that the device trains: one, or one per center for "posterior". `known` takes a start that is made here. */
function plainFits(task, scores, last, known) {
  const { work, choose, centers } = task;
  const manifests = task.sum.centers;
  const slot = work.slot ?? "main";
  if (choose === "posterior") {
    return manifests.map((start, m) => ({ ...work, start, rows: `posterior:${m}`, slot: `${slot}-${m}` }));
  }
  if (choose === "shares") {
    const total = sum(scores);
    known.set(MIDDLE, centers[0].map((_, i) => sum(centers.map((center, k) => scores[k] * center[i])) / total));
    const middle = { sha256: MIDDLE };
    const pull = work.mu > 0 ? { anchor: middle, mu: work.mu * total } : {};
    return [{ ...work, ...pull, start: work.start === "own" ? "own" : middle }];
  }
  const weights = choose === "nearest" ? last : scores;
  if (choose === "given" || ["count", "points"].includes(task.part) || weights?.length !== centers.length) {
    return [{ ...work, anchor: undefined, mu: 0 }];
  }
  return [{ ...work, start: manifests[argmax(weights)], anchor: work.mu > 0 ? "start" : undefined }];
}

/** The device's choice once it has trained: one model, or K. */
function chooseAfter(task, models, scores, last) {
  if (!scores) return chooseNearest(task, models, last);
  if (SOFT.includes(task.choose)) return { models, weights: scores, order: null };
  const order = falling(scores);
  return { models, weights: alone(task.centers.length, order[0]), order };
}

/** By squared distance in the compared columns; with hysteresis h only below (1 - h) of the last one's distance. */
export function chooseNearest(task, models, last) {
  const k = task.centers.length;
  const centroids = task.points?.[0] ?? task.centers.map((center) => compared(task, center));
  const d2 = centroids.map((each) => squared(difference(compared(task, models[0]), each)));
  let order = falling(d2.map((d) => -d));
  const before = last?.length === k ? argmax(last) : -1;
  if (before >= 0 && d2[order[0]] >= (1 - task.hysteresis) ** 2 * d2[before]) order = [before, ...order.filter((m) => m !== before)];
  return { models, weights: alone(k, order[0]), order };
}

const squared = (values) => values.reduce((total, value) => total + value * value, 0);

/** In float32 where both are. */
function difference(one, other) {
  const narrow = one instanceof Float32Array && other instanceof Float32Array;
  return Float64Array.from(one, (value, i) => (narrow ? Math.fround(value - other[i]) : value - other[i]));
}

/** A vector shortened to the length `clip`. */
function clipped(values, clip) {
  const length = Math.sqrt(squared(values));
  return length > clip ? values.map((value) => value * (clip / length)) : values;
}

/** Weights [K] with closed centers left out: the best open center, or the soft weights of the open ones. */
function among({ weights, order }, open) {
  if (order === null) return Array.from(weights, (weight, k) => (open.includes(k) ? weight : 0));
  return alone(weights.length, order.find((k) => open.includes(k)));
}

/** The words of the task's part. The rounding, which `stream` draws, and the noise follow from nothing that was sent. */
export function contribution(task, mine, stream = new SecretNumbers()) {
  if (["count", "points"].includes(task.part)) return pointWords(task, mine, stream);
  const weights = among(mine, task.open);
  if (task.part === "choose") return Uint32Array.from(weights, (weight) => Number(weights.length * weight >= LEAST_PART));
  const size = task.centers[0].length + 2;
  const words = new Uint32Array(task.open.length * size);
  for (const [at, k] of task.open.entries()) {
    const share = (task.choose === "posterior" ? 1 : weights[k]) * task.share; // FedEM weighs its samples, not its models
    const model = mine.models[mine.models.length > 1 ? k : 0];
    words.set(block(task.scale, model, task.centers[k], share, stream), at * size);
  }
  return words;
}

function block(scale, model, center, share, stream) {
  const words = new Uint32Array(center.length + 2);
  if (share > 0) {
    const apart = clipped(Float64Array.from(model, (value, i) => value - center[i]), scale.clip);
    words.set(scale.toWords(apart.map((value) => value * (share / scale.clip)), stream));
    words.set(scale.toWords(Float64Array.of(share), stream), center.length);
    words[center.length + 1] = 1;
  }
  if (scale.noise) words.set(scale.modulo(withNoise(words.subarray(0, center.length), scale.deviation)));
  return words;
}

/** [restarts, K] counts, or for each centroid [difference, squared distance, 1]. */
function pointWords(task, mine, stream) {
  const { points, pointsOpen, scale } = task;
  const [runs, k] = [points.length, points[0].length];
  const point = compared(task, mine.models[0]);
  const lots = task.dealt ? new Pcg64(task.work.seed, LOTS).integers(k, runs) : [];
  const size = task.part === "count" ? 1 : point.length + 2;
  const words = new Uint32Array(runs * k * size);
  points.forEach((row, r) => {
    const open = pointsOpen[r];
    const nearest = argmax(row.map((each, m) => (open[m] ? -squared(difference(point, each)) : -Infinity)));
    const label = open[lots[r]] ? lots[r] : nearest;
    const at = (r * k + label) * size;
    if (task.part === "count") words[at] = 1;
    if (task.part === "count" || !open[label]) return;
    const moved = clipped(difference(point, row[label]), scale.clip).map((value) => value / scale.clip);
    words.set(scale.toWords(Float64Array.from([...moved, squared(moved)]), stream), at);
    words[at + size - 1] = 1;
  });
  return words;
}

/** The words of an evaluation: how many samples are right, how many there are, accuracy, F1, and one device. */
export async function evaluationWords(learner, work, local, { choice: last, own }, given) {
  const { served, usual } = work.sum;
  let { models, prior } = work;
  const choice = last?.length === models.length ? last : undefined; // else among the spare centers of the first round, whose end it missed
  if (served === "center") [models, prior] = [[models[choice ? argmax(choice) : usual]], undefined];
  if (served === "mixture") {
    const share = choice ?? models.map(() => 1);
    prior = share.map((each) => each / sum(share));
  }
  const probe = { ...work, models, prior, want: ["confusion"], label_totals: undefined };
  const { confusion: [matrix] } = await runProbe(learner, probe, local, { ...given, own });
  return scoreWords(matrix);
}

/** [C][C] counts -> words; none of them counts a label. */
export function scoreWords(matrix, stream = new SecretNumbers()) {
  const diagonal = matrix.map((row, k) => row[k]);
  const occurs = matrix.map((row, k) => sum(row) + sum(matrix.map((other) => other[k])));
  const f1 = diagonal.map((hits, k) => (2 * hits) / occurs[k]).filter((_, k) => occurs[k] > 0);
  const [right, total] = [sum(diagonal), sum(matrix.flat())];
  const drawn = stream.doubles(2);
  const scores = [right / total, sum(f1) / f1.length].map((score, i) => Math.floor(score * SCORE_LEVELS + drawn[i]));
  return Uint32Array.from([right, total, ...scores, 1]);
}
