// The page's engine and learner on a runtime of plain objects: where memory ends, when the page may do other things, which weights count.

import assert from "node:assert/strict";
import { test } from "node:test";

import { openEngine, threadCount } from "../../edge_client/web/engines/onnx.js";
import { runGolden } from "../../edge_client/web/engines/golden_run.js";
import { runProbe } from "../../edge_client/web/training/fit_probe.js";
import { Learner } from "../../edge_client/web/training/learner.js";
import { addWords } from "../../edge_client/web/training/summed.js";
import { nackFields } from "../../edge_client/web/runtime/train_conditions.js";

const BAD_ALLOC = "ERROR_CODE: 6, ERROR_MESSAGE: std::bad_alloc"; // as version 1.30 says it
const port = (name, ...shape) => ({ name, dtype: "float32", shape });
const inputs = [port("w/a", 2), port("velocity/a", 2), port("x", "batch", 2), port("y", "batch", 2), port("q", "batch")];
const PROGRAM = {
  loss: "cross-entropy", classes: 2, dtype: "float32", batch: { onnx: "any" }, schema: { tensors: [{ name: "a", role: "p", shape: [2] }] },
  functions: { step: { inputs, outputs: [port("w/a", 2), port("velocity/a", 2), port("loss")] } },
};
const GOLDEN = { seed: 7, batch: 4, lr: 0.1, pull: 0.1, tokens: 0, losses: [1, 1], weights: new Array(8).fill(1), buffers: [] };

function runtime(run) {
  const session = { inputNames: inputs.map(({ name }) => name), outputNames: ["new/w/a", "new/velocity/a", "loss"], run };
  return { Tensor: class {}, InferenceSession: { create: async () => session } };
}

const failing = (words) => async () => { throw new Error(words); };

test("a phone trains with as many threads as its page's address says, but with no more than it has cores", () => {
  const counts = (search) => [1, 2, 8, 64, undefined].map((cores) => threadCount(search, cores));
  assert.deepEqual(counts(""), [1, 1, 4, 4, 1]);
  assert.deepEqual(counts("?threads=2"), [1, 2, 2, 2, 1]);
  for (const many of ["1e9", "Infinity", "100000"]) assert.deepEqual(counts(`?threads=${many}`), [1, 2, 8, 64, 1]);
  for (const none of ["0", "-3", "0.5", "many", ""]) assert.deepEqual(counts(`?threads=${none}`), counts(""));
  assert.equal(threadCount("?threads=2.5", 8), 2);
});

test("a step's file that finds too little memory is no bad program", async () => {
  const opened = (words) => openEngine({ InferenceSession: { create: failing(words) } }, PROGRAM, { step: new Uint8Array(1) });
  const wrong = await opened(`Can't create a session. ${BAD_ALLOC}`).catch((error) => error);
  assert.deepEqual(nackFields(wrong), { code: "no_space", detail: "too little memory" });
  await assert.rejects(opened("Can't create a session. failed to allocate a buffer of size 99."), RangeError);
  await assert.rejects(opened("Can't create a session. ERROR_CODE: 7, ERROR_MESSAGE: no graph"), { code: "bad_program" });
});

test("of a program that finds too little memory nothing stays there: the next try has as much", async () => {
  const released = [];
  const names = { inputNames: inputs.map(({ name }) => name), outputNames: ["new/w/a", "new/velocity/a", "loss"] };
  const sessions = [{ ...names, release: async () => released.push("step") }, { ...names, outputNames: [], release: async () => released.push("evaluate") }];
  const program = { ...PROGRAM, functions: { ...PROGRAM.functions, evaluate: PROGRAM.functions.step } };
  const opened = (more) => {
    const left = [sessions[0], ...more];
    const create = async () => left.shift() ?? failing(BAD_ALLOC)();
    return openEngine({ InferenceSession: { create } }, program, { step: new Uint8Array(1), evaluate: new Uint8Array(1) });
  };
  await assert.rejects(opened([]), RangeError);
  assert.deepEqual(released.splice(0), ["step"]);
  await assert.rejects(opened([sessions[1]]), { code: "bad_program" });
  assert.deepEqual(released, ["step", "evaluate"]);
  sessions[0].release = failing("null function or function signature mismatch");
  await assert.rejects(opened([]), RangeError); // the cause, not what came of it
});

