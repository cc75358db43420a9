// A phone in masked sums with four other devices, against a scripted coordinator: every stage is stored before it is announced, and a tab
// that is closed at any of them goes on.

import assert from "node:assert/strict";
import { test } from "node:test";

import { encodeVector } from "../../edge_client/web/protocol/codecs.js";
import { freshSums } from "../../edge_client/web/protocol/secure/device_sums.js";
import * as stages from "../../edge_client/web/protocol/secure/device_stages.js";
import * as keys from "../../edge_client/web/protocol/secure/keys.js";
import { addMasksInto } from "../../edge_client/web/protocol/secure/masks.js";
import { readSumMessage, writeSumMessage } from "../../edge_client/web/protocol/secure/sum_messages.js";
import { SumScale } from "../../edge_client/web/protocol/summed_task.js";
import { NoRoom } from "../../edge_client/web/runtime/store.js";
import { MemoryStore } from "../support/memory_store.mjs";
import { CID, FEDERATION, N, phone, program, World } from "../support/phone_world.mjs";

const OTHERS = ["dev-a", "dev-b", "dev-c", "dev-d"];
const SCALE = { bits: 32, devices: 5, clip: 50 };
const SIZE = program.schema.size;

/** The other devices, and what a coordinator knows of a sum. */
class Cohort {
  constructor(world, { round = 1, words = SIZE + 2 } = {}) {
    Object.assign(this, { world, round, words, name: `${round}`.padStart(64, "0"), states: new Map(), uploads: new Map() });
    this.form = { run: "r1", round, exchange: 1, roster: this.name, devices: 5, threshold: 3, words, bits: 32 };
  }

  place(stage) {
    return { run: "r1", round: this.round, exchange: { prekeys: 0, shares: 1, add: 2, show: 3 }[stage] };
  }

  /** The fields of a task of this stage; a message is signed. */
  async task(stage, message, changes = {}) {
    const { lr, momentum, mu, steps, batch, seed, start, reply, ...frame } = await this.world.task();
    const order = message && { message: await this.world.blob(message, "sum", true) };
    const fit = { job: "fit", start, lr, momentum, mu, steps, batch, seed };
    const sum = { part: "add", choose: "only", centers: [start], open: [0], share: 1, scale: SCALE };
    this.start = start;
    const work = ["add", "tell", "keep"].includes(stage) ? { work: { ...fit, sum } } : {};
    return { ...frame, ...this.place(stage), reply: { ...reply, base: "zero" }, job: "sum", stage, ...order, ...work, ...changes };
  }

  /** The phone's prekeys are here: the phone's roster, and everyone's shares. */
  async deal(batch) {
    const [[number, own]] = readSumMessage("prekeys", batch).keys;
    const all = new Map([[CID, own]]);
    for (const cid of OTHERS) {
      const { state, out } = await stages.offer(freshSums(FEDERATION, cid), stages.freshRoots());
      this.states.set(cid, state);
      all.set(cid, readSumMessage("prekeys", out).keys.get(0));
    }
    const near = (cid) => new Map([...all].filter(([other]) => other !== cid).sort(([a], [b]) => (a < b ? -1 : 1)));
    const roster = (cid, of) => writeSumMessage({ ...this.form, cid, number: of, neighbours: near(cid) });
    this.dealt = new Map();
    for (const cid of OTHERS) {
      const { state, out } = await stages.deal(this.states.get(cid), roster(cid, 0), this.place("shares"));
      this.states.set(cid, state);
      this.dealt.set(cid, readSumMessage("shares", out).envelopes);
    }
    return roster(CID, number);
  }

  /** The phone's shares are here: its relay; the others upload zeros. */
  async relay(shares) {
    this.dealt.set(CID, readSumMessage("shares", shares).envelopes);
    const relayed = (cid) => new Map([...this.dealt].filter(([other]) => other !== cid).map(([other, to]) => [other, to.get(cid)]));
    const relay = (cid) => writeSumMessage({ roster: this.name, envelopes: relayed(cid) });
    for (const cid of OTHERS) {
      const { state, out } = await stages.mask(this.states.get(cid), relay(cid), this.place("add"), SCALE, new Uint32Array(this.words));
      this.states.set(cid, state);
      this.uploads.set(cid, out);
    }
    return relay(CID);
  }

