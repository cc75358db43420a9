// A broker that sends while the page trains: what waits takes a bounded part of its memory.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Inbox } from "../../edge_client/web/runtime/inbox.js";

const [MOST, SENT, SIZE] = [1 << 20, 100, 1 << 16];

async function drain(inbox) {
  const events = [];
  for (let event = await inbox.next(0); event !== undefined; event = await inbox.next(0)) events.push(event);
  return events;
}

for (const [what, topic, payload, sent] of [
  ["payloads", "t", new Uint8Array(SIZE), SENT],
  ["topics", "x".repeat(SIZE), new Uint8Array(), SENT],
  ["empty messages", "t", new Uint8Array(), 2_000],
]) {
  test(`${what} beyond the bound are dropped; events are not, nor later messages`, async () => {
    const inbox = new Inbox(MOST);
    for (let number = 0; number < sent; number += 1) inbox.push({ kind: "message", topic, payload });
    inbox.push({ kind: "lost" });
    const heard = await drain(inbox);
    assert.ok(heard.length < sent, `${heard.length} of ${sent} wait`);
    assert.equal(heard.at(-1).kind, "lost");
    assert.equal(inbox.waiting, 0);
    inbox.push({ kind: "message", topic, payload });
    assert.equal((await drain(inbox)).length, 1);
  });
}

test("the page's bound is 64 MiB", async () => {
  const [inbox, payload] = [new Inbox(), new Uint8Array(1 << 20)];
  for (let number = 0; number < 100; number += 1) inbox.push({ kind: "message", topic: "t", payload });
  assert.ok((await drain(inbox)).length <= 64);
});
