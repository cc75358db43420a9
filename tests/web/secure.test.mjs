// Masked sums in JavaScript against the bytes that Python is held to: tests/golden/secure.json.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { fromHex, toHex } from "../../edge_client/web/protocol/bytes.js";
import * as sums from "../../edge_client/web/protocol/secure/device_sums.js";
import { canonicalJson } from "../../edge_client/web/protocol/json.js";
import * as messages from "../../edge_client/web/protocol/messages.js";
import * as stages from "../../edge_client/web/protocol/secure/device_stages.js";
import { readState, writeState } from "../../edge_client/web/protocol/secure/device_state.js";
import * as keys from "../../edge_client/web/protocol/secure/keys.js";
import { packWords, streamBytes } from "../../edge_client/web/protocol/secure/masks.js";
import { thresholdOf } from "../../edge_client/web/protocol/secure/parameters.js";
import { readSumMessage, writeSumMessage } from "../../edge_client/web/protocol/secure/sum_messages.js";
import { Pcg64 } from "../../edge_client/web/protocol/random.js";
import { containerFunctions, initSlots, taskManifests, withoutUnneededInits } from "../../edge_client/web/protocol/task.js";
import { decodePoints, readSummedFit, SumScale } from "../../edge_client/web/protocol/summed_task.js";
import { argmax } from "../../edge_client/web/training/fit_probe.js";
import { withNoise } from "../../edge_client/web/training/skellam.js";
import { chooseNearest, contribution, scoreWords } from "../../edge_client/web/training/summed.js";

const RECORDED = JSON.parse(readFileSync(new URL("../golden/secure.json", import.meta.url), "utf8"));
const { context: CONTEXT, derived: D, cohort: C } = RECORDED;
const ROUNDING = 1; // spawn key of the task's seed, by which the recorded words are rounded
const bytes = (text) => new TextEncoder().encode(text);
const text = (data) => new TextDecoder().decode(data);
const refused = (code) => (wrong) => wrong.name === "Malformed" && wrong.code === code;

test("every value that follows from a root is the recorded one", async () => {
  const root = fromHex(D.root);
  const secret = await keys.maskSecret(root);
  const own = await keys.maskPrivate(secret);
  const self = await keys.selfSecret(root, CONTEXT);
  const shares = await keys.dealShares(root, CONTEXT, 3, 4);
  const sealed = await keys.seal(await keys.sealPrivate(root), fromHex(D.other_seal), CONTEXT, "a", "b", Uint8Array.from({ length: 64 }, (_, i) => i));
  const found = {
    seal_private: await keys.sealPrivate(root), mask_secret: secret, mask_private: own, self_secret: self,
    self_mask_key: await keys.selfMaskKey(self, CONTEXT), commitment: await keys.commitment(self, CONTEXT, "a"),
    pair_mask_key: await keys.pairMaskKey(own, fromHex(D.other_mask), CONTEXT, "a", "b"), mask_shares: keys.joined(...shares.mask),
    self_shares: keys.joined(...shares.self), share_digest: await keys.shareDigest(shares.mask[0], CONTEXT, "mask", "a", "b"), sealed,
    stream: await streamBytes(Uint8Array.from({ length: 16 }, (_, i) => i), 40),
  };
  for (const [name, data] of Object.entries(found)) assert.equal(toHex(data), D[name], name);
  assert.equal(toHex(await keys.publicKeys(root)), D.seal + D.mask);
  assert.equal(text(keys.label(CONTEXT, "pair mask", "a", "b")), D.label);
  const opened = await keys.unseal(await keys.sealPrivate(fromHex(D.other_root)), fromHex(D.seal), CONTEXT, "a", "b", sealed);
  assert.deepEqual([...opened], Array.from({ length: 64 }, (_, i) => i));
});

