// What a phone refuses: whose it is, why, and in which words; with a runtime that computes wrongly, too.

import assert from "node:assert/strict";
import { test } from "node:test";

import { canonicalJson } from "../../edge_client/web/protocol/json.js";
import { MemoryStore } from "../support/memory_store.mjs";
import { CID, N, ort, phone, program, TOPICS, World } from "../support/phone_world.mjs";

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
  const now = world.say("task", { ...good, round: 89, left_ms: 0 });
  assert.equal((await world.heard((m) => m.re === now)).code, "deadline"); // an epoch beyond all measure was not noted
  world.epoch = 4;
  const re = world.say("task", { ...good, round: 90 });
  const late = await world.heard((m) => m.k === "nack" && m.re === re);
  assert.equal(late.code, "old_epoch");
  await leave();
});

test("a coordinator that speaks another version of the protocol is sent nothing but a farewell", async () => {
  const world = new World();
  const { life } = await phone(world, new MemoryStore());
  await world.lead(1);
  world.say("task", await world.task());
  await world.heard((m) => m.k === "rdy");
  const from = world.said.length;
  await world.lead(2, { proto: [2] }); // it does not know what was announced
  await assert.rejects(life, /version 2 of the protocol; load this page again/);
  assert.deepEqual(world.said.slice(from).map(({ k, s: state }) => [k, state]), [["st", "off"]]);
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