  /** The phone's upload is here: the question for shares. `store` is the phone's, whose root the sum takes. */
  async ask(upload, store) {
    this.uploads.set(CID, upload);
    this.states.set(CID, await store.get("sums"));
    return writeSumMessage({ roster: this.name, survivors: OTHERS, dropped: [] });
  }

  /** The sum of all, with the self masks taken off; those of pairs cancel. */
  async sum() {
    const total = new Uint32Array(this.words);
    for (const [cid, upload] of this.uploads) {
      new Uint32Array(upload.slice(40).buffer).forEach((word, i) => {
        total[i] += word;
      });
      const context = { federation: FEDERATION, ...this.form };
      const secret = await keys.selfSecret(this.states.get(cid).sums.get(this.name).root, context);
      await addMasksInto(total, [[await keys.selfMaskKey(secret, context), -1]]);
    }
    return total;
  }
}

/** Ask one stage of a phone that stays; the answer's bytes. */
async function answered(world, task) {
  const from = world.said.length;
  world.say("task", task);
  const rdy = await world.heard((m) => m.k === "rdy" || m.k === "nack", from);
  assert.deepEqual([rdy.k, rdy.code, rdy.detail], ["rdy", undefined, undefined]);
  assert.deepEqual([rdy.what, rdy.n, Object.keys(rdy.metrics)], ["masked", 1, []]);
  const data = await world.fetched(rdy);
  world.answers.push(data);
  world.take(rdy);
  return data;
}

async function refusal(world, task) {
  const from = world.said.length;
  world.say("task", task);
  const { k, code } = await world.heard((m) => m.k === "nack" || m.k === "rdy", from);
  return k === "nack" ? code : "answered";
}

/** Ask one stage of a phone whose tab is closed during the stage and after its answer was stored; the answer's bytes. */
async function answeredAcrossReloads(world, store, task) {
  const cut = await phone(world, store);
  world.serves = false;
  let from = world.said.length;
  world.say("task", task);
  if (task.message || task.work) await world.heard((m) => m.k === "get", from);
  await cut.leave();
  world.serves = true;
  from = world.said.length;
  const first = await phone(world, store);
  world.say("task", task);
  const rdy = await world.heard((m) => m.k === "rdy", from);
  await first.leave(); // nobody has taken the answer
  from = world.said.length;
  const second = await phone(world, store);
  const again = await world.heard((m) => m.k === "rdy", from);
  world.say("task", task);
  const asked = await world.heard((m) => m.k === "rdy" && m.id !== again.id, from);
  assert.deepEqual([again.update.sha256, asked.update.sha256], [rdy.update.sha256, rdy.update.sha256]);
  const data = await world.fetched(asked);
  world.take(asked);
  while (second.client.state.result.status === null) await new Promise(setImmediate);
  await second.leave();
  return data;
}

test("a phone whose tab is closed at every stage is in the sum with exactly its words, and then its keys are gone", async () => {
  const [world, store] = [new World(), new MemoryStore()];
  const cohort = new Cohort(world);
  const ask = async (stage, message) => answeredAcrossReloads(world, store, await cohort.task(stage, message));
  const roster = await cohort.deal(await ask("prekeys"));
  const relay = await cohort.relay(await ask("shares", roster));
  const question = await cohort.ask(await ask("add", relay), store);
  const total = await cohort.sum();
  const { levels } = new SumScale(SCALE);
  assert.deepEqual([total.at(-2) === levels || total.at(-2) === levels + 1, total.at(-1)], [true, 1]);
  const kept = (await store.get("own/r1/main")).vector;
  const start = new Float32Array(kept.length).map((_, i) => Math.fround(Math.sin(i) / 10));
  for (let i = 0; i < SIZE; i += 1) {
    const word = total[i] > 2 ** 31 ? total[i] - 2 ** 32 : total[i];
    assert.ok(Math.abs(word - ((kept[i] - start[i]) * levels) / SCALE.clip) <= 1, `word ${i}`);
  }
  const shown = readSumMessage("reveal", await ask("show", question));
  assert.deepEqual([[...shown.self.keys()], shown.mask.size], [OTHERS, 0]);
  assert.equal((await store.get("sums")).sums.size, 0);
  const { leave } = await phone(world, store);
  assert.equal(await refusal(world, { ...(await cohort.task("show", question)), exchange: 7 }), "bad_task");
  await leave();
});