test("words are packed as recorded", () => {
  for (const [bits, packed] of Object.entries(RECORDED.packed.by_bits)) {
    assert.equal(toHex(packWords(Uint32Array.from(RECORDED.packed.words), Number(bits))), packed, bits);
  }
});

test("the thresholds are the recorded ones, and there is none beside", () => {
  for (const [n, k, t] of RECORDED.parameters) assert.equal(thresholdOf(n, k), t, `${n}`);
  assert.equal(thresholdOf(50, 20), 0);
  assert.equal(thresholdOf(160, 44), 0);
});

for (const [kind, recorded] of Object.entries(C.messages)) {
  test(`${kind} is read and written as it stands`, () => {
    assert.equal(text(writeSumMessage(readSumMessage(kind, bytes(recorded)))), recorded);
  });
}

for (const [kind, data, code] of RECORDED.refused) {
  test(`${kind} ${data.slice(0, 60)} is refused: ${code}`, () => {
    assert.throws(() => readSumMessage(kind, bytes(data)), refused(code));
  });
}

test("a public key of small order is refused", async () => {
  await assert.rejects(keys.agree(fromHex(D.seal_private), new Uint8Array(32)), refused("bad_field"));
});

test("a browser without X25519 says so", async () => {
  const { subtle } = globalThis.crypto;
  const unsupported = async () => {
    throw new DOMException("Unrecognized name.", "NotSupportedError");
  };
  Object.defineProperty(subtle, "importKey", { value: unsupported, configurable: true });
  try {
    await assert.rejects(keys.agree(fromHex(D.seal_private), fromHex(D.other_seal)), refused("no_engine"));
  } finally {
    delete subtle.importKey;
  }
});

test("a device of the recorded cohort sends the recorded bytes, again after a repeat, and nothing that it must not", async () => {
  const name = C.digest;
  const vector = Uint32Array.from(C.vector);
  let { state, out } = await sums.offerPrekeys(sums.freshSums("demo", "dev-000"), [C.devices["dev-000"], C.later_root].map(fromHex));
  assert.equal(text(out), C.messages.prekeys);
  await assert.rejects(sums.onVector(state, name, vector), refused("bad_task"));
  for (const _ of [0, 1]) {
    ({ state, out } = await sums.onRoster(state, bytes(C.messages.roster)));
    assert.equal(text(out), C.messages.shares);
  }
  assert.deepEqual([...state.roots.keys()], [1]);
  await assert.rejects(sums.onVector(state, name, vector), refused("bad_task"));
  for (const _ of [0, 1]) ({ state } = await sums.onRelay(state, bytes(C.messages.relay)));
  await assert.rejects(sums.onUnmask(state, bytes(C.messages.unmask)), refused("bad_task"));
  for (const _ of [0, 1]) {
    ({ state, out } = await sums.onVector(state, name, vector));
    assert.equal(toHex(out), C.upload);
  }
  await assert.rejects(sums.onVector(state, name, vector.map((word) => word ^ 1)), refused("bad_task"));
  for (const _ of [0, 1]) {
    ({ state, out } = await sums.onUnmask(state, bytes(C.messages.unmask)));
    assert.equal(text(out), C.messages.reveal);
  }
  const asked = readSumMessage("unmask", bytes(C.messages.unmask));
  const swapped = { ...asked, survivors: asked.survivors.slice(1), dropped: [asked.survivors[0], ...asked.dropped].sort() };
  await assert.rejects(sums.onUnmask(state, writeSumMessage(swapped)), refused("bad_task"));
  ({ state } = sums.onEnd(state, name));
  await assert.rejects(sums.onRoster(state, bytes(C.messages.roster)), refused("bad_task"));
});

const KEY = { run: RECORDED.context.run, round: RECORDED.context.round };
const at = (stage) => ({ ...KEY, exchange: 1 + stage });
const SCALE = { bits: RECORDED.form.bits, devices: 7 };

