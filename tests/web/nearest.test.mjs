// The center that a phone took home.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { Malformed } from "../../edge_client/web/protocol/errors.js";
import { findCenter, openCenter } from "../../edge_client/web/nearest.js";
import { chooseCenter, readCatalog } from "../../edge_client/web/protocol/nearest/catalog.js";

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

test("a center that gives no number is no nearest one, and stands in the way of no other", () => {
  assert.equal(chooseCenter([NaN, 0.5, 1], 2), 1);
  assert.equal(chooseCenter([3, NaN], 2), null);
});

const N = 70;

/** A page's client beside a signed catalog; `evaluated` is awaited before each batch. */
function visitor(changes, evaluated = () => {}) {
  const catalog = JSON.parse(readFileSync(new URL("../golden/vectors.json", import.meta.url))).spelled.catalog;
  const program = { containers: {}, loss: "cross-entropy", classes: 2, input: [2], schema: { sha256: "0".repeat(64), nParams: 1, tensors: [] } };
  const learner = {
    fixedBatch: null,
    evaluate: async (_models, { n }, _batch, between) => {
      evaluated();
      await between();
      return { losses: [new Float64Array(n).fill(0.1)] };
    },
  };
  const data = { n: N, x: new Float32Array(2 * N), labels: new Int32Array(N) };
  const client = {
    now: () => 0, stopping: false, task: null, pointer: { catalog: { sha256: "1".repeat(64) } }, sent: [], kept: [], sizes: [],
    blobs: { read: async () => new TextEncoder().encode(catalog), keepOnly: async () => {} },
    downloader: { arrived: 0 },
    fetch: async () => {},
    local: async () => ({ train: data, test: { n: 0 } }),
    taskRunner: {
      checkSignature: async () => {}, program: async () => program, checkContainer: () => {}, frozen: () => [],
      learner: async () => learner, vector: async () => new Float32Array(1),
    },
    sender: { send: (kind, fields) => `q${client.sent.push({ kind, ...fields })}` },
    inbox: { next: async () => undefined },
    handle: async () => {
      client.answer = { re: "q1", center: 0, fit: "well" };
    },
    store: { get: async () => undefined, write: async (put) => client.kept.push(put) },
    ort: {
      Tensor: class {
        constructor(_type, values, dims) {
          Object.assign(this, { values, dims });
        }
      },
      InferenceSession: {
        create: async () => ({
          inputNames: ["x"], outputNames: ["logits"], release: async () => {},
          run: async ({ x }) => {
            client.sizes.push(x.dims[0]);
            return { logits: { data: Float32Array.from({ length: 2 * x.dims[0] }, (_, i) => Number(i % 2 === 0)) } };
          },
        }),
      },
    },
    ...changes,
  };
  return client;
}

test("a center's file runs on a few samples at a time", async () => {
  const client = visitor();
  const found = await findCenter(client);
  assert.equal(found.center, 0);
  assert.equal(found.accuracy, 1);
  assert.deepEqual(client.sizes, [32, 32, 6]);
});

test("an answer to an earlier search is not taken for this one's", async () => {
  const client = visitor();
  const answers = [{ re: "of before", center: null, fit: "none" }, { re: "q1", center: 0, fit: "well" }];
  client.handle = async () => {
    client.answer = answers.shift();
  };
  assert.equal((await findCenter(client)).fit, "well");
});

test("a task that comes ends a search with what to do, and a center whose loss is no number is not told of", async () => {
  const busy = visitor();
  busy.fetch = async (_manifests, check) => {
    busy.task = {};
    check();
  };
  await assert.rejects(findCenter(busy), /something to train first; ask again after it/);
  const spelled = JSON.parse(readFileSync(new URL("../golden/vectors.json", import.meta.url))).spelled.catalog;
  const [center] = JSON.parse(spelled).centers;
  const catalog = JSON.stringify({ ...JSON.parse(spelled), centers: [center, { ...center, id: 1 }] });
  const client = visitor({ blobs: { read: async () => new TextEncoder().encode(catalog), keepOnly: async () => {} } });
  const losses = [NaN, 0.1];
  const learner = { fixedBatch: null, evaluate: async (_models, { n }) => ({ losses: [new Float64Array(n).fill(losses.shift())] }) };
  client.taskRunner.learner = async () => learner;
  client.handle = async () => {
    client.answer = { re: "q1", center: 1, fit: "well" };
  };
  assert.equal((await findCenter(client)).center, 1);
  assert.deepEqual(client.sent.find(({ kind }) => kind === "near").centers, [1]);
});