test("no root and no secret that follows from one is in anything that a phone sends", async () => {
  const { world, store, cohort, leave, relay } = await begun();
  const question = await cohort.ask(await answered(world, await cohort.task("add", relay)), store);
  const { roots, sums } = await store.get("sums");
  const { root } = sums.get(cohort.name);
  await answered(world, await cohort.task("show", question));
  await leave();
  const secret = await keys.maskSecret(root);
  const self = await keys.selfSecret(root, { federation: FEDERATION, ...cohort.form });
  const secrets = [root, ...roots.values(), secret, self, await keys.sealPrivate(root), await keys.maskPrivate(secret)].map(Buffer.from);
  const wire = Buffer.concat([...world.payloads, ...world.answers]); // an answer may also travel as a text within a message
  for (const each of secrets) {
    assert.equal(wire.includes(each), false);
    for (const from of [0, 1, 2]) assert.equal(wire.includes(each.subarray(from, from + 24).toString("base64")), false); // at any place of a base64 text
  }
  const said = Buffer.from((await keys.publicKeys([...roots.values()][0])).subarray(0, 24)).toString("base64");
  assert.equal(wire.includes(said), true); // so a root would have been found
});

/** A phone with the roster and the relay of a sum. */
async function begun({ tell, ...form } = {}) {
  const [world, store] = [new World(), new MemoryStore()];
  const cohort = new Cohort(world, form);
  const { client, leave } = await phone(world, store, { tell });
  const roster = await cohort.deal(await answered(world, await cohort.task("prekeys")));
  const relay = await cohort.relay(await answered(world, await cohort.task("shares", roster)));
  return { world, store, cohort, client, leave, roster, relay };
}

test("an answer that cannot be stored is never sent, whatever the phone is asked afterwards", async () => {
  const { world, store, cohort, client, leave, relay } = await begun();
  const question = await cohort.ask(await answered(world, await cohort.task("add", relay)), store);
  while (client.state.result.status === null) await new Promise(setImmediate);
  const write = store.write.bind(store);
  store.write = async (put, gone) => {
    if ("update" in put) throw new NoRoom("full");
    return write(put, gone);
  };
  assert.equal(await refusal(world, await cohort.task("show", question)), "no_space");
  const from = world.said.length;
  world.link.emit("close");
  world.link.emit("connect");
  await world.heard((m) => m.k === "st", from);
  store.write = write;
  const dropped = writeSumMessage({ roster: cohort.name, survivors: OTHERS.slice(1), dropped: OTHERS.slice(0, 1) });
  const shown = readSumMessage("reveal", await answered(world, await cohort.task("show", dropped)));
  assert.deepEqual([[...shown.self.keys()], [...shown.mask.keys()]], [OTHERS.slice(1), OTHERS.slice(0, 1)]);
  assert.equal(world.said.slice(from).filter((m) => m.k === "rdy").length, 1);
  await leave();
});

test("a phone trains once in a round, whatever the number of its tasks, and tells its choice where it is asked to", async () => {
  const steps = [];
  const { world, store, cohort, leave, relay } = await begun({ tell: ({ what }) => steps.push(what) });
  const far = encodeVector(new Float32Array(SIZE).fill(3), program.schema, { codec: "f32", kind: "model" });
  const add = await cohort.task("add", relay);
  const centers = [await world.blob(far, "model", true), cohort.start];
  const sum = { ...add.work.sum, choose: "nearest", centers, open: [0, 1], compare: [[0, SIZE]] };
  const tell = { ...add, ...cohort.place("shares"), stage: "tell", message: undefined, exchange: 9, work: { ...add.work, sum: { ...sum, part: "choose" } } };
  assert.deepEqual([...new Uint32Array((await answered(world, tell)).buffer)], [0, 1]);
  const trained = steps.filter((what) => what === "training").length;
  assert.equal(trained, 3);
  const { sum: _sum, ...fit } = add.work;
  await answered(world, { ...add, exchange: 10, stage: "keep", message: undefined, work: { ...fit, slot: "mine" } });
  assert.deepEqual(await store.names("own/"), ["own/r1/main", "own/r1/mine"]);
  assert.deepEqual((await store.get("choice")).weights, [0, 1]);
  await answered(world, { ...tell, exchange: 11 });
  assert.equal(steps.filter((what) => what === "training").length, 2 * trained);
  await leave();
});