/** A tab that was closed and opened again: what it stored, as IndexedDB gives it back. */
const reloaded = (state) => readState(structuredClone(writeState(state)), "demo", "dev-000");

test("a tab that is closed after every stage, and asked twice, sends the recorded bytes, and then its keys are gone", async () => {
  const roots = [C.devices["dev-000"], C.later_root].map(fromHex);
  const asked = [
    [(state) => stages.offer(state, roots), bytes(C.messages.prekeys)],
    [(state) => stages.deal(state, bytes(C.messages.roster), at(0)), bytes(C.messages.shares)],
    [(state) => stages.mask(state, bytes(C.messages.relay), at(1), SCALE, Uint32Array.from(C.vector)), fromHex(C.upload)],
    [(state) => stages.show(state, bytes(C.messages.unmask), at(2)), bytes(C.messages.reveal)],
  ];
  let state = readState(undefined, "demo", "dev-000");
  for (const [answer, wanted] of asked) {
    const [first, again] = [await answer(reloaded(state)), await answer(reloaded(state))];
    assert.deepEqual([...first.out], [...wanted]);
    assert.deepEqual(again, first);
    ({ state } = first);
  }
  assert.equal(state.sums.size, 0);
  await assert.rejects(stages.show(state, bytes(C.messages.unmask), at(2)), refused("bad_task"));
});

test("a stage of another exchange, words that could overflow and a second vector are refused", async () => {
  const roots = [C.devices["dev-000"], C.later_root].map(fromHex);
  const vector = Uint32Array.from(C.vector);
  let { state } = await stages.offer(sums.freshSums("demo", "dev-000"), roots);
  await assert.rejects(stages.deal(state, bytes(C.messages.roster), at(4)), refused("bad_task"));
  ({ state } = await stages.deal(state, bytes(C.messages.roster), at(0)));
  await assert.rejects(stages.deal({ ...state, sums: new Map() }, bytes(C.messages.roster), at(0)), refused("bad_task"));
  const relay = (key, scale, words) => stages.mask(state, bytes(C.messages.relay), key, scale, words);
  await assert.rejects(relay(at(2), SCALE, vector), refused("bad_task"));
  await assert.rejects(relay(at(1), { ...SCALE, devices: 6 }, vector), refused("bad_task"));
  await assert.rejects(relay(at(1), { ...SCALE, bits: 24 }, vector), refused("bad_task"));
  await assert.rejects(stages.show(state, bytes(C.messages.unmask), at(2)), refused("bad_task"));
  ({ state } = await relay(at(1), SCALE, vector));
  await assert.rejects(relay(at(1), SCALE, vector.map((word) => word + 1)), refused("bad_task"));
});

test("the next roster ends the sum before, and prekeys that the coordinator has taken are deleted", async () => {
  const roots = (seed) => Array.from({ length: 16 }, (_, i) => new Uint8Array(32).fill(seed + i));
  let { state, out } = await stages.offer(sums.freshSums("demo", "dev-000"), [C.devices["dev-000"], ...roots(1).map(toHex)].map(fromHex));
  const numbers = (message) => [...readSumMessage("prekeys", message).keys.keys()];
  const range = (from, to) => Array.from({ length: to - from }, (_, i) => from + i);
  assert.deepEqual(numbers(out), range(0, 16));
  ({ state } = await stages.deal(state, bytes(C.messages.roster), at(0)));
  const next = { ...readSumMessage("roster", bytes(C.messages.roster)), number: 1, exchange: 5, roster: "cd".repeat(32) };
  ({ state } = await stages.deal(state, writeSumMessage(next), at(4)));
  assert.deepEqual([...state.sums.keys()], [next.roster]);
  ({ state, out } = await stages.offer(state, roots(40), 9));
  assert.deepEqual(numbers(out), range(10, 26));
  const lost = await stages.offer(sums.freshSums("demo", "dev-000"), roots(80), 25);
  assert.deepEqual(numbers(lost.out), range(26, 42));
  assert.equal(new Set(stages.freshRoots().map(toHex)).size, 16);
});

