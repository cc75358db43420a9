// A phone's life against a scripted coordinator, in memory: tasks and uploads, what it asks for, keeps and says again.

import assert from "node:assert/strict";
import { test } from "node:test";

import { totalOf } from "../../edge_client/web/protocol/blocks.js";
import { decodeVector } from "../../edge_client/web/protocol/codecs.js";
import { sha256 } from "../../edge_client/web/protocol/bytes.js";
import { writeMessage } from "../../edge_client/web/protocol/messages.js";
import { MemoryStore } from "../support/memory_store.mjs";
import { N, phone, program, SECRET_SAMPLE, TOPICS, World } from "../support/phone_world.mjs";

test("a task is fetched in the order of trust, carried out, kept, announced, and sent against a credit", async () => {
  const [world, store] = [new World(), new MemoryStore()];
  const { client, leave } = await phone(world, store);
  const task = await world.task();
  world.say("task", task);
  const rdy = await world.heard((m) => m.k === "rdy");
  assert.deepEqual([rdy.run, rdy.round, rdy.exchange, rdy.n, rdy.what, rdy.attempt], ["r1", 1, 0, N, "delta", 0]);
  const order = [...new Set(world.said.filter((m) => m.k === "get").map((m) => m.sha256))];
  assert.deepEqual(order, [task.program.sha256, task.container.sha256, task.start.sha256]);
  assert.equal((await store.get("state")).result.update.sha256, rdy.update.sha256);
  const delta = decodeVector(await world.fetched(rdy), program.schema, { kind: "delta", codec: "i8", base: task.start.sha256 });
  assert.ok(delta.some((value) => value !== 0));
  world.take(rdy);
  while (client.state.result.status === null) await new Promise(setImmediate);
  assert.deepEqual(await store.names("residual/"), [`residual/r1/-/${program.schema.sha256}`]);
  assert.deepEqual(await store.names("update"), []);
  await leave();
});

test("nothing of a sample is in anything that is sent", async () => {
  const [world, store] = [new World(), new MemoryStore()];
  const { leave } = await phone(world, store);
  world.say("task", await world.task());
  const rdy = await world.heard((m) => m.k === "rdy");
  world.say("go", { re: rdy.id, sha256: rdy.update.sha256, shard: 0, window: 16 });
  await world.heard(() => world.said.filter((m) => m.k === "block").length === totalOf(rdy.update));
  await leave();
  const wire = Buffer.concat(world.payloads);
  const rows = Buffer.from(SECRET_SAMPLE.buffer);
  for (let at = 0; at + 8 <= rows.length; at += 4) assert.equal(wire.includes(rows.subarray(at, at + 8)), false);
  const kinds = new Set(world.said.map((m) => m.k));
  assert.deepEqual([...kinds].sort(), ["block", "get", "rdy", "st"]);
});

test("samples that come within a round wait for the next one: a probe evaluates those that the fit before it left out", async () => {
  const [world, store] = [new World(), new MemoryStore()];
  const trained = async (changes) => {
    const from = world.said.length;
    world.say("task", await world.task({ rows: "all-but:5", ...changes }));
    const rdy = await world.heard((m) => m.k === "rdy" || m.k === "nack", from);
    world.take(rdy);
    return rdy.n;
  };
  const before = await phone(world, store, { count: N - 2 });
  assert.equal(await trained({}), N - 2);
  await before.leave();
  const { leave } = await phone(world, store);
  assert.equal(await trained({ exchange: 1 }), N - 2);
  assert.equal(await trained({ round: 2 }), N);
  await leave();
});

test("a finished update is announced again after the tab was closed, and not computed again", async () => {
  const [world, store] = [new World(), new MemoryStore()];
  const first = await phone(world, store);
  world.say("task", await world.task());
  const rdy = await world.heard((m) => m.k === "rdy");
  await first.leave();
  const steps = [];
  const from = world.said.length;
  const second = await phone(world, store, { tell: ({ what }) => steps.push(what) });
  const again = await world.heard((m) => m.k === "rdy", from);
  assert.equal(again.update.sha256, rdy.update.sha256);
  assert.equal(again.attempt, 0);
  world.say("task", await world.task());
  await world.heard((m) => m.k === "rdy" && m.id !== again.id, from);
  assert.equal(steps.includes("training"), false);
  const births = world.said.filter((m) => m.k === "st" && m.s === "on").map((m) => m.bd);
  assert.deepEqual(births, [1, 2]);
  await second.leave();
});

