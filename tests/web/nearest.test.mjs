// The center that a phone took home.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { Malformed } from "../../edge_client/web/protocol/errors.js";
import { openCenter } from "../../edge_client/web/nearest.js";
import { readCatalog } from "../../edge_client/web/protocol/nearest/catalog.js";

const HOME = { center: 1, losses: [2, 0.5], sha256: "ab", input: [4] };
const store = { get: async () => HOME };
const blobs = { read: async () => new Uint8Array(1) };
const ort = { InferenceSession: { create: async () => ({}) } };

test("a center that cannot be opened is told of and does not end the page", async () => {
  const damaged = { read: async () => { throw new Malformed("bad_hash", "damaged"); } };
  const small = { InferenceSession: { create: async () => { throw new Error("out of memory"); } } };
  assert.deepEqual(await openCenter({ store, blobs: damaged, ort }), { ...HOME, classify: null });
  assert.deepEqual(await openCenter({ store, blobs, ort: small }), { ...HOME, classify: null });
  assert.equal(typeof (await openCenter({ store, blobs, ort })).classify, "function");
});

test("a catalog's names of classes are read, and those beyond the limits are refused", async () => {
  const spelled = JSON.parse(readFileSync(new URL("../golden/vectors.json", import.meta.url))).spelled.catalog;
  const read = (classes) => readCatalog(new TextEncoder().encode(JSON.stringify({ ...JSON.parse(spelled), classes })));
  assert.deepEqual((await read(["walking", "\u8d70"])).classes, ["walking", "\u8d70"]);
  for (const wrong of [["n".repeat(65)], new Array(1025).fill("n"), [1]]) await assert.rejects(read(wrong), /catalog\.classes/);
});
