// A phone whose browser gives its page no more room: what it refuses, what it keeps in memory, and how it goes on.

import assert from "node:assert/strict";
import { test } from "node:test";

import { NoRoom } from "../../edge_client/web/runtime/store.js";
import { MemoryStore } from "../support/memory_store.mjs";
import { phone, program, World } from "../support/phone_world.mjs";

/** The store takes nothing while `full`, as a browser without room. */
function fillable() {
  const store = new MemoryStore();
  const write = store.write.bind(store);
  store.full = false;
  store.write = async (put, gone) => {
    if (store.full && Object.keys(put).length) throw new NoRoom("no room");
    return write(put, gone);
  };
  return store;
}

test("a phone without room says so for each task, stays connected, and takes part again by itself when there is room", async () => {
  const [world, store, told] = [new World(), fillable(), []];
  const { client, leave } = await phone(world, store, { tell: ({ what }) => told.push(what) });
  store.full = true;
  await world.lead(5);
  const task = await world.task();
  world.epoch = 5;
  for (const round of [1, 2]) {
    const from = world.said.length;
    world.say("task", { ...task, round });
    const nack = await world.heard((m) => m.k === "nack", from);
    assert.deepEqual([nack.code, nack.detail, nack.round], ["no_space", "no room", round]);
  }
  assert.equal(told.filter((what) => what === "full").length, 2);
  await client.nextWill(); // of a next connection, whose birth is in memory
  world.epoch = 4;
  const from = world.said.length;
  world.say("task", { ...task, round: 3 });
  assert.equal((await world.heard((m) => m.k === "nack", from)).code, "old_epoch"); // what was seen counts
  store.full = false;
  world.epoch = 5;
  world.say("task", { ...task, round: 4 });
  assert.equal((await world.heard((m) => m.k === "rdy")).round, 4);
  const { signedEpoch, birth } = await store.get("state");
  assert.deepEqual([signedEpoch, birth], [5, 2]);
  assert.equal(client.failure, null);
  await leave();
});

test("an answer that finds no room is asked for again, and nothing is trained on a residual that it would have changed", async () => {
  const [world, store, told] = [new World(), fillable(), []];
  const { client, leave } = await phone(world, store, { tell: ({ what }) => told.push(what) });
  const task = await world.task();
  world.say("task", task);
  const first = await world.heard((m) => m.k === "rdy");
  store.full = true;
  world.take(first);
  while (!told.includes("full")) await new Promise(setImmediate);
  assert.equal(client.state.result.status, null);
  const again = async () => {
    const from = world.said.length;
    world.say("task", { ...task, round: 2 });
    const rdy = await world.heard((m) => m.k === "rdy", from);
    assert.deepEqual([rdy.round, rdy.update.sha256], [1, first.update.sha256]);
    world.say("ack", { run: "r1", round: 1, exchange: 0, attempt: 0, sha256: first.update.sha256, status: "dup" });
    return world.heard((m) => m.k === "nack" || (m.k === "rdy" && m.round === 2), from);
  };
  assert.equal((await again()).code, "no_space");
  store.full = false;
  assert.equal((await again()).k, "rdy");
  assert.equal((await store.get(`residual/r1/-/${program.schema.sha256}`)).round, 1);
  await leave();
});
