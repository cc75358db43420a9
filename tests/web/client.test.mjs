// A phone's life against a scripted coordinator, in memory: what it asks for, refuses, keeps and says again.

import assert from "node:assert/strict";
import { test } from "node:test";

import { totalOf } from "../../edge_client/web/protocol/blocks.js";
import { decodeVector } from "../../edge_client/web/protocol/codecs.js";
import { sha256 } from "../../edge_client/web/protocol/bytes.js";
import { canonicalJson } from "../../edge_client/web/protocol/json.js";
import { MemoryStore } from "../support/memory_store.mjs";
import { CID, N, ort, phone, program, SECRET_SAMPLE, TOPICS, World } from "../support/phone_world.mjs";

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

test("a tab closed during a download asks for the missing blocks only", async () => {
  const [world, store] = [new World(), new MemoryStore()];
  const first = await phone(world, store);
  const task = await world.task();
  const total = totalOf(task.start);
  assert.ok(total > 2);
  const serve = world.serve.bind(world);
  world.serve = (get) => (get.sha256 === task.start.sha256 ? serve({ ...get, at: [[0, 2]] }) : serve(get));
  world.say("task", task);
  while ((await store.names(`block/${task.start.sha256}`)).length < 2) await new Promise(setImmediate);
  await first.leave();
  delete world.serve;
  world.serve = World.prototype.serve;
  const from = world.said.length;
  const second = await phone(world, store);
  world.say("task", task);
  await world.heard((m) => m.k === "rdy", from);
  const asked = world.said.slice(from).filter((m) => m.k === "get").flatMap((m) => m.at.map(([at]) => [m.sha256, at]));
  assert.ok(asked.every(([hash, at]) => hash === task.start.sha256 && at >= 2), JSON.stringify(asked));
  await second.leave();
});

