// Which center suits me (PROTOCOL.md, section 12): try every center of the signed catalog on the device's own labelled
// samples; the least mean loss wins, and above the loss of guessing none fits. Only the losses leave the device. Then the
// center's ready-to-run file is fetched, tried, and kept. Where the catalog has a guide, the coordinator's answer says how the
// center fits, and whether it does; it cannot make the page accept a loss worse than guessing.

import { manifestOf } from "./protocol/blocks.js";
import { chooseCenter, readCatalog } from "./protocol/nearest/catalog.js";
import { encodeStats } from "./protocol/codecs.js";
import { Malformed } from "./protocol/errors.js";
import { MAX_MODELS } from "./protocol/message_schemas.js";
import { sizeOf } from "./protocol/tensors.js";
import { yieldToPage } from "./runtime/inbox.js";
import { argmax, checkData, softmax } from "./training/fit_probe.js";
import { ENGINE, evictBlobs } from "./runtime/task_runner.js";

const TIMEOUT_MS = 120_000; // without a block or an answer
const ASK_AGAIN_MS = 8_000;
const BATCH = 32;
const FORMAT = "onnx";
const NO_CENTERS = "no centers yet: the coordinator publishes them when training is done";

/** One visit of `client`; -> {center, losses, fit, accuracy, n, sha256, catalog, names}; center is null when none fits, `catalog` the hash of what was tried. */
export async function findCenter(client) {
  let until = client.now() + TIMEOUT_MS;
  let came = client.downloader.arrived;
  const expect = () => {
    [until, came] = [client.now() + TIMEOUT_MS, client.downloader.arrived];
  };
  const check = () => {
    if (client.downloader.arrived > came) expect();
    if (client.stopping) throw new Malformed("internal", "the page was closed");
    if (client.task !== null) throw new Malformed("unavailable", "there is something to train first; ask again after it");
    if (client.now() > until) throw new Malformed("unreachable", "the coordinator did not send its centers in time; press the button again");
  };
  const between = async () => {
    await yieldToPage();
    expect(); // what the phone computes is no silence of the coordinator
    check();
  };
  if (client.pointer === null) throw new Malformed("unavailable", NO_CENTERS);
  const { taskRunner, blobs } = client;
  const manifest = client.pointer.catalog;
  await taskRunner.checkSignature(manifest);
  await client.fetch([manifest], check);
  const catalog = await readCatalog(await blobs.read(manifest.sha256));
  const { program, learner } = await openCatalog(client, catalog, check);
  if (!client.participates) { // else its tasks do
    const named = catalog.centers.flatMap(({ model, files }) => [model, ...Object.values(files)]);
    await evictBlobs(client, [manifest, catalog.program, ...named], program);
  }
  const { train, test } = await client.local(program);
  if (!train.n) throw new Malformed("no_data", "add some samples first: centers are compared on them");
  for (const samples of test.n ? [train, test] : [train]) checkData(program, samples);
  const losses = [];
  await client.fetch(catalog.centers.map(({ model }) => model), check);
  for (const { model } of catalog.centers) {
    const found = await learner.evaluate([await taskRunner.vector(model, program.schema)], train, learner.fixedBatch ?? BATCH, between);
    losses.push(found.losses[0].reduce((a, b) => a + b, 0) / train.n);
  }
  const answer = losses.some(Number.isFinite) && await askNearest(client, losses, program, train.n, check);
  const center = answer && answer.center !== null ? chooseCenter(losses, catalog.abstain) : null;
  const tried = { losses, catalog: manifest.sha256, names: catalog.classes ?? [] };
  if (center === null) return storeHome(client, { ...tried, center, fit: "none" });
  const home = await fetchCenter(client, catalog.centers[center], program, test.n ? test : train, { check, between });
  return storeHome(client, { ...tried, center, fit: answer.fit, heldOut: test.n > 0, ...home });
}

/** What the last visit brought home, and its file ready to run if it can be opened; null without one. */
export async function openCenter({ store, blobs, ort }) {
  const home = await store.get("home");
  if (!home?.sha256) return home ? { ...home, classify: null } : null;
  let session;
  try {
    session = await ort.InferenceSession.create(await blobs.read(home.sha256), { executionProviders: ["wasm"] });
  } catch (wrong) { // damaged, or too large for the memory at hand: the phone trains all the same
    console.warn("the center that was taken home cannot be opened:", wrong.message);
    return { ...home, classify: null };
  }
  return { ...home, classify: (x, rows = 1) => runCenterFile(ort, session, x, [rows, ...home.input]), release: () => session.release() };
}

