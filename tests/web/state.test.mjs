// Which coordinator this phone follows, from visit to visit; a storage that its browser takes away.

import assert from "node:assert/strict";
import { test } from "node:test";

import { State } from "../../edge_client/web/runtime/state.js";
import { Store } from "../../edge_client/web/runtime/store.js";
import { MemoryStore } from "../support/memory_store.mjs";

const [KEY, NEXT_KEY, OTHER_KEY] = ["1", "2", "3"].map((digit) => digit.repeat(16));
const opened = (store, ...trusted) => State.open(store, "home", "phone-1", trusted);

test("an epoch counts as long as the key that signed it is trusted: a federation that begins anew begins with epoch 1", async () => {
  const store = new MemoryStore();
  assert.equal(await (await opened(store, KEY)).seeEpoch(7, KEY), true);
  const both = await opened(store, KEY, NEXT_KEY);
  assert.equal(await both.seeEpoch(6, NEXT_KEY), false);
  assert.equal(await both.seeEpoch(8, NEXT_KEY), true);
  assert.equal(await (await opened(store, NEXT_KEY)).seeEpoch(7, NEXT_KEY), false);
  const anew = await opened(store, OTHER_KEY);
  assert.equal(anew.epoch, 0);
  assert.equal(await anew.seeEpoch(1, OTHER_KEY), true);
  assert.equal((await opened(store, OTHER_KEY)).epoch, 1);
});

test("a task, which is not signed, fills no storage with slots, and bars none of the next coordinator by its epoch", async () => {
  const state = await opened(new MemoryStore(), KEY);
  await state.seeEpoch(5, KEY);
  const result = { key: { run: "r1", round: 2 ** 32 - 1, exchange: 0 }, epoch: 2 ** 53 - 1, n: 1, what: "stats", metrics: {} };
  const store = (slot, run = "r1") => state.storeResult({ ...result, key: { ...result.key, run } }, { data: new Uint8Array(1), schema: {}, own: [slot, new Float32Array(1)] });
  for (let i = 0; i < 64; i += 1) await store(`s${i}`);
  assert.equal(state.result.epoch, 5);
  await assert.rejects(store("more"), { code: "bad_task" });
  await store("s0");
  await store("more", "r2");
});

test("an epoch that an earlier version of the page noted without its key counts, and gets one", async () => {
  const store = new MemoryStore();
  await store.write({ state: { signedEpoch: 7 } });
  assert.equal(await (await opened(store, KEY)).seeEpoch(6, KEY), false);
  assert.equal(await (await opened(store, KEY)).seeEpoch(7, KEY), true);
  assert.equal((await opened(store, OTHER_KEY)).epoch, 0);
});

test("what compression cost is added in the next round, and halved for each round in which the phone had no part", async () => {
  const [store, schema] = [new MemoryStore(), { sha256: "a" }];
  await store.write({ "residual/r1/-/a": { vector: Float32Array.of(4, -1), round: 2 } });
  const state = await opened(store, KEY);
  const added = async (round, run = "r1") => [...((await state.residual({ run, round }, undefined, schema)) ?? [])];
  assert.deepEqual([await added(3), await added(4), await added(6), await added(3, "r2")], [[4, -1], [2, -0.5], [0.5, -0.125], []]);
});

test("tasks that name ever new centers leave no more than 64 residuals, the newest", async () => {
  const store = new MemoryStore();
  const state = await opened(store, KEY);
  for (let i = 0; i < 130; i += 1) {
    const result = { key: { run: "r1", round: i, exchange: 0 }, epoch: 1, n: 1, what: "delta", metrics: {}, update: {} };
    await state.storeResult(result, { data: new Uint8Array(1), schema: { sha256: "a" }, residual: Float32Array.of(i) }, i);
    await state.commitAcknowledgement("ok");
  }
  const rounds = await Promise.all((await store.names("residual/")).map(async (name) => (await store.get(name)).round));
  assert.deepEqual(rounds.sort((a, b) => a - b), Array.from({ length: 64 }, (_, i) => 66 + i));
});

test("what was being written or read when the browser took the storage away fails with the words for that", async () => {
  const error = new DOMException("Connection is closing because of: Force close delete origin", "AbortError");
  const request = { error };
  const transaction = { error, objectStore: () => ({ get: () => request, put: () => request }) };
  const store = new Store({ transaction: () => transaction });
  const writes = store.write({ name: 1 });
  transaction.onabort();
  await assert.rejects(writes, /^Error: this browser has deleted what this page had kept/);
  const reads = store.get("name");
  request.onerror();
  await assert.rejects(reads, /^Error: this browser has deleted what this page had kept/);
});