test("numbers that a device can hardly have offered are refused", async () => {
  const fresh = sums.freshSums("demo", "dev-000");
  for (const after of [1_000_000, Number.MAX_SAFE_INTEGER]) await assert.rejects(stages.offer(fresh, stages.freshRoots(), after), refused("bad_task"));
  const { state, out } = await stages.offer(fresh, stages.freshRoots(), 999_999);
  assert.equal([...readSumMessage("prekeys", out).keys.keys()][0], 1_000_000);
  await stages.offer(state, stages.freshRoots(), state.nextNumber + 999_999);
});

test("what was stored by another version or for another device is not taken", () => {
  const state = { ...sums.freshSums("demo", "dev-000"), nextNumber: 7 };
  assert.equal(reloaded(state).nextNumber, 7);
  assert.equal(readState({ ...writeState(state), v: 2 }, "demo", "dev-000").nextNumber, 0);
  assert.equal(readState(writeState(state), "demo", "dev-001").cid, "dev-001");
  assert.equal(readState(writeState(state), "demos", "dev-000").nextNumber, 0);
});

const readTask = (data) => messages.readExactMessage(data, "t");

for (const [name, recorded] of Object.entries(RECORDED.tasks)) {
  test(`the task "${name}" is read and written as it stands, and names each of its blobs once`, async () => {
    const task = await readTask(bytes(recorded));
    assert.equal(text(canonicalJson(task)), recorded);
    const blobs = taskManifests(task);
    assert.equal(new Set(blobs.map(({ sha256 }) => sha256)).size, blobs.length);
    assert.equal(blobs.filter(({ kind }) => kind === "sum").length, ["shares", "add", "show"].includes(task.stage) ? 1 : 0);
    const vectors = new Set(recorded.match(/"kind":"(model|points)","sha256":"\w+/g));
    assert.equal(blobs.filter(({ kind }) => kind !== "sum").length, vectors.size);
  });
}

test("a blob that a task names under two kinds is looked at under both: a signature is of one", () => {
  const term = { sha256: "0".repeat(64), kind: "linear" };
  assert.deepEqual(taskManifests({ start: { ...term, kind: "model" }, linear: term, anchor: term }).map(({ kind }) => kind), ["model", "linear"]);
});

for (const [why, job] of Object.entries(RECORDED.refused_jobs)) {
  test(`a task of a sum is refused: ${why}`, async () => {
    const { work: _work, message: _message, after: _after, ...frame } = JSON.parse(RECORDED.tasks.add);
    await assert.rejects(readTask(bytes(JSON.stringify({ ...frame, ...job }))), refused("bad_task"));
  });
}

test("fields of a sum that are out of bounds are refused", async () => {
  const task = JSON.parse(RECORDED.tasks["add, k-means"]);
  const changed = (where, value) => {
    const copy = structuredClone(task);
    const path = where.split(".");
    path.slice(0, -1).reduce((at, name) => at[name], copy)[path.at(-1)] = value;
    return bytes(JSON.stringify(copy));
  };
  const wrong = {
    stage: "sing", after: -1, work: [], "work.job": "sum", "work.sum.part": "all", "work.sum.choose": "best", "work.sum.centers": [],
    "work.sum.open": [16], "work.sum.share": 1.5, "work.sum.scale.bits": 33, "work.sum.scale.devices": 0, "work.sum.scale.clip": 0,
    "work.sum.scale.noise": 2e6, "work.sum.group": 16, "work.sum.compare": [[1]], "work.sum.points_open": [2], "work.sum.repeats": 0,
    "work.sum.move": -1, "work.sum.dealt": 1,
  };
  for (const [where, value] of Object.entries(wrong)) await assert.rejects(readTask(changed(where, value)), refused("bad_field"), where);
});

test("a choice by losses needs both functions, and an evaluation one", async () => {
  const task = JSON.parse(RECORDED.tasks.tell);
  assert.deepEqual(containerFunctions(task), { container: "step" });
  task.work.sum.choose = "loss";
  assert.deepEqual(containerFunctions(task), { container: "evaluate", step: "step" });
  assert.deepEqual(containerFunctions(JSON.parse(RECORDED.tasks["add, evaluation"])), { container: "evaluate" });
  const kept = withoutUnneededInits(JSON.parse(RECORDED.tasks.keep), new Set(initSlots(JSON.parse(RECORDED.tasks.keep))));
  assert.equal(kept.work.init, undefined);
});

const CENTERS = [0, 6].map((from) => Float32Array.from({ length: 6 }, (_, i) => from + i));
const POINTS = Float64Array.from({ length: 16 }, (_, i) => i / 8);

for (const { task: name, sum, models, weights, order, words } of RECORDED.words) {
  test(`the words of "${name}" with ${JSON.stringify(sum)} are the recorded ones`, async () => {
    const { work } = await messages.readMessage(bytes(RECORDED.tasks[name]), "t");
    const vectors = new Map(work.sum.centers.map(({ sha256 }, k) => [sha256, CENTERS[k]]));
    if (work.sum.points) vectors.set(work.sum.points.sha256, POINTS);
    const task = readSummedFit({ ...work, sum: { ...work.sum, ...sum } }, vectors);
    const mine = { models: models.map((model) => Float32Array.from(model)), weights, order };
    assert.deepEqual([...contribution(task, mine, new Pcg64(work.seed, ROUNDING))], words);
  });
}

test("a device stays with its center unless another is nearer by the hysteresis", async () => {
  const { work } = await messages.readMessage(bytes(RECORDED.tasks.tell), "t");
  const vectors = new Map(work.sum.centers.map(({ sha256 }, k) => [sha256, CENTERS[k]]));
  const between = [CENTERS[0].map((value, i) => 0.45 * value + 0.55 * CENTERS[1][i])];
  const chosen = (hysteresis, last) => argmax(chooseNearest(readSummedFit({ ...work, sum: { ...work.sum, hysteresis } }, vectors), between, last).weights);
  assert.deepEqual([chosen(0, [1, 0]), chosen(0.5, [1, 0]), chosen(0.5, undefined)], [1, 0, 1]);
});

test("levels and the deviation of the noise are the recorded ones", () => {
  for (const { levels, deviation, ...given } of RECORDED.scales) {
    const scale = new SumScale(given);
    assert.deepEqual([scale.levels, scale.deviation], [levels, deviation]);
  }
});

test("a scale whose sum could overflow, and centroids of another shape, are refused", async () => {
  const overflow = [{ bits: 16, devices: 40_000, clip: 1 }, { bits: 16, devices: 100, clip: 1, noise: 1000 }];
  for (const scale of overflow) assert.throws(() => new SumScale(scale), refused("bad_task"));
  const { work } = await messages.readMessage(bytes(RECORDED.tasks["add, k-means"]), "t");
  const vectors = (points) => new Map([...work.sum.centers.map(({ sha256 }, k) => [sha256, CENTERS[k]]), [work.sum.points.sha256, points]]);
  assert.equal(readSummedFit(work, vectors(POINTS)).points.length, 2);
  for (const points of [POINTS.subarray(1), POINTS.subarray(8)]) assert.throws(() => readSummedFit(work, vectors(points)), refused("bad_task"));
  const again = { ...work, sum: { ...work.sum, compare: [[0, 6], [0, 1]] } };
  assert.throws(() => readSummedFit(again, vectors(POINTS)), (wrong) => wrong.code === "bad_task" && wrong.message.includes("7 columns of a model of 6"));
  assert.throws(() => decodePoints(new Uint8Array(7)), refused("bad_schema"));
  assert.throws(() => decodePoints(new Uint8Array(Float64Array.of(Number.NaN).buffer)), refused("not_finite"));
});

test("an evaluation tells what is right of how many, accuracy, F1 and one device, and counts no label", () => {
  const words = scoreWords([[3, 1, 0], [0, 4, 0], [0, 0, 0]]);
  assert.deepEqual([...words.subarray(0, 2), words[4]], [7, 8, 1]);
  const [accuracy, f1] = words.subarray(2, 4);
  assert.ok(Math.abs(accuracy - (7 / 8) * 1000) < 1);
  assert.ok(Math.abs(f1 - ((6 / 7 + 8 / 9) / 2) * 1000) < 1); // a class that does not occur does not count
});

test("two devices with the same task round by other numbers", async () => {
  const { work } = await messages.readMessage(bytes(RECORDED.tasks.add), "t");
  const centers = new Float32Array(64).fill(0);
  const vectors = new Map(work.sum.centers.map(({ sha256 }) => [sha256, centers]));
  const task = readSummedFit({ ...work, sum: { ...work.sum, open: [0, 1], share: 1, scale: { bits: 16, devices: 20, clip: 1 } } }, vectors);
  const mine = { models: [new Float32Array(64).fill(1 / 3275.6)], weights: [0, 1], order: [1, 0] }; // half a level each
  assert.notDeepEqual(contribution(task, mine), contribution(task, mine));
});

test("noise is added to each parameter of each block and to nothing else", async () => {
  const { work } = await messages.readMessage(bytes(RECORDED.tasks.add), "t");
  const size = 4_000;
  const zero = new Float32Array(size);
  const scale = { bits: 32, devices: 20, clip: 4, noise: 0.5 };
  const vectors = new Map(work.sum.centers.map(({ sha256 }) => [sha256, zero]));
  const task = readSummedFit({ ...work, sum: { ...work.sum, scale, open: [0, 1], share: 1 } }, vectors);
  const words = contribution(task, { models: [zero], weights: [0, 1], order: [1, 0] });
  assert.equal(words.length, 2 * (size + 2));
  for (const [k, told] of [0, task.scale.levels].entries()) {
    const block = words.subarray(k * (size + 2), (k + 1) * (size + 2));
    assert.equal(block[size], told);
    assert.equal(block[size + 1], k);
    const signed = Array.from(block.subarray(0, size), (word) => (word > 2 ** 31 ? word - 2 ** 32 : word));
    const spread = Math.sqrt(signed.reduce((a, b) => a + b * b, 0) / size);
    assert.ok(Math.abs(spread / task.scale.deviation - 1) < 0.07, `${spread} of ${task.scale.deviation}`); // six deviations of 4,000 draws
  }
});

test("noise of few and of many has its mean and deviation, and words without noise are as they are", () => {
  const count = 40_000;
  for (const deviation of [0.7, 2.5, 40, 3e5, 2e7]) {
    const drawn = withNoise(new Uint32Array(count), deviation);
    assert.ok(drawn.every(Number.isInteger));
    const mean = drawn.reduce((a, b) => a + b, 0) / count;
    const spread = Math.sqrt(drawn.reduce((a, b) => a + (b - mean) ** 2, 0) / count);
    // six deviations of the mean and of the deviation of so many draws; a Skellam number has some more weight in its tails
    assert.ok(Math.abs(mean) < (6 * deviation) / Math.sqrt(count), `${deviation}: mean ${mean}`);
    assert.ok(Math.abs(spread / deviation - 1) < 6 * Math.sqrt((2 + 1 / deviation ** 2) / (4 * count)), `${deviation}: ${spread}`);
    const within = drawn.filter((value) => Math.abs(value) < deviation).length / count;
    if (deviation >= 40) assert.ok(Math.abs(within - 0.6827) < 0.02, `${deviation}: ${within} within one deviation`);
  }
});