test("of weights a phone counts itself at the open centers where it weighs 1/K or more, keeps all of them, and tells none in the clear", async () => {
  const { world, store, cohort, leave, relay } = await begun({ words: 2 });
  const add = await cohort.task("add", relay);
  const far = await world.blob(encodeVector(new Float32Array(SIZE).fill(30), program.schema, { codec: "f32", kind: "model" }), "model", true);
  const container = await world.evaluation();
  const sum = { ...add.work.sum, part: "choose", choose: "shares", sigma: 0.01, centers: [far, cohort.start], open: [0] };
  const count = { ...add, container, step: add.container, work: { ...add.work, sum } };
  await cohort.ask(await answered(world, count), store);
  const { weights } = await store.get("choice");
  assert.deepEqual([...(await cohort.sum())], [Number(2 * weights[0] >= 0.999), 0]);
  assert.equal(await refusal(world, { ...count, stage: "tell", message: undefined, exchange: 9 }), "bad_task");
  assert.ok(weights[0] >= 0.01 && weights[1] >= 0.01 && weights[0] + weights[1] >= 1, `${weights}`);
  await leave();
});

test("a step of k-means tells one nearest centroid of those that take part", async () => {
  const { world, store, cohort, leave, relay } = await begun({ words: 2 * (SIZE + 2) });
  const add = await cohort.task("add", relay);
  const centroids = new Float64Array(2 * SIZE).fill(0.5, 0, SIZE); // the second one is nearer, and closed
  const points = await world.blob(new Uint8Array(centroids.buffer), "points", true);
  const centers = [cohort.start, cohort.start];
  const sum = { ...add.work.sum, part: "points", choose: "nearest", centers, open: [0, 1], compare: [[0, SIZE]], points, points_open: [1, 0] };
  await cohort.ask(await answered(world, { ...add, work: { ...add.work, sum } }), store);
  const total = await cohort.sum();
  assert.deepEqual([total[SIZE + 1], total.at(-1)], [1, 0]);
  assert.ok(total.subarray(0, SIZE).some((word) => word !== 0));
  assert.ok(total.subarray(SIZE + 2).every((word) => word === 0));
  await leave();
});

test("an evaluation is summed, and counts every sample", async () => {
  const { world, store, cohort, leave, relay } = await begun({ words: 5 });
  const add = await cohort.task("add", relay);
  const container = await world.evaluation();
  const probe = { job: "probe", models: [cohort.start], want: ["confusion"], batch: 8, seed: 0, split: "train" };
  const work = { ...probe, sum: { served: "center", usual: 0, scale: SCALE } };
  await cohort.ask(await answered(world, { ...add, container, work }), store);
  const total = await cohort.sum();
  assert.equal(total[1], N);
  assert.equal(total.at(-1), 1);
  await leave();
});

test("orders that are not signed or of another exchange, and work that cannot be, are refused", async () => {
  const { world, cohort, leave, relay, roster } = await begun();
  const add = await cohort.task("add", relay);
  const forged = { ...add, message: { ...add.message, sig: "0".repeat(128) } };
  const wrong = [
    [forged, "bad_signature"],
    [{ ...add, exchange: 6 }, "bad_task"],
    [{ ...add, work: { ...add.work, sum: { ...add.work.sum, scale: { ...SCALE, devices: 4 } } } }, "bad_task"],
    [{ ...(await cohort.task("shares", roster)), exchange: 5 }, "bad_task"],
    [{ ...add, work: { ...add.work, sum: { ...add.work.sum, open: [0], group: 3, choose: "given" } } }, "bad_task"],
  ];
  for (const [task, code] of wrong) assert.equal(await refusal(world, task), code);
  await leave();
});
