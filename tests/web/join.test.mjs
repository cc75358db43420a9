// Who this phone is in a federation: from its link, from an earlier visit, or by its own choice.

import assert from "node:assert/strict";
import { test } from "node:test";

import { awaitModel, findJoin, forgetEarlier, loadIdentity, otherModel } from "../../edge_client/web/join.js";
import { MemoryStore } from "../support/memory_store.mjs";

const OPEN = { federation: "home", open: true };
const BY_LINK = { federation: "home", open: false };
const PLAIN = { hash: "" };
const LINK = { hash: "#id=web-0001&secret=abc" };

/** The part of localStorage that earlier versions of the page wrote. */
function earlier(federation, identity) {
  const kept = { [`fedcenters/identity/${federation}`]: JSON.stringify(identity) };
  return { getItem: (name) => kept[name] ?? null };
}

test("an open federation's phone chooses a name once, and has it at every later visit", async () => {
  const store = new MemoryStore();
  const { id, ...nothing } = await loadIdentity(OPEN, PLAIN, store, null);
  assert.match(id, /^phone-[0-9a-f]{10}$/);
  assert.deepEqual(nothing, {});
  assert.deepEqual(await loadIdentity(OPEN, PLAIN, store, null), { id });
  assert.notEqual((await loadIdentity({ ...OPEN, federation: "other" }, PLAIN, store, null)).id, id);
});

test("a name is used only once the store has it", async () => {
  const store = new MemoryStore();
  const full = Object.assign(new MemoryStore(), { write: () => Promise.reject(new Error("the browser keeps no more")) });
  await assert.rejects(loadIdentity(OPEN, PLAIN, full, null), /keeps no more/);
  let finish;
  const slow = Object.assign(Object.create(store), { write: (put) => new Promise((done) => { finish = () => store.write(put).then(done); }) });
  let given = null;
  const asked = loadIdentity(OPEN, PLAIN, slow, null).then((device) => { given = device; });
  await new Promise(setImmediate);
  assert.equal(given, null);
  await finish();
  await asked;
  assert.deepEqual(await loadIdentity(OPEN, PLAIN, store, null), given);
});

test("a link's name and secret are those of later visits without the link, and another link takes their place", async () => {
  const store = new MemoryStore();
  const device = { id: "web-0001", username: "web-0001", password: "abc" };
  assert.equal(await loadIdentity(BY_LINK, PLAIN, store, null), null);
  assert.deepEqual(await loadIdentity(BY_LINK, LINK, store, null), device);
  assert.deepEqual(await loadIdentity(BY_LINK, PLAIN, store, null), device);
  const other = await loadIdentity(BY_LINK, { hash: "#id=web-0002&secret=xyz" }, store, null);
  assert.deepEqual(other, { id: "web-0002", username: "web-0002", password: "xyz", before: "web-0001" });
  assert.deepEqual(await loadIdentity(BY_LINK, { hash: "#id=web-0002&secret=xyz" }, store, null), other); // the same link once more
  assert.deepEqual(await loadIdentity(BY_LINK, PLAIN, store, null), other);
  await assert.rejects(loadIdentity(BY_LINK, { hash: "#id=a/b" }, store, null));
  assert.deepEqual(await loadIdentity(BY_LINK, PLAIN, store, null), other);
});

test("a link that lost its secret on the way does not take the place of the one that is here", async () => {
  const store = new MemoryStore();
  const device = await loadIdentity(BY_LINK, LINK, store, null);
  await assert.rejects(loadIdentity(BY_LINK, { hash: "#id=web-0001" }, store, null), /not whole.*ask for a new one/);
  assert.deepEqual(await loadIdentity(BY_LINK, PLAIN, store, null), device);
  assert.equal((await loadIdentity(OPEN, { hash: "#id=web-0001" }, store, null)).id, "web-0001"); // needs none
});