test("the next task waits for the answer that decides which residual its update adds", async () => {
  const [world, store] = [new World(), new MemoryStore()];
  const { leave } = await phone(world, store);
  const task = await world.task();
  world.say("task", task);
  const first = await world.heard((m) => m.k === "rdy");
  const from = world.said.length;
  world.say("task", { ...task, round: 2 }); // the answer to the first update was lost
  const again = await world.heard((m) => m.k === "rdy", from);
  assert.deepEqual([again.round, again.update.sha256], [1, first.update.sha256]);
  const later = world.said.length;
  world.say("task", { ...task, round: 2 }); // the coordinator's connection is new, and may have missed that
  assert.equal((await world.heard((m) => m.k === "rdy", later)).round, 1);
  world.say("ack", { run: "r1", round: 1, exchange: 0, attempt: 0, sha256: first.update.sha256, status: "dup" });
  await world.heard((m) => m.k === "rdy" && m.round === 2, from);
  assert.equal((await store.get(`residual/r1/-/${program.schema.sha256}`)).round, 1);
  await leave();
});

test("a phone announces itself again to each connection of the coordinator that is newer than its own", async () => {
  const [world, store] = [new World(), new MemoryStore()];
  const { leave } = await phone(world, store);
  const births = () => world.said.filter((m) => m.k === "st" && m.s === "on").length;
  await world.lead(5, { link: 1 }, true);
  await world.lead(5, { link: 1 });
  await world.lead(5, { link: 2 });
  await world.heard(() => births() === 2);
  await world.lead(5, { link: 2 });
  await world.lead(5, { link: 3, online: false });
  await world.lead(6, { link: 1 });
  await world.heard(() => births() >= 3);
  await leave();
  assert.equal(births(), 3);
});

test("a phone tells its version, and how much its browser lends where that is known", async (t) => {
  const before = Object.getOwnPropertyDescriptor(globalThis, "navigator");
  t.after(() => (before ? Object.defineProperty(globalThis, "navigator", before) : delete globalThis.navigator));
  for (const [estimate, disk] of [[async () => ({ quota: 5000.7 }), 5000], [() => Promise.reject(new TypeError("not here")), undefined]]) {
    Object.defineProperty(globalThis, "navigator", { configurable: true, value: { storage: { estimate } } });
    const world = new World();
    const { leave } = await phone(world, new MemoryStore());
    const { sw, caps } = world.said.find((m) => m.k === "st");
    assert.deepEqual([sw, caps.disk], ["fedcenters-web web", disk]); // a coordinator serves the page in a folder of its version
    await leave();
  }
});

const TRAINING = { doing: "train", newcomers: "next-round", run: "r1", name: "fesem", round: 1, of: 5 };

test("a phone that came before the training is not told to wait for the next round, one that came later is until then", async () => {
  for (const [first, expected] of [[{ doing: "gather", newcomers: "now", here: 1, needed: 2 }, [undefined, undefined]], [TRAINING, ["next-round", undefined]]]) {
    const [world, store] = [new World(), new MemoryStore()];
    const told = [];
    const tell = ({ what, state }) => what === "coordinator" && told.push(state?.newcomers);
    const { client, leave } = await phone(world, store, { participates: false, tell });
    const next = async (state) => {
      const before = told.length;
      await world.lead(5, { state });
      while (told.length === before) await new Promise(setImmediate);
    };
    await next(first);
    assert.equal(told.at(-1), first.newcomers);
    await client.participate();
    await next(TRAINING);
    await next({ ...TRAINING, round: 2 });
    assert.deepEqual(told.slice(-2), expected);
    await leave();
  }
});

test("what a phone has done is known after the page is loaded again", async () => {
  const [world, store] = [new World(), new MemoryStore()];
  const first = await phone(world, store);
  world.say("task", await world.task());
  const rdy = await world.heard((m) => m.k === "rdy");
  world.take(rdy);
  while (first.client.state.result.status === null) await new Promise(setImmediate);
  const { done, loss, sent } = first.client.state;
  await first.leave();
  assert.deepEqual([done, loss, sent], [1, rdy.metrics.loss, rdy.update.size]);
  const again = (await phone(world, store)).client;
  assert.deepEqual([again.state.done, again.state.loss, again.state.sent], [done, loss, sent]);
  again.stop();
});

test("a result that is done while the connection is lost is not called sent, and goes out on the next connection", async () => {
  const [world, store, told] = [new World(), new MemoryStore(), []];
  const { client, leave } = await phone(world, store, {
    tell: ({ what }) => {
      told.push(what);
      if (what === "training" && client.connected) world.link.end();
    },
  });
  const from = world.said.length;
  client.transport.random = () => 1000; // it dials again when it is told to
  world.say("task", await world.task());
  while (!told.includes("rest")) await new Promise(setImmediate);
  assert.deepEqual([told.includes("lost"), told.includes("delivering")], [true, false]);
  client.transport.hurry();
  await world.heard((m) => m.k === "rdy", from);
  assert.equal(told.at(-1), "delivering");
  await leave();
});

