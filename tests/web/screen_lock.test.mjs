// The screen stays on for work that can be done, and for nothing else.

import assert from "node:assert/strict";
import { test } from "node:test";

import { ScreenLock } from "../../edge_client/web/screen_lock.js";

/** A phone that lends its screen; `held` counts the locks that were not given back. */
function lender() {
  const phone = { held: 0, shown: null, page: Object.assign(new EventTarget(), { visibilityState: "visible" }) };
  phone.request = async () => {
    await new Promise(setImmediate);
    phone.held += 1;
    const lock = new EventTarget();
    lock.release = async () => {
      phone.held -= 1;
      lock.dispatchEvent(new Event("release"));
    };
    return lock;
  };
  phone.show = (on) => { phone.shown = on; };
  return phone;
}

async function after(...events) {
  const phone = lender();
  const lock = new ScreenLock(phone);
  for (const event of events) lock.on(event);
  await lock.settled;
  return [phone.held, phone.shown];
}

test("the screen stays on from a task to its answer", async () => {
  assert.deepEqual(await after({ what: "task" }), [1, true]);
  assert.deepEqual(await after({ what: "task" }, { what: "rest", owes: true }), [1, true]);
  assert.deepEqual(await after({ what: "task" }, { what: "rest", owes: true }, { what: "delivering" }), [1, true]);
  assert.deepEqual(await after({ what: "task" }, { what: "rest", owes: true }, { what: "answered" }), [0, false]);
});

test("a task that is refused at once, and one after another, leave no lock behind", async () => {
  assert.deepEqual(await after({ what: "task" }, { what: "refused" }), [0, false]);
  assert.deepEqual(await after({ what: "task" }, { what: "refused" }, { what: "task" }, { what: "task" }, { what: "refused" }), [0, false]);
});

test("a phone whose result waits for a coordinator that is away may sleep, one that trains meanwhile does not", async () => {
  const owed = [{ what: "task" }, { what: "rest", owes: true }];
  assert.deepEqual(await after(...owed, { what: "lost", works: false }), [0, false]);
  assert.deepEqual(await after(...owed, { what: "lost", works: false }, { what: "delivering" }), [1, true]); // it is back
  assert.deepEqual(await after({ what: "task" }, { what: "lost", works: true }), [1, true]);
  assert.deepEqual(await after({ what: "task" }, { what: "ended" }), [0, false]);
});

test("a phone whose owner pauses it may sleep, and stays on when it goes on with its task", async () => {
  assert.deepEqual(await after({ what: "task" }, { what: "paused", works: true }), [0, false]);
  assert.deepEqual(await after({ what: "task" }, { what: "paused", works: true }, { what: "resumed", works: true }), [1, true]);
  assert.deepEqual(await after({ what: "paused", works: false }, { what: "resumed", works: false }), [0, false]);
});