test("who does not want the samples of the name before is not asked again, until a link is followed anew", async () => {
  const [store, next] = [new MemoryStore(), { hash: "#id=web-0002&secret=xyz" }];
  await loadIdentity(BY_LINK, LINK, store, null);
  const device = await loadIdentity(BY_LINK, next, store, null);
  assert.equal(device.before, "web-0001");
  await forgetEarlier(BY_LINK, device, store);
  const { before, ...same } = device;
  for (const address of [PLAIN, next]) assert.deepEqual(await loadIdentity(BY_LINK, address, store, null), same);
  await loadIdentity(BY_LINK, LINK, store, null);
  assert.equal((await loadIdentity(BY_LINK, next, store, null)).before, before);
});

test("a phone of an earlier version of the page keeps its name and secret, after localStorage lost them too", async () => {
  const store = new MemoryStore();
  const before = earlier("home", { id: "web-0007", secret: "abc" });
  const device = { id: "web-0007", username: "web-0007", password: "abc" };
  assert.deepEqual(await loadIdentity(BY_LINK, PLAIN, store, before), device);
  assert.deepEqual(await loadIdentity(BY_LINK, PLAIN, store, { getItem: () => null }), device);
  assert.notEqual((await loadIdentity({ federation: "other", open: true }, PLAIN, store, before)).id, "web-0007");
});

test("what the store has goes before what an earlier version left in localStorage", async () => {
  const store = new MemoryStore();
  const { id } = await loadIdentity(OPEN, PLAIN, store, null);
  assert.deepEqual(await loadIdentity(OPEN, PLAIN, store, earlier("home", { id: "phone-old", secret: "" })), { id });
});

const FACTS = { page: "web", federation: "home", broker: "wss://b:1", signing_keys: ["00".repeat(32)], open: true, model: null };

test("what stands before the coordinator, or holds it up, is no coordinator: the page opens with the facts of the last visit", async (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const [store, retries] = [new MemoryStore(), []];
  const answers = (...given) => t.mock.method(globalThis, "fetch", async () => new Response(...given));
  answers(JSON.stringify(FACTS));
  assert.equal((await findJoin("join.json", store)).offline, false);
  for (const given of [["<!doctype html>", { status: 200 }], ["{}", { status: 429 }], ["", { status: 502 }]]) {
    answers(...given);
    const { join, offline, confirmed } = await findJoin("join.json", store);
    assert.deepEqual([join.federation, offline], ["home", true]);
    retries.push(confirmed);
  }
  answers(JSON.stringify(FACTS));
  t.mock.timers.tick(5_000);
  await Promise.all(retries);
  answers("{}", { status: 404 });
  await assert.rejects(findJoin("join.json", store), /answers 404/);
});

test("a coordinator that comes back with a newer page is no error that is left unhandled where the page has ended meanwhile", async (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const store = new MemoryStore();
  const answers = (...given) => t.mock.method(globalThis, "fetch", async () => new Response(...given));
  answers(JSON.stringify(FACTS));
  await findJoin("join.json", store);
  answers("", { status: 502 });
  const { confirmed } = await findJoin("join.json", store);
  answers(JSON.stringify({ ...FACTS, page: "newer" }));
  t.mock.timers.tick(5_000);
  for (let i = 0; i < 9; i += 1) await new Promise(setImmediate); // Node fails a test that leaves one unhandled
  await assert.rejects(confirmed, /older than its coordinator/);
});

test("of two coordinators at one address, as below two paths of a proxy, each page opens with the facts of its own", async (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] }); // no second question
  const store = new MemoryStore();
  const urls = { home: "https://h/phone/join.json", annex: "https://h/annex/phone/join.json" };
  for (const [federation, url] of Object.entries(urls)) {
    t.mock.method(globalThis, "fetch", async () => new Response(JSON.stringify({ ...FACTS, federation })));
    await findJoin(url, store);
  }
  t.mock.method(globalThis, "fetch", async () => new Response("", { status: 502 }));
  for (const [federation, url] of Object.entries(urls)) assert.equal((await findJoin(url, store)).join.federation, federation);
});

