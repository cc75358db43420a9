// A download goes on where it was, after a reload too, and at once where what was asked for is lost. The clock stands: no request is ever late, so that time asks for nothing.

import assert from "node:assert/strict";
import { test } from "node:test";

import { totalOf } from "../../edge_client/web/protocol/blocks.js";
import { MemoryStore } from "../support/memory_store.mjs";
import { phone, World } from "../support/phone_world.mjs";

const LOSSES = {
  "a coordinator that was started again": async (world) => {
    world.epoch = 2;
    await world.lead(2);
  },
  "a coordinator that does not know the phone": async (world) => world.say("rebirth", {}),
  "a broker that was started again": async (world, client) => {
    const from = world.said.length;
    world.link.end();
    while (client.connected) await new Promise(setImmediate);
    client.transport.hurry();
    await world.heard((m) => m.k === "st", from);
  },
};

for (const [who, lose] of Object.entries(LOSSES)) {
  test(`${who} is asked at once for the blocks that are missing, and asked for nothing twice without a cause`, async () => {
    const [world, told] = [new World(), []];
    const { client, leave } = await phone(world, new MemoryStore(), { now: () => 0, tell: ({ what }) => told.push(what) });
    client.transport.random = () => 1000; // it dials when it is told to
    world.serves = false;
    const asked = () => world.said.filter((m) => m.k === "get").map(({ sha256, at }) => [sha256, at]);
    const hears = async (event) => {
      const from = told.length;
      await event();
      while (!told.slice(from).includes("coordinator")) await new Promise(setImmediate);
    };
    await hears(() => world.lead(1));
    const task = await world.task();
    world.say("task", task);
    await world.heard((m) => m.k === "get");
    await hears(() => world.lead(1)); // the same one, as when a round begins
    assert.equal(asked().length, 1);
    await lose(world, client);
    world.say("stop", { run: task.run, round: task.round, exchange: task.exchange });
    while (!told.includes("rest")) await new Promise(setImmediate);
    assert.deepEqual(asked(), [asked()[0], asked()[0]]);
    await leave();
  });
}

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