/** Probabilities of one sample, best first: [{label, share}]. */
export async function rankClasses(classify, x) {
  const shares = softmax(await classify(x));
  return shares.map((share, label) => ({ label, share })).sort((a, b) => b.share - a.share);
}

async function openCatalog(client, catalog, check) {
  const { taskRunner } = client;
  await taskRunner.checkSignature(catalog.program);
  await client.fetch([catalog.program], check);
  const program = await taskRunner.program(catalog.program);
  const container = catalog.container[ENGINE];
  if (!container) throw new Malformed("no_engine", `the centers have no program for ${ENGINE}, which a browser needs; ask the operator for engines = ["onnx"]`);
  taskRunner.checkContainer(program, "evaluate", container);
  await client.fetch([container, ...taskRunner.frozen(program, container.block)], check);
  return { program, learner: await taskRunner.learner(program, { evaluate: container }) };
}

/** The coordinator's answer to the losses, the least ones where there are many. */
async function askNearest(client, losses, program, n, check) {
  const order = losses.map((_, k) => k).filter((k) => Number.isFinite(losses[k])).sort((a, b) => losses[a] - losses[b]).slice(0, MAX_MODELS).sort((a, b) => a - b);
  const told = order.map((k) => losses[k]);
  const stats = await manifestOf(encodeStats({ loss: told }, program.schema), "stats", { inline: true });
  const centers = told.length < losses.length ? order : undefined;
  client.answer = client.error = null;
  const asked = new Set();
  let askAgain = 0;
  while (!asked.has(client.answer?.re)) {
    if (client.now() >= askAgain) {
      asked.add(client.sender.send("near", { how: "loss", stats, n, centers }));
      askAgain = client.now() + ASK_AGAIN_MS;
    }
    await client.handle(await client.inbox.next(Math.max(1, askAgain - client.now())));
    check();
    const { re, code } = client.error ?? {};
    if (asked.has(re) && code === "busy") throw new Malformed("unavailable", NO_CENTERS); // it has taken its catalog back
    if (asked.has(re) && code !== "rate") throw new Malformed("unreachable", `the coordinator answered ${code}; press the button again later`);
  }
  return client.answer;
}

async function fetchCenter(client, { id, files }, program, data, { check, between }) {
  const manifest = files[FORMAT];
  if (!manifest) throw new Malformed("bad_field", `center ${id} has no ${FORMAT} file, which a browser needs; ask the operator for formats = ["onnx"]`);
  await client.fetch([manifest], check);
  const session = await client.ort.InferenceSession.create(await client.blobs.read(manifest.sha256), { executionProviders: ["wasm"] });
  const width = sizeOf(program.input);
  const logits = [];
  try {
    for (let at = 0; at < data.n; at += BATCH) { // of all samples at once a phone has no memory
      await between();
      const x = data.x.subarray(at * width, (at + BATCH) * width);
      for (const value of await runCenterFile(client.ort, session, x, [x.length / width, ...program.input])) logits.push(value);
    }
  } finally {
    await session.release();
  }
  const metrics = program.loss === "cross-entropy" ? scoreLogits(Float32Array.from(logits), data, program.classes) : {};
  client.sender.send("served", { center: id, sha256: manifest.sha256, n: data.n, metrics });
  return { sha256: manifest.sha256, n: data.n, ...metrics, input: program.input, classes: program.classes };
}

async function runCenterFile(ort, session, x, dims) {
  const results = await session.run({ [session.inputNames[0]]: new ort.Tensor("float32", x, dims) });
  return results[session.outputNames[0]].data;
}

function scoreLogits(logits, data, classes) {
  let hits = 0;
  let loss = 0;
  for (let i = 0; i < data.n; i += 1) {
    const row = logits.subarray(i * classes, (i + 1) * classes);
    hits += argmax(row) === data.labels[i] ? 1 : 0;
    loss -= Math.log(Math.max(Number.MIN_VALUE, softmax(row)[data.labels[i]]));
  }
  return { accuracy: hits / data.n, loss: loss / data.n };
}

async function storeHome(client, home) {
  await client.store.write({ home });
  return home;
}
