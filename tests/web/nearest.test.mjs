// The center that a phone took home.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Malformed } from "../../edge_client/web/protocol/errors.js";
import { openCenter } from "../../edge_client/web/nearest.js";

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
