// A download goes on at once where what was asked for is lost. The clock stands: no request is ever late, so that time asks for nothing.

import assert from "node:assert/strict";
import { test } from "node:test";

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