test("a task that is stopped or replaced is dropped, and the next one is done", async () => {
  const [world, store] = [new World(), new MemoryStore()];
  const { leave } = await phone(world, store);
  const long = await world.task({ steps: 100_000 });
  world.say("task", long);
  await world.heard((m) => m.k === "get" && m.sha256 === long.start.sha256);
  world.say("stop", { run: "r1", round: 1, exchange: 0 });
  world.say("task", { ...long, round: 2 });
  world.say("task", await world.task({ round: 3 }));
  const rdy = await world.heard((m) => m.k === "rdy");
  assert.equal(rdy.round, 3);
  assert.equal(world.said.some((m) => m.k === "nack"), false);
  await leave();
});

test("a phone whose round is over before its part is there says so, in the midst of training and of sending", async () => {
  const [world, told] = [new World(), []];
  const { leave } = await phone(world, new MemoryStore(), { tell: ({ what, status }) => told.push(status ?? what) });
  const stopped = async (round) => {
    const from = world.said.length;
    world.say("stop", { run: "r1", round, exchange: 0 });
    world.say("rebirth", {}); // is answered after it
    await world.heard((m) => m.k === "st", from);
    return told.filter((what) => what === "late").length;
  };
  world.say("task", await world.task({ steps: 100_000 }));
  while (!told.includes("training")) await new Promise(setImmediate);
  assert.equal(await stopped(1), 1);
  world.say("task", await world.task({ round: 2 }));
  await world.heard((m) => m.k === "rdy");
  assert.equal(await stopped(2), 2);
  assert.equal(await stopped(2), 2); // it was told already
  const from = world.said.length;
  world.say("task", await world.task({ round: 3, reply: { codec: "f32", base: "start", max_size: 1 << 20 } }));
  await world.heard((m) => m.k === "rdy", from);
  world.say("task", await world.task({ round: 4, steps: 100_000 }));
  told.length = 0;
  while (!told.includes("training")) await new Promise(setImmediate);
  await stopped(3);
  assert.deepEqual(told.filter((what) => ["rest", "late"].includes(what)), []); // the screen stays on for the one that goes on
  await leave();
});

test("a round that is over is played again only where a later epoch asks, as after a backup", async () => {
  const [world, store, begun] = [new World(), new MemoryStore(), []];
  const { client, leave } = await phone(world, store, { tell: ({ what, round }) => what === "task" && begun.push(round) });
  await world.lead(1);
  world.say("task", await world.task({ round: 3 }));
  world.take(await world.heard((m) => m.k === "rdy"));
  while (client.state.result.status === null) await new Promise(setImmediate);
  const from = world.said.length;
  world.say("task", await world.task({ round: 1 }));
  world.say("rebirth", {}); // is answered after it, in the midst of a task too
  await world.heard((m) => m.k === "st", from);
  world.say("task", { ...(await world.task({ round: 2 })), epoch: client.state.result.epoch + 1 });
  const rdy = await world.heard((m) => m.k === "rdy", from);
  assert.equal(rdy.round, 2);
  assert.deepEqual(begun, [3, 2]);
  assert.equal(world.said.some((m) => m.k === "nack"), false);
  await leave();
});

test("an update that was taken is computed again where a coordinator that was restored from a backup asks for it", async () => {
  const [world, store] = [new World(), new MemoryStore()];
  const { client, leave } = await phone(world, store);
  await world.lead(1);
  const task = await world.task({ reply: { codec: "f32", base: "start", max_size: 1 << 20 } });
  world.say("task", task);
  const first = await world.heard((m) => m.k === "rdy");
  const data = await world.fetched(first);
  world.take(first);
  while (client.state.result.status === null) await new Promise(setImmediate);
  const from = world.said.length;
  world.say("task", { ...task, epoch: client.state.result.epoch + 1 });
  assert.deepEqual(await world.fetched(await world.heard((m) => m.k === "rdy", from)), data);
  await leave();
});

