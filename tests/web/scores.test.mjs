// The page's votes, its errors of a regression and its nearest center, on numbers worked out by hand.

import assert from "node:assert/strict";
import { test } from "node:test";

import { countVotes, meanErrors, runFit, runProbe } from "../../edge_client/web/training/fit_probe.js";
import { chooseNearest } from "../../edge_client/web/training/summed.js";

const program = { loss: "squared-error" };
const data = { n: 2, targets: Float32Array.from([1, 10, 3, 10]) }; // two samples of two targets

test("errors are means over samples and targets, and each target varies around its own mean", () => {
  const outputs = [Float32Array.from([1, 10, 3, 10]), Float32Array.from([2, 10, 3, 7])];
  assert.deepEqual(meanErrors(program, outputs, data), [[0, 0, 0.5], [2.5, 1, 0.5]]);
  assert.deepEqual(meanErrors(program, outputs, data, [1, 1]), [[0.625, 0.5, 0.5]]);
});

test("errors are not told of classes, nor of outputs of another shape", () => {
  assert.throws(() => meanErrors({ loss: "cross-entropy" }, [], data), { code: "bad_task" });
  assert.throws(() => meanErrors(program, [Float32Array.from([1])], data), { code: "bad_task" });
});

test("hits and misses are counted of so many classes as fit into a page's memory, and as other devices count", async () => {
  const counted = async (classes) => {
    const evaluate = async () => ({ losses: [Float64Array.of(0)], logits: [new Float64Array(classes)] });
    const learner = { program: { loss: "cross-entropy", classes, input: [1], target: [classes] }, evaluate };
    const train = { n: 1, x: new Float32Array(1), labels: Int32Array.of(0) };
    const probe = { models: [{ sha256: "a" }], want: ["confusion"], batch: 1, seed: 0 };
    return (await runProbe(learner, probe, { train }, { vectors: new Map([["a", null]]), own: new Map() })).confusion[0].length;
  };
  assert.equal(await counted(40), 40);
  await assert.rejects(counted(4097), { code: "bad_task" });
});

test("a loss that is no number wins no vote", () => {
  assert.deepEqual(countVotes([[0.1, NaN, 2, NaN], [0.5, 9, 1, NaN], [NaN, NaN, NaN, 1]]), [1, 2, 1]);
});

test("a fit whose loss is no number is refused, as one whose model is: no announcement can carry it", async () => {
  const learner = (losses) => ({ program: { input: [1], target: [2], ...program }, fixedBatch: null, train: async () => ({ vector: Float64Array.of(1), losses }) });
  const fit = { start: { sha256: "a" }, lr: 1, batch: 2, seed: 0, steps: 2 };
  const samples = { ...data, x: new Float32Array(2) };
  const run = (...losses) => runFit(learner(losses), fit, samples, { vectors: new Map([["a", Float32Array.of(0)]]) });
  assert.equal((await run(1, 3)).loss, 2);
  for (const loss of [Infinity, NaN]) await assert.rejects(run(1, loss), { code: "not_finite" });
});

test("with hysteresis a phone leaves its center for one that is nearer by that share of the distance, and for no other", () => {
  const chosen = (away, last) => {
    const centers = [1, away].map((place) => Float32Array.of(place));
    return chooseNearest({ compare: [[0, 1]], centers, hysteresis: 0.1 }, [Float32Array.of(0)], last).order[0];
  };
  assert.deepEqual([chosen(0.91, [1, 0]), chosen(0.89, [1, 0])], [0, 1]);
  assert.deepEqual([chosen(0.91, undefined), chosen(0.91, [0, 1])], [1, 1]);
});

test("models that cannot be the least are left early, and the least has the loss that all samples give", async () => {
  const calls = [0, 0, 0];
  const evaluate = async (models, { n }) => {
    calls[models[0][0]] += n;
    return { losses: [new Float64Array(n).fill([1, 0.25, NaN][models[0][0]])] };
  };
  const learner = { program: { loss: "cross-entropy", classes: 2, input: [1], target: [2] }, fixedBatch: null, evaluate };
  const train = { n: 10, x: new Float32Array(10), labels: new Int32Array(10) };
  const vectors = new Map([0, 1, 2].map((m) => [`m${m}`, [m]]));
  const probe = { models: [...vectors.keys()].map((sha256) => ({ sha256 })), want: ["loss"], least: true, batch: 2, seed: 0 };
  const found = await runProbe(learner, probe, { train }, { vectors, own: new Map() });
  assert.deepEqual(calls, [4, 10, 2]);
  assert.deepEqual(found.loss.slice(0, 2), [0.4, 0.25]);
});