test("a coordinator that takes the question and does not answer, or not to its end, is not waited for", async (t) => {
  const store = new MemoryStore();
  const stuck = (signal) => new Promise((_, reject) => signal?.addEventListener("abort", () => reject(signal.reason)));
  t.mock.method(globalThis, "fetch", async () => new Response(JSON.stringify(FACTS)));
  await findJoin("join.json", store);
  t.mock.method(AbortSignal, "timeout", (ms) => {
    assert.ok(ms <= 10_000);
    const timer = new AbortController();
    setImmediate(() => timer.abort(new DOMException("the time is over", "TimeoutError")));
    return timer.signal;
  });
  t.mock.timers.enable({ apis: ["setTimeout"] }); // no second question
  for (const answer of [({ signal }) => stuck(signal), async ({ signal }) => ({ ok: true, status: 200, json: () => stuck(signal) })]) {
    t.mock.method(globalThis, "fetch", (_, options) => answer(options));
    const { join, offline } = await findJoin("join.json", store);
    assert.deepEqual([join.federation, offline], ["home", true]);
  }
});

test("names of classes are checked before they are used: their number and their lengths", async (t) => {
  const given = (classes) => t.mock.method(globalThis, "fetch", async () => new Response(JSON.stringify({ ...FACTS, model: { classes } })));
  const longest = ["\u{1F6B6}".repeat(64)];
  given(longest);
  assert.deepEqual((await findJoin("join.json", new MemoryStore())).join.model.classes, longest);
  for (const wrong of [["n".repeat(65)], new Array(1025).fill("n"), [1], "walking"]) {
    given(wrong);
    await assert.rejects(findJoin("join.json", new MemoryStore()), /model\.classes/);
  }
});

test("a page hears of a coordinator that began anew with another model, and of none with the same", async (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const shown = { input: [1, 8, 8], target: [10], loss: "cross-entropy" };
  const told = async (model) => {
    const answers = [FACTS, { ...FACTS, model }]; // the coordinator prepares it
    t.mock.method(globalThis, "fetch", async () => new Response(JSON.stringify(answers.shift())));
    const said = otherModel("join.json", new MemoryStore(), shown);
    while (answers.length) {
      t.mock.timers.tick(2_000);
      await new Promise(setImmediate);
    }
    return said;
  };
  assert.equal(await told({ ...shown }), "");
  assert.match(await told({ ...shown, input: [4] }), /another model now: load this page again/);
});

test("a page that waits for the model waits also for its coordinator, and ends where that has a newer page", async (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const store = new MemoryStore();
  const answers = [["", { status: 502 }], [JSON.stringify(FACTS)], [JSON.stringify({ ...FACTS, model: { input: [4] } })], [JSON.stringify({ ...FACTS, page: "newer" })]];
  t.mock.method(globalThis, "fetch", async () => new Response(...answers.shift()));
  const passes = async (left) => {
    while (answers.length > left) {
      t.mock.timers.tick(2_000);
      await new Promise(setImmediate);
    }
  };
  const model = awaitModel("join.json", store);
  await passes(1);
  assert.deepEqual((await model).input, [4]);
  const ends = assert.rejects(awaitModel("join.json", store), /older than its coordinator/);
  await passes(0);
  await ends;
});

test("a first visit that finds no coordinator, or one that offers no broker, says what its user can do", async (t) => {
  const cases = [
    [() => new Response("", { status: 502 }), /answers 502\. Look at the phone's network, then load this page again$/],
    [() => { throw new TypeError("Failed to fetch"); }, /cannot reach the coordinator.*then load this page again$/],
    [() => new Response("<!doctype html>"), /not the coordinator.*then load this page again$/], // the page of a hotel's network
    [() => new Response("", { status: 404 }), /answers 404: load this page again, or ask its operator/],
    [() => new Response(JSON.stringify({ ...FACTS, broker: "" })), /no broker for browsers: ask its operator/],
  ];
  for (const [answer, words] of cases) {
    t.mock.method(globalThis, "fetch", async () => answer());
    await assert.rejects(findJoin("join.json", new MemoryStore()), words);
  }
});