test("a page that is closed ends a search that compares centers", async () => {
  const client = visitor({}, () => {
    client.stopping = true;
  });
  await assert.rejects(findCenter(client), /the page was closed/);
});

test("a search is given up after two minutes without a block, and not while blocks come or the phone computes", async () => {
  let now = 0;
  const client = visitor({ now: () => now }, () => {
    now += 200_000;
  });
  let blocks = 5;
  client.fetch = async (_manifests, check) => {
    for (; blocks > 0; blocks -= 1) {
      now += 100_000;
      client.downloader.arrived += 1;
      check();
    }
  };
  assert.equal((await findCenter(client)).center, 0);
  client.fetch = async (_manifests, check) => {
    now += 130_000;
    check();
  };
  await assert.rejects(findCenter(client), /in time/);
});

test("a center's memory is given back when another takes its place, and when its trial is broken off", async () => {
  let released = 0;
  const session = { release: async () => { released += 1; } };
  const opened = await openCenter({ store, blobs, ort: { InferenceSession: { create: async () => session } } });
  await opened.release();
  assert.equal(released, 1);
  const client = visitor();
  const { create } = client.ort.InferenceSession;
  client.ort.InferenceSession.create = async () => ({ ...(await create()), ...session, run: async () => { throw new Error("broken off"); } });
  await assert.rejects(findCenter(client), /broken off/);
  assert.equal(released, 2);
});

test("what an earlier search fetched is forgotten by the next, but the center at home", async () => {
  const kept = [];
  const client = visitor();
  client.blobs.keepOnly = async (hashes) => kept.push(hashes);
  client.store.get = async () => ({ sha256: "home" });
  await findCenter(client);
  assert.equal(kept.length, 1);
  const spelled = JSON.parse(readFileSync(new URL("../golden/vectors.json", import.meta.url))).spelled.catalog;
  for (const { model } of JSON.parse(spelled).centers) assert.ok(kept[0].has(model.sha256));
  assert.ok(kept[0].has("home") && kept[0].has("1".repeat(64)));
});

test("of centers that all give no number none fits, and the coordinator is not asked about an empty list", async () => {
  const client = visitor();
  (await client.taskRunner.learner()).evaluate = async (_models, { n }) => ({ losses: [new Float64Array(n).fill(NaN)] });
  assert.equal((await findCenter(client)).center, null);
  assert.deepEqual(client.sent, []);
});

test("samples that the centers cannot read, as those of an earlier model, are told of, and nothing is reported", async () => {
  const labels = new Int32Array(N);
  const cases = [
    [{ n: N, x: new Float32Array(3 * N), labels }, { n: 0 }, /another shape/],
    [{ n: N, x: new Float32Array(2 * N), labels }, { n: 1, x: new Float32Array(2), labels: Int32Array.of(2) }, /the label 2/],
  ];
  for (const [train, held, words] of cases) {
    const client = visitor({ local: async () => ({ train, test: held }) });
    await assert.rejects(findCenter(client), words);
    assert.deepEqual(client.sent, []);
  }
});

test("a coordinator that has no catalog any more ends a search at once; one that asks for patience, and answers to others, do not", async () => {
  const ends = [["busy", /no centers yet/], ["internal", /the coordinator answered internal; press the button again/]];
  for (const [code, words] of ends) {
    const client = visitor();
    const errors = [{ re: "q1", code: "rate" }, { re: "of before", code }, { re: "q1", code }];
    client.handle = async () => {
      if (!errors.length) throw new Error("it asks on");
      client.error = errors.shift();
    };
    await assert.rejects(findCenter(client), words);
    assert.equal(errors.length, 0);
  }
});

test("centers that no browser can run are told with what their operator can set", async () => {
  const spelled = JSON.parse(readFileSync(new URL("../golden/vectors.json", import.meta.url))).spelled.catalog;
  const cuts = [
    [({ centers }) => centers.forEach(({ files }) => delete files.onnx), /no onnx file, which a browser needs; ask the operator for formats = \["onnx"\]/],
    [({ container }) => delete container.onnx, /no program for onnx, which a browser needs; ask the operator for engines = \["onnx"\]/],
  ];
  for (const [cut, words] of cuts) {
    const catalog = JSON.parse(spelled);
    cut(catalog);
    const blobs = { read: async () => new TextEncoder().encode(JSON.stringify(catalog)), keepOnly: async () => {} };
    await assert.rejects(findCenter(visitor({ blobs })), words);
  }
});
