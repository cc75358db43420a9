// node steps.mjs THIRD FOLDER...: runs each folder's program on ONNX Runtime Web and writes answers beside it, for
// web_steps.py to compare with torch and with Python's client. A folder holds program.json, step.onnx, evaluate.onnx,
// frozen.onnx (the frozen tensors, where there are any),
// feeds.safetensors (of a step), and task.json with samples.safetensors and models.safetensors (of a fit and a probe).

import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

import { openEngine } from "../../edge_client/web/engines/onnx.js";
import { Learner } from "../../edge_client/web/training/learner.js";
import { readProgram } from "../../edge_client/web/protocol/program.js";
import { packTensors, unpackTensors } from "../../edge_client/web/protocol/tensors.js";
import { readSummedFit } from "../../edge_client/web/protocol/summed_task.js";
import { addWords } from "../../edge_client/web/training/summed.js";
import { runFit, runProbe } from "../../edge_client/web/training/fit_probe.js";

const [third, ...folders] = process.argv.slice(2);
const ort = await import(pathToFileURL(join(third, "ort.wasm.min.mjs")));
ort.env.wasm.numThreads = 1;
ort.env.wasm.wasmPaths = `${pathToFileURL(third)}/`;
ort.env.wasm.wasmBinary = readFileSync(join(third, "ort-wasm-simd-threaded.wasm"));

for (const folder of folders) {
  const file = (name) => new Uint8Array(readFileSync(join(folder, name)));
  const program = await readProgram(file("program.json"));
  const frozen = program.frozen ? file("frozen.onnx") : null;
  const engine = await openEngine(ort, program, { step: file("step.onnx"), evaluate: file("evaluate.onnx"), frozen });
  write(folder, "step", await steps(engine, feedsIn(file("feeds.safetensors"))), program.schema);
  const learner = new Learner(engine);
  const { tensors } = unpackTensors(file("samples.safetensors"));
  const train = { n: tensors.y.data.length, x: tensors.x.data, labels: Int32Array.from(tensors.y.data, Number) };
  const models = unpackTensors(file("models.safetensors")).tensors;
  const vectors = new Map(Object.entries(models).map(([name, tensor]) => [name, tensor.data]));
  const tasks = JSON.parse(readFileSync(join(folder, "task.json"), "utf8"));
  const given = { vectors, own: new Map(), between: async () => {} };
  const asked = await runProbe(learner, tasks.probe, { train }, given);
  const totals = [null, Array.from({ length: program.classes }, (_, k) => 1 + k)];
  const corrected = await runProbe(learner, { ...tasks.probe, label_totals: totals }, { train }, given);
  const counted = await runProbe(learner, { models: [], want: ["labels"] }, { train }, given);
  const grad = await runProbe(learner, { ...tasks.probe, want: ["grad"], models: tasks.probe.models.slice(0, 1) }, { train }, given);
  const trained = await runFit(learner, tasks.fit, train, { ...given, own: undefined, posterior: asked.shares });
  const kept = vectors.get("1");
  const ofBatches = await runProbe(learner, { ...tasks.probe, buffers: "batch" }, { train }, given);
  const ofOwn = await runProbe(learner, { ...tasks.probe, buffers: "own" }, { train }, { ...given, own: new Map([["main", kept]]) });
  const fromOwn = await runFit(learner, { ...tasks.fit, buffers: "own" }, train, { ...given, own: kept, posterior: asked.shares });
  const answer = {
    vector: trained.vector, loss: Float64Array.of(trained.loss), losses: Float64Array.from(asked.loss),
    posterior: Float64Array.from(asked.posterior), votes: Float64Array.from(asked.votes),
    confusion: Float64Array.from(asked.confusion.flat(2)), grad: grad.grad, inputs: Float64Array.from(asked.inputs), answers: Float64Array.from(asked.answers.flat()),
    corrected_losses: Float64Array.from(corrected.loss), corrected_confusion: Float64Array.from(corrected.confusion.flat(2)),
    labels: Float64Array.from(counted.labels), batch_losses: Float64Array.from(ofBatches.loss), own_losses: Float64Array.from(ofOwn.loss), own_vector: fromOwn.vector,
  };
  const rows = Object.entries(answer).map(([name, data]) => [name, { dims: [data.length], data }]);
  write(folder, "task", Object.fromEntries(rows), program.schema);
  const moved = {};
  for (const [name, task] of Object.entries(tasks.optimised)) {
    const { vector } = await runFit(learner, task, train, { ...given, own: undefined });
    moved[name] = { dims: [vector.length], data: vector };
  }
  write(folder, "optimised", moved, program.schema);
  write(folder, "summed", await summed(learner, tasks.summed, train, given), program.schema);
  await engine.close();
}

/** What a device trains, chooses and keeps for each of the tasks of a sum. */
async function summed(learner, tasks, train, { vectors, own, between }) {
  const found = {};
  for (const [name, { work, last }] of Object.entries(tasks)) {
    const memory = { trained: undefined, choice: last ?? undefined, own };
    const done = await addWords(learner, readSummedFit(work, vectors), { train }, memory, { vectors, between });
    const rows = { models: done.trained.models.flatMap((each) => [...each]), weights: done.trained.weights, choice: done.choice, own: done.own?.[1] ?? [] };
    for (const [part, values] of Object.entries(rows)) if (values.length) found[`${name}/${part}`] = { dims: [values.length], data: Float64Array.from(values) };
  }
  return found;
}

/** Two steps on the same batch, the second from the tensors that the first returned. */
async function steps(engine, feeds) {
  const fresh = Object.fromEntries(["x", "y", "q", "noise"].filter((name) => feeds[name]).map((name) => [name, feeds[name]]));
  const update = engine.update(feeds);
  const losses = [await update.step(fresh)];
  const first = { ...update.read() };
  losses.push(await update.step(fresh));
  const named = (prefix, moved) => Object.entries(moved).map(([name, data]) => [`${prefix}/${name}`, { data, dims: feeds[name].dims }]);
  return Object.fromEntries([...named("1", first), ...named("2", update.read()), ["losses", { data: Float64Array.from(losses), dims: [2] }]]);
}

function feedsIn(file) {
  const { tensors } = unpackTensors(file);
  return Object.fromEntries(Object.entries(tensors).map(([name, { shape, data }]) => [name, { data, dims: shape }]));
}

function write(folder, name, arrays, schema) {
  const tensors = Object.fromEntries(Object.entries(arrays).map(([key, { data, dims }]) => {
    return [key, { dtype: data instanceof Float64Array ? "F64" : "F32", shape: dims, data }];
  }));
  writeFileSync(join(folder, `${name}-answer.safetensors`), packTensors(tensors, { kind: "stats", codec: "f32", schema: schema.sha256 }));
}