test("what is not signed, not listed, or of an old coordinator is refused before a byte of it is fetched", async () => {
  const [world, told] = [new World(), []];
  const { leave } = await phone(world, new MemoryStore(), { tell: ({ what }) => told.push(what) });
  const good = await world.task();
  const evil = await world.blob(new Uint8Array(5000).fill(1), "container");
  const bare = { ...good.start };
  delete bare.key;
  delete bare.sig;
  const forged = { ...good.start, sig: "0".repeat(128) };
  const cases = [
    [{ program: { ...good.program, sig: "0".repeat(128) } }, "bad_signature"],
    [{ start: bare }, "bad_signature"],
    [{ start: forged }, "bad_signature"],
    [{ container: evil }, "bad_program"],
    [{ mu: 0.5 }, "bad_task"],
    [{ schema: "0".repeat(64) }, "bad_schema"],
    [{ left_ms: 0 }, "deadline"],
    [{ reply: { codec: "f32", base: "start", max_size: 10 } }, "too_big"],
    [{ start: "own", reply: { codec: "f32", base: "zero", max_size: 1 << 20 } }, "no_own_model"],
    [{ rows: "posterior:0" }, "no_posterior"],
    [{ rows: "all-but:1000000" }, "no_data"],
  ];
  for (const [round, [changes, code]] of cases.entries()) {
    const from = world.said.length;
    const fields = { ...good, ...changes, round: round + 1 };
    const id = `x-${round}`;
    world.link.emit("message", TOPICS.down(CID), canonicalJson({ v: 1, k: "task", id, t: 0, epoch: 1, ...fields }), { retain: false });
    const nack = await world.heard((m) => m.k === "nack" || m.k === "rdy", from);
    assert.deepEqual([nack.k, nack.code, nack.re], ["nack", code, id]);
    const fetched = world.said.slice(from).filter((m) => m.k === "get").map((m) => m.sha256);
    if (["bad_signature", "bad_program"].includes(code)) {
      assert.equal(fetched.some((hash) => [evil.sha256, good.start.sha256].includes(hash)), false);
    }
  }
  assert.equal(told.includes("unknown-key"), false);
  await world.lead(5, { sig: "0".repeat(128) });
  while (!told.includes("unknown-key")) await new Promise(setImmediate);
  await world.lead(2 ** 53 - 1);
  world.epoch = 2 ** 53 - 1;
  world.say("rebirth", {});
  world.epoch = 5;
  await world.lead(5);
  world.say("rebirth", {});
  world.epoch = 4;
  const re = world.say("task", { ...good, round: 90 });
  const late = await world.heard((m) => m.k === "nack" && m.re === re);
  assert.equal(late.code, "old_epoch");
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

test("a blob whose hash is wrong is fetched once more, then refused; nothing of it stays", async () => {
  const [world, store] = [new World(), new MemoryStore()];
  const { leave } = await phone(world, store);
  const task = await world.task();
  const data = world.blobs.get(task.start.sha256).slice();
  data[data.length - 1] ^= 1;
  world.blobs.set(task.start.sha256, data);
  world.say("task", task);
  const nack = await world.heard((m) => m.k === "nack");
  assert.equal(nack.code, "bad_hash");
  assert.equal(world.served.filter((name) => name === `${task.start.sha256.slice(0, 8)}/0`).length, 2);
  assert.deepEqual(await store.names(`block/${task.start.sha256}`), []);
  await leave();
});

test("who has not said that the phone takes part is asked for nothing, and says so", async () => {
  const [world, store] = [new World(), new MemoryStore()];
  const { client, leave } = await phone(world, store, { participates: false });
  assert.equal(world.said.find((m) => m.k === "st").caps.n, 0);
  world.say("task", await world.task());
  const nack = await world.heard((m) => m.k === "nack");
  assert.deepEqual([nack.code, nack.retry_ms], ["unavailable", 60_000]);
  const from = world.said.length;
  await client.participate();
  assert.equal((await world.heard((m) => m.k === "st", from)).caps.n, N);
  world.say("task", await world.task({ round: 2 }));
  await world.heard((m) => m.k === "rdy");
  await leave();
  assert.equal(world.said.at(-1).s, "off");
});

test("a browser that does not tell how much it lends is a device without that number", async (t) => {
  const before = Object.getOwnPropertyDescriptor(globalThis, "navigator");
  t.after(() => (before ? Object.defineProperty(globalThis, "navigator", before) : delete globalThis.navigator));
  for (const [estimate, disk] of [[async () => ({ quota: 5000.7 }), 5000], [() => Promise.reject(new TypeError("not here")), undefined]]) {
    Object.defineProperty(globalThis, "navigator", { configurable: true, value: { storage: { estimate } } });
    const world = new World();
    const { leave } = await phone(world, new MemoryStore());
    assert.equal(world.said.find((m) => m.k === "st").caps.disk, disk);
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

test("a round that is over is played again only where a later epoch asks, as after a backup", async () => {
  const [world, store] = [new World(), new MemoryStore()];
  const { client, leave } = await phone(world, store);
  world.say("task", await world.task({ round: 3 }));
  world.take(await world.heard((m) => m.k === "rdy"));
  while (client.state.result.status === null) await new Promise(setImmediate);
  const from = world.said.length;
  world.say("task", await world.task({ round: 1 }));
  world.say("task", { ...(await world.task({ round: 2 })), epoch: client.state.result.epoch + 1 });
  const rdy = await world.heard((m) => m.k === "rdy", from);
  assert.equal(rdy.round, 2);
  assert.equal(world.said.some((m) => m.k === "nack"), false);
  await leave();
});

test("an update that was taken is computed again where a coordinator that was restored from a backup asks for it", async () => {
  const [world, store] = [new World(), new MemoryStore()];
  const { client, leave } = await phone(world, store);
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

/** ONNX Runtime Web of a version, whose steps are counted; `spoil` may write into the tensors of each. */
function runtimeOf(version, spoil = () => {}) {
  const made = { ...ort, Tensor: ort.Tensor, env: { ...ort.env, versions: { web: version } }, steps: 0 };
  made.InferenceSession = {
    create: async (...given) => {
      const session = await ort.InferenceSession.create(...given);
      const run = async (tensors) => {
        if ("lr" in tensors) made.steps += 1;
        spoil(tensors);
        return session.run(tensors);
      };
      return { inputNames: session.inputNames, outputNames: session.outputNames, run, release: () => session.release() };
    },
  };
  return made;
}

test("a runtime that computes wrongly trains nothing, and the page and the coordinator are told", async () => {
  for (const port of ["linear", "anchor", "lr", "velocity"]) {
    const [world, store, told] = [new World(), new MemoryStore(), []];
    const runtime = runtimeOf("1.2.3", (tensors) => {
      for (const [name, tensor] of Object.entries(tensors)) if (name.split("/")[0] === port) tensor.data.fill(0);
    });
    const { leave } = await phone(world, store, { runtime, tell: (event) => told.push(event) });
    assert.equal(world.said.find((m) => m.k === "st").caps.runtime, "onnxruntime-web 1.2.3");
    world.say("task", await world.task());
    const nack = await world.heard((m) => m.k === "nack");
    assert.equal(nack.code, "no_engine");
    assert.match(nack.detail, /^onnxruntime-web 1\.2\.3 computes wrongly in this browser: /);
    const [refused] = world.said.findLast((m) => m.k === "st").caps.refused;
    assert.deepEqual([refused.engine, refused.runtime], ["onnx", "onnxruntime-web 1.2.3"]);
    assert.ok(refused.difference > 10 * program.golden.onnx.tolerance, `${port}: ${refused.difference}`);
    assert.equal(told.find(({ what }) => what === "refused").detail, nack.detail);
    await leave();
  }
});

test("the golden run is made once for each version of the runtime", async () => {
  const [world, store] = [new World(), new MemoryStore()];
  const golden = program.golden.onnx.losses.length;
  const counts = [];
  for (const [round, version] of ["1.2.3", "1.2.3", "1.2.4"].entries()) {
    const runtime = runtimeOf(version);
    const { leave } = await phone(world, store, { runtime });
    const from = world.said.length;
    world.say("task", await world.task({ round: round + 1 }));
    world.take(await world.heard((m) => m.k === "rdy" && m.round === round + 1, from));
    counts.push(runtime.steps);
    await leave();
  }
  assert.deepEqual(counts, [golden + 3, 3, golden + 3]);
  assert.equal((await store.names("golden/")).length, 1);
});

test("a golden run that fails refuses its task and is made again for the next; where memory has ended the runtime is not blamed", async () => {
  for (const [why, code] of [["ERROR_CODE: 6, ERROR_MESSAGE: std::bad_alloc", "no_space"], ["ERROR_CODE: 1", "no_engine"]]) {
    const [world, store] = [new World(), new MemoryStore()];
    let fails = true;
    const runtime = runtimeOf("1.2.3", () => {
      if (fails) throw new Error(`failed to call OrtRun(). ${why}`);
    });
    const { client, leave } = await phone(world, store, { runtime });
    world.say("task", await world.task());
    assert.equal((await world.heard((m) => m.k === "nack")).code, code);
    assert.equal(world.said.some((m) => m.caps?.refused), code === "no_engine");
    fails = false;
    const from = world.said.length;
    world.say("task", await world.task({ round: 2 }));
    assert.equal((await world.heard((m) => ["nack", "rdy"].includes(m.k), from)).k, "rdy");
    assert.deepEqual(client.refused, []);
    await leave();
  }
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

test("a message is refused in words that can be written, wherever they are cut", async () => {
  const world = new World();
  const { leave } = await phone(world, new MemoryStore());
  const task = { ...(await world.task()), job: "\u{1F600}".repeat(60), v: 1, k: "task", id: "x", t: 0, epoch: 1 };
  world.link.emit("message", TOPICS.down(CID), canonicalJson(task), { retain: false });
  const from = world.said.length;
  world.say("task", { ...(await world.task()), left_ms: 0 }); // what comes after it is answered in any case
  await world.heard((m) => m.k === "nack" && m.code === "deadline", from);
  assert.deepEqual(world.said.filter((m) => m.re === "x").map((m) => m.code), ["bad_field"]);
  await leave();
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