test("a golden run that finds too little memory says nothing of the runtime: the phone is not left out for it", async () => {
  const engine = await openEngine(runtime(failing(`failed to call OrtRun(). ${BAD_ALLOC}`)), PROGRAM, { step: new Uint8Array(1) });
  const wrong = await runGolden(engine, GOLDEN).catch((error) => error);
  assert.deepEqual(nackFields(wrong), { code: "no_space", detail: "too little memory" });
  const broken = await openEngine(runtime(failing("failed to call OrtRun(). ERROR_CODE: 1")), PROGRAM, { step: new Uint8Array(1) });
  assert.equal(await runGolden(broken, GOLDEN), 1e9);
});

test("before each batch of a probe the page may do other things: of a gradient, and of statistics of the samples", async () => {
  const tensors = [{ name: "a", role: "p", shape: [2] }, { name: "b", role: "b", shape: [1] }];
  const program = { ...PROGRAM, input: [2], target: [2], schema: { tensors, size: 3, nParams: 2, spans: { a: [0, 2], b: [2, 3] } } };
  const moved = { "w/a": new Float32Array(2), "velocity/a": new Float32Array(2), "buffers/b": new Float32Array(1) };
  const engine = {
    program, fixedBatch: null, update: () => ({ step: async () => 0, read: () => moved }),
    evaluate: async ({ x: { dims: [rows] } }) => ({ loss: new Float32Array(rows), logits: new Float32Array(2 * rows) }),
  };
  const train = { n: 5, x: new Float32Array(10), labels: new Int32Array(5) };
  const waits = async (task) => {
    const calls = [];
    const given = { vectors: new Map([["m", new Float32Array(3)]]), own: new Map(), between: async (...told) => calls.push(told) };
    await runProbe(new Learner(engine), { models: [{ sha256: "m" }], batch: 2, seed: 0, ...task }, { train, test: { n: 0 } }, given);
    assert.ok(calls.every((told) => !told.length), "a probe trains nothing");
    return calls.length;
  };
  assert.equal(await waits({ want: ["grad"] }), 3);
  assert.equal(await waits({ want: ["loss"], buffers: "batch" }), 2 * 2 + 3);
});

test("last weights in another number of centers count as none", async () => {
  const program = { ...PROGRAM, input: [2], target: [2], schema: { tensors: PROGRAM.schema.tensors, size: 2, nParams: 2, spans: { a: [0, 2] } } };
  const engine = {
    program, fixedBatch: null, update: () => ({ step: async () => 0, read: () => ({ "w/a": new Float32Array(2) }) }),
    evaluate: async ({ x: { dims: [rows] }, "w/a": { data } }) => ({ loss: new Float32Array(rows).fill(data[0]), logits: new Float32Array(2 * rows) }),
  };
  const centers = [Float32Array.of(1, 0), Float32Array.of(2, 0)];
  const vectors = new Map(centers.map((center, k) => [`m${k}`, center]));
  const train = { n: 2, x: new Float32Array(4), labels: new Int32Array(2) };
  const work = { job: "fit", start: { sha256: "m0" }, lr: 0, momentum: 0, mu: 0, steps: 1, batch: 2, seed: 0 };
  const sum = { centers: [...vectors.keys()].map((sha256) => ({ sha256 })) };
  for (const choose of ["shares", "posterior"]) {
    const task = { part: "choose", choose, work, sum, centers, open: [0, 1], refresh: false, sigma: 0.1, repeats: 1, move: 1 };
    const chosen = async (choice) => (await addWords(new Learner(engine), task, { train }, { choice, own: new Map() }, { vectors, between: async () => {} })).choice;
    const [fresh, other, same] = [await chosen(undefined), await chosen([0.2, 0.3, 0.5]), await chosen([0.1, 0.9])];
    assert.deepEqual(other, fresh);
    assert.notDeepEqual(same, fresh);
  }
});