test("an update that the browser lost is computed again when its task comes again", async () => {
  const [world, store] = [new World(), new MemoryStore()];
  const { client, leave } = await phone(world, store);
  const task = await world.task();
  world.say("task", task);
  const first = await world.heard((m) => m.k === "rdy");
  await store.write({}, ["update"]);
  world.say("go", { re: first.id, sha256: first.update.sha256, shard: 0, window: 4, have: undefined });
  while (client.state.result !== null) await new Promise(setImmediate);
  const from = world.said.length;
  world.say("task", task);
  assert.equal(await sha256(await world.fetched(await world.heard((m) => m.k === "rdy", from))), first.update.sha256);
  await leave();
});

test("a stored result that cannot be announced is forgotten, and its task is done again", async () => {
  const [world, store] = [new World(), new MemoryStore()];
  const first = await phone(world, store);
  const task = await world.task();
  world.say("task", task);
  await world.heard((m) => m.k === "rdy");
  await first.leave();
  const state = await store.get("state");
  state.result.metrics.loss = Infinity; // as pages stored one that had diverged
  await store.write({ state });
  const from = world.said.length;
  const { client, leave } = await phone(world, store);
  world.say("task", task);
  await world.heard((m) => m.k === "rdy", from);
  assert.ok(Number.isFinite(client.state.result.metrics.loss));
  await leave();
});

test("an error to a request of an earlier task stops no later one", async () => {
  const [world, store] = [new World(), new MemoryStore()];
  const { leave } = await phone(world, store);
  world.serves = false;
  const task = await world.task();
  world.say("task", task);
  const earlier = await world.heard((m) => m.k === "get");
  world.say("task", { ...task, round: 2 });
  const later = await world.heard((m) => m.k === "get" && m.id !== earlier.id);
  world.say("err", { re: earlier.id, code: "not_yours" });
  world.serves = true;
  world.serve(later);
  const said = await world.heard((m) => m.k === "rdy" || m.k === "nack");
  assert.deepEqual([said.k, said.round], ["rdy", 2]);
  await leave();
});

test("a task that is sent again has its new deadline", async () => {
  const [world, store] = [new World(), new MemoryStore()];
  world.serves = false;
  const { leave } = await phone(world, store);
  const task = await world.task();
  world.say("task", { ...task, left_ms: 1 });
  await world.heard((m) => m.k === "get");
  world.serves = true;
  world.say("task", { ...task, left_ms: 600_000 });
  world.say("rebirth", {}); // it asks for its blocks again
  await world.heard((m) => m.k === "rdy");
  assert.equal(world.said.some((m) => m.k === "nack"), false);
  await leave();
});

test("a phone that cannot dial again ends also while it works on a task, and says why", async () => {
  const world = new World();
  const { client, life } = await phone(world, new MemoryStore());
  world.serves = false;
  world.say("task", await world.task());
  await world.heard((m) => m.k === "get");
  client.inbox.push({ kind: "failed", error: new Error("nothing is stored any more") });
  await assert.rejects(Promise.race([life, new Promise((resolve) => setTimeout(resolve, 5_000))]), /nothing is stored any more/);
});


test("the bytes of an update are read and hashed once for a credit, not for each block", async () => {
  const [world, store] = [new World(), new MemoryStore()];
  const { client, leave } = await phone(world, store);
  client.block = 4096;
  world.say("task", await world.task());
  const rdy = await world.heard((m) => m.k === "rdy");
  assert.ok(totalOf(rdy.update) > 1);
  const get = store.get.bind(store);
  let reads = 0;
  store.get = (name) => {
    reads += name === "update" ? 1 : 0;
    return get(name);
  };
  await world.fetched(rdy);
  assert.equal(reads, 1);
  await leave();
});

test("centers that the coordinator takes back are offered no more, nor those of a connection that is lost", async () => {
  const [world, told] = [new World(), []];
  const { client, leave } = await phone(world, new MemoryStore(), { tell: (event) => event.what === "catalog" && told.push(event.sha256) });
  const catalog = await world.blob(new Uint8Array(100), "catalog", true);
  const offer = writeMessage("cat", { id: "c", t: 0, epoch: world.epoch, ver: 1, catalog });
  const takesIn = async (payload, retain) => {
    const from = world.said.length;
    world.link.emit("message", TOPICS.catalog(), payload, { retain });
    world.say("rebirth", {}); // is answered after it
    await world.heard((m) => m.k === "st", from);
  };
  await takesIn(offer, true);
  assert.equal(client.pointer.catalog.sha256, catalog.sha256);
  await takesIn(new Uint8Array(), false);
  assert.equal(client.pointer, null);
  assert.deepEqual(told, [catalog.sha256, null]);
  await assert.rejects(client.nearest(), /no centers yet/);
  await takesIn(offer, true);
  world.link.end();
  while (client.connected) await new Promise(setImmediate);
  assert.equal(client.pointer, null);
  await leave();
});
