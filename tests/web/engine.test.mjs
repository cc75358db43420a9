// ONNX Runtime Web where a phone's memory ends, on a runtime of plain objects.

import assert from "node:assert/strict";
import { test } from "node:test";

import { openEngine } from "../../edge_client/web/engines/onnx.js";
import { runGolden } from "../../edge_client/web/engines/golden_run.js";
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

test("a step's file that finds too little memory is no bad program", async () => {
  const opened = (words) => openEngine({ InferenceSession: { create: failing(words) } }, PROGRAM, { step: new Uint8Array(1) });
  const wrong = await opened(`Can't create a session. ${BAD_ALLOC}`).catch((error) => error);
  assert.deepEqual(nackFields(wrong), { code: "no_space", detail: "too little memory" });
  await assert.rejects(opened("Can't create a session. failed to allocate a buffer of size 99."), RangeError);
  await assert.rejects(opened("Can't create a session. ERROR_CODE: 7, ERROR_MESSAGE: no graph"), { code: "bad_program" });
});

test("a golden run that finds too little memory says nothing of the runtime: the phone is not left out for it", async () => {
  const engine = await openEngine(runtime(failing(`failed to call OrtRun(). ${BAD_ALLOC}`)), PROGRAM, { step: new Uint8Array(1) });
  const wrong = await runGolden(engine, GOLDEN).catch((error) => error);
  assert.deepEqual(nackFields(wrong), { code: "no_space", detail: "too little memory" });
  const broken = await openEngine(runtime(failing("failed to call OrtRun(). ERROR_CODE: 1")), PROGRAM, { step: new Uint8Array(1) });
  assert.equal(await runGolden(broken, GOLDEN), 1e9);
});
