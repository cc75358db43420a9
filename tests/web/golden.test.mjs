// The recorded bytes of protocol version 1, and the inputs that a reader must refuse: the same files that Python is held to.

import assert from "node:assert/strict";
import { createPrivateKey, sign as signBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { goldenInputs } from "../../edge_client/web/engines/golden_run.js";
import * as blocks from "../../edge_client/web/protocol/blocks.js";
import { crc32, fromBase64, fromHex, sha256, toBase64, toHex } from "../../edge_client/web/protocol/bytes.js";
import { readCatalog } from "../../edge_client/web/protocol/nearest/catalog.js";
import * as codecs from "../../edge_client/web/protocol/codecs.js";
import { canonicalJson, parseJson, Real } from "../../edge_client/web/protocol/json.js";
import { KINDS } from "../../edge_client/web/protocol/message_schemas.js";
import * as messages from "../../edge_client/web/protocol/messages.js";
import { readProgram } from "../../edge_client/web/protocol/program.js";
import { Pcg64 } from "../../edge_client/web/protocol/random.js";
import { schemaOf } from "../../edge_client/web/protocol/schema.js";
import * as signing from "../../edge_client/web/protocol/signing.js";
import { batchesOf, runFit } from "../../edge_client/web/training/fit_probe.js";
import { inputMoments } from "../../edge_client/web/training/input_moments.js";
import { Rule } from "../../edge_client/web/training/optimiser.js";
import { unpackTensors } from "../../edge_client/web/protocol/tensors.js";
import { routingLabel, clientShard, Topics } from "../../edge_client/web/protocol/topics.js";

const GOLDEN = new URL("../golden/", import.meta.url);
const load = (name) => JSON.parse(readFileSync(new URL(name, GOLDEN), "utf8"));
const VECTORS = load("vectors.json");
const REFUSED = load("refused.json");
const bytes = (text) => new TextEncoder().encode(text);
const words = (data) => new TextDecoder().decode(data);
const P = Uint8Array.from({ length: 10_240 }, (_, i) => i % 256);
const T = 1_700_000_000_000;
const SCHEMA = await schemaOf(VECTORS.schema.rows);
const VECTOR = Float32Array.from(VECTORS.vector);
const OF_P = await blocks.manifestOf(P, "program", { block: 4096 });
const SIGNED = { ...OF_P, key: VECTORS.key.id, sig: VECTORS.signature_of_p };
const named = async (data) => ({ bytes: data.length, sha256: await sha256(data) });

function tensorFile(name) {
  if (name === "stats") return codecs.encodeStats(VECTORS.stats, SCHEMA);
  const [kind, codec] = name.split("_");
  return codecs.encodeVector(VECTOR, SCHEMA, { kind, codec, base: kind === "delta" ? OF_P.sha256 : undefined });
}

async function controlMessage(name) {
  const key = { run: "r1", round: 3, t: T };
  const update = await blocks.manifestOf(tensorFile("stats"), "stats", { inline: true });
  const model = await blocks.manifestOf(tensorFile("model_f32"), "model");
  const container = await blocks.manifestOf(P, "container");
  const asked = { ...key, epoch: 1, left_ms: 60_000, batch: 16, seed: 7, schema: SCHEMA.sha256, program: SIGNED, container };
  const fields = {
    get: { id: "a1", t: T, sha256: OF_P.sha256, block: 4096, at: [[0, 2]] },
    task: {
      ...asked, id: "c1-7", exchange: 0, job: "fit", anchor: "start", lr: 0.05, momentum: new Real(0), mu: 0.1, steps: 20,
      start: model, reply: { codec: "i8", base: "start", max_size: 1_048_736 },
    },
    probe: {
      ...asked, id: "c1-8", exchange: 1, job: "probe", models: [model, { own: "personal", init: model }], want: ["posterior"],
      prior: [0.25, 0.75], split: "train", reply: { codec: "f32", base: "zero", max_size: 1_048_736 },
    },
    rdy: { ...key, id: "d1-2", exchange: 1, attempt: 0, n: 4, what: "stats", update, seconds: 0.5 },
    ack: { ...key, id: "c1-9", epoch: 1, exchange: 1, attempt: 0, sha256: update.sha256, status: "ok" },
  };
  return messages.writeMessage(name === "probe" ? "task" : name, fields[name]);
}

test("the moments of inputs are summed as recorded", () => {
  const { n, shape, first, trace, corner } = VECTORS.inputs;
  const size = n * shape.reduce((a, b) => a * b, 1);
  const x = Float32Array.from({ length: size }, (_, i) => (((7 * i) % 11) - 5) / 2);
  const [count, ...sums] = inputMoments([{ n, x }], shape);
  assert.equal(count, n);
  const near = (found, wanted) => assert.ok(Math.abs(found - wanted) < 1e-8, `${found} is not ${wanted}`);
  first.forEach((wanted, i) => near(sums[i], wanted));
  const d = first.length;
  const second = sums.slice(d);
  const diagonal = first.map((_, j) => j * d - (j * (j - 1)) / 2); // where row j of the upper triangle begins
  near(diagonal.reduce((sum, at) => sum + second[at], 0), trace);
  near(second[d - 1], corner);
});

test("a blob is named by its hash and routed by its label", async () => {
  assert.deepEqual({ ...(await named(P)), label: routingLabel(OF_P.sha256) }, VECTORS.p);
});

test("the block of hello", async () => {
  assert.equal(toHex(blocks.packBlock(bytes("hello"), 0, 1)), VECTORS.block_hello);
  const hello = await blocks.manifestOf(bytes("hello"), "delta", { block: 4096 });
  const { block, mark } = VECTORS.block_hello_marked;
  assert.deepEqual(blocks.unpackMarkedBlock(fromHex(block), hello, 0), { body: bytes("hello"), mark });
  assert.throws(() => blocks.unpackBlock(fromHex(block), hello, 0), /where none belongs/);
});

test("the three blocks of P", () => {
  const bodies = [0, 1, 2].map((i) => P.slice(...blocks.bodyRange(OF_P, i)));
  const packed = bodies.map((body, i) => blocks.packBlock(body, i, 3));
  assert.deepEqual(packed.map((block) => toHex(block.subarray(0, 16))), VECTORS.block_headers_of_p);
  assert.equal(bodies[2].length, VECTORS.last_body_of_p);
  packed.forEach((block, i) => assert.deepEqual(blocks.unpackBlock(block, OF_P, i), bodies[i]));
});

test("the manifest of P", () => {
  assert.equal(words(canonicalJson(OF_P)), VECTORS.manifest_of_p);
});

test("a bitmap counts from the least significant bit", () => {
  const { total, have, base64 } = VECTORS.bitmap;
  const bitmap = new blocks.Bitmap(total);
  assert.deepEqual(have.map((i) => bitmap.add(i)), [true, true, true]);
  assert.equal(bitmap.toBase64(), base64);
  assert.deepEqual(blocks.Bitmap.fromBase64(total, base64).missing(99), [[1, 2], [4, 5]]);
});

test("base64 holds no byte more than its limit", () => {
  for (const limit of [100, 101, 102]) {
    assert.equal(fromBase64(toBase64(new Uint8Array(limit)), limit).length, limit);
    assert.throws(() => fromBase64(toBase64(new Uint8Array(limit + 1)), limit), { code: "too_big" });
  }
});

test("the shard of a device", () => {
  const { cid, crc32: crc, shards, shard } = VECTORS.shard;
  assert.equal(crc32(bytes(cid)), crc);
  assert.equal(clientShard(cid, shards), shard);
});

test("a schema is hashed sorted by name", () => {
  assert.equal(SCHEMA.sha256, VECTORS.schema.sha256);
});

test("i8 rounds ties to even and keeps a row of zeros", () => {
  const { tensors } = unpackTensors(tensorFile("delta_i8"));
  assert.deepEqual(Array.from(tensors["fc.weight"].data), VECTORS.i8.q.flat());
  assert.equal(toHex(new Uint8Array(tensors["fc.weight#s"].data.buffer)), VECTORS.i8.s);
  const decoded = codecs.decodeVector(tensorFile("delta_i8"), SCHEMA, { kind: "delta", codec: "i8", base: OF_P.sha256 });
  assert.deepEqual(decoded.subarray(0, 3), Float32Array.from(VECTORS.i8.decoded_row_0));
});

test("f16 scales by a power of two", async () => {
  const schema = await schemaOf([["t", "p", [2]]]);
  const { tensors } = unpackTensors(codecs.encodeVector(Float32Array.from(VECTORS.f16.t), schema, { codec: "f16", kind: "model" }));
  assert.equal(toHex(new Uint8Array(tensors["t#s"].data.buffer)), VECTORS.f16.s);
  assert.equal(toHex(new Uint8Array(tensors.t.data.buffer)), VECTORS.f16.q);
});

for (const name of Object.keys(VECTORS.files)) {
  test(`the tensor file ${name} keeps its bytes`, async () => {
    const file = tensorFile(name);
    const header = new DataView(file.buffer).getUint32(0, true);
    assert.deepEqual({ ...(await named(file)), header }, VECTORS.files[name]);
  });
}

for (const name of Object.keys(VECTORS.messages)) {
  test(`the message ${name} keeps its bytes and is read back`, async () => {
    const payload = await controlMessage(name);
    assert.deepEqual(await named(payload), VECTORS.messages[name]);
    assert.equal(words(canonicalJson(await messages.readExactMessage(payload))), words(payload));
  });
}

test("keys and signatures", async () => {
  const { private: seed, public: key, id } = VECTORS.key;
  assert.equal(await signing.keyId(fromHex(key)), id);
  assert.equal(await signing.canVerify(), true);
  await signing.verifyManifest(SIGNED, [fromHex(key)], "demo");
  const pkcs8 = Buffer.concat([Buffer.from("302e020100300506032b657004220420", "hex"), Buffer.from(seed, "hex")]);
  const secret = createPrivateKey({ key: pkcs8, format: "der", type: "pkcs8" });
  assert.equal(signBytes(null, signing.signedText("demo", OF_P), secret).toString("hex"), VECTORS.signature_of_p);
});

test("a signature of another federation, kind, size or key is refused", async () => {
  const key = fromHex(VECTORS.key.public);
  const other = key.map((byte, i) => (i ? byte : byte ^ 1));
  const wrong = [
    [SIGNED, [key], "demos"],
    [{ ...SIGNED, kind: "model" }, [key], "demo"],
    [{ ...SIGNED, size: 10_241 }, [key], "demo"],
    [SIGNED, [other], "demo"],
    [SIGNED, [], "demo"],
    [OF_P, [key], "demo"],
    [{ ...SIGNED, sig: `00${SIGNED.sig.slice(2)}` }, [key], "demo"],
  ];
  for (const given of wrong) await assert.rejects(signing.verifyManifest(...given), { code: "bad_signature" });
});

test("batches follow numpy's permutation of the seed", () => {
  const { seed, n, first_pass: first, second_pass: second } = VECTORS.batches;
  const stream = new Pcg64(seed);
  assert.deepEqual(Array.from(stream.permutation(n)), first);
  assert.deepEqual(Array.from(stream.permutation(n)), second);
});

test("the batches of many steps take no memory before they are read", () => {
  const before = process.memoryUsage().arrayBuffers;
  let count = 0;
  for (const index of batchesOf(1_000, { batch: 65_536, seed: 7, steps: 20_000 }, false)) {
    assert.equal(index.length, 1_000);
    if ((count += 1) === 3) break;
  }
  assert.ok(process.memoryUsage().arrayBuffers - before < 1 << 20);
  const { seed, n, first_pass: first, second_pass: second } = VECTORS.batches;
  assert.deepEqual([...batchesOf(n, { batch: n, seed, steps: 2 }, false)].map((cut) => [...cut]), [first, second]);
  assert.deepEqual([...batchesOf(n, { batch: 4, seed, steps: 3 }, true)].map((cut) => [...cut]), [first.slice(0, 4), first.slice(4, 8), second.slice(0, 4)]);
});

test("a fit holds out the recorded samples", async () => {
  const { n, rows, weights } = VECTORS.held_out;
  let found;
  const learner = {
    program: { input: [1], classes: 2, loss: "cross-entropy" }, fixedBatch: null,
    train: async (job) => { found = job.weights; return { vector: new Float32Array(1), losses: [0] }; },
  };
  const task = { rows, batch: 4, seed: 7, steps: 1, start: { sha256: "start" } };
  const data = { n, x: new Float32Array(n), labels: new Uint8Array(n) };
  await runFit(learner, task, data, { vectors: new Map([["start", new Float32Array(1)]]) });
  assert.deepEqual(Array.from(found), weights);
});

test("a model that float32 cannot hold has diverged", async () => {
  const program = { input: [1], classes: 2, loss: "cross-entropy" };
  const task = { batch: 4, seed: 7, steps: 1, start: { sha256: "start" } };
  const data = { n: 4, x: new Float32Array(4), labels: new Uint8Array(4) };
  for (const value of [1e39, -1e39, NaN]) {
    const learner = { program, fixedBatch: null, train: async () => ({ vector: Float64Array.of(0, value), losses: [0] }) };
    await assert.rejects(runFit(learner, task, data, { vectors: new Map([["start", new Float32Array(2)]]) }), { code: "not_finite" });
  }
});

for (const [optimiser, wanted] of VECTORS.optimisers.rows) {
  test(`${optimiser.name} moves weights as recorded, clipped to ${optimiser.clip_norm}`, () => {
    const { start, lr, steps } = VECTORS.optimisers;
    const [rule, w] = [new Rule(optimiser, lr), Float64Array.from(start)];
    for (let k = 0; k < steps; k += 1) rule.move(w, Float64Array.from(w, (_, i) => (((7 * (4 * k + i)) % 11) - 5) / 8));
    wanted.forEach((value, i) => assert.ok(Math.abs(w[i] - value) < 1e-9, `${w[i]} is not ${value}`));
  });
}

test("noise is the upper bits of the seed's stream", () => {
  const { seed, step, first } = VECTORS.noise;
  const drawn = new Pcg64(seed, step).floats(first.length);
  assert.deepEqual(Array.from(drawn, (value) => value * 2 ** 24), first);
});

for (const [name, text] of Object.entries(VECTORS.spelled)) {
  if (JSON.parse(text).k === undefined) continue; // a blob of JSON
  test(`the message "${name}" is read and written as it stands`, async () => {
    const message = await messages.readExactMessage(bytes(text));
    assert.equal(message.k, name.split(",")[0]);
    assert.equal(words(canonicalJson(message)), text);
    const { v: _v, k, ...fields } = message;
    assert.equal(words(messages.writeMessage(k, fields)), text);
  });
}

test("there is a vector of every kind", () => {
  const spelled = Object.values(VECTORS.spelled).map((text) => JSON.parse(text).k);
  const there = new Set([...spelled, ...Object.keys(VECTORS.messages)]);
  assert.deepEqual(KINDS.filter((kind) => !there.has(kind)), []);
});

test("the catalog and the program are read", async () => {
  const catalog = await readCatalog(bytes(VECTORS.spelled.catalog));
  const said = (await messages.readMessage(bytes(VECTORS.spelled.cat))).catalog;
  assert.deepEqual(await named(bytes(VECTORS.spelled.catalog)), { bytes: said.size, sha256: said.sha256 });
  await signing.verifyManifest(said, [fromHex(VECTORS.key.public)], "demo");
  assert.equal(catalog.abstain, 0.5);
  assert.equal(catalog.centers[0].files.onnx.sha256, OF_P.sha256);
  const program = await readProgram(bytes(VECTORS.spelled["program.json"]));
  assert.equal(program.schema.sha256, SCHEMA.sha256);
  assert.deepEqual(program.functions.evaluate.inputs[3], { name: "x", dtype: "float32", shape: ["batch", 3] });
});

test("the inputs of a golden run are drawn as recorded", async () => {
  const program = await readProgram(bytes(VECTORS.golden.program));
  assert.deepEqual(program.golden.litert.losses, [1.5, 1.25, 1]);
  for (const [engine, name] of [["onnx", "any"], ["litert", "fixed"]]) {
    const { start, steps, signs } = goldenInputs(program, program.golden[engine], name === "fixed");
    const drawn = [...Object.values(start), ...steps.flatMap((step) => Object.values(step))].map(({ data }) => data);
    const all = [...drawn, ...Object.values(signs)].flatMap((array) => [...new Uint8Array(array.buffer)]);
    assert.equal(await sha256(Uint8Array.from(all)), VECTORS.golden.inputs[name]);
  }
});

test("a program of an older compiler has no golden run", async () => {
  for (const golden of [undefined, null]) {
    const raw = JSON.stringify({ ...JSON.parse(VECTORS.golden.program), golden });
    assert.deepEqual(Object.keys((await readProgram(bytes(raw))).golden), []);
  }
});

test("a loss that this page does not know is refused by its name", async () => {
  for (const loss of ["own", "token-cross-entropy", "pixel-cross-entropy"]) {
    const raw = JSON.stringify({ ...JSON.parse(VECTORS.golden.program), loss, targets: "cross-entropy" });
    await assert.rejects(readProgram(bytes(raw)), (wrong) => wrong.code === "bad_program" && wrong.message.includes(`"${loss}"`));
  }
});

test("topics are built and read as they stand", () => {
  const topics = new Topics("demo");
  const { label: short } = VECTORS.p;
  const built = [
    topics.coord(), topics.catalog(), topics.state("dev-1"), topics.request("dev-1"),
    topics.upload(2, "dev-1", short, 0), topics.down("dev-1"), topics.downBlock("dev-1", short, 2),
  ];
  assert.deepEqual(built, VECTORS.topics);
  const kinds = VECTORS.topics.map((topic) => topics.parse(topic).kind);
  assert.deepEqual(kinds, ["coord", "cat", "st", "rq", "in", "t", "b"]);
});

test("a large number of a message, and minus zero, are read again as the same, and as no integer", () => {
  for (const value of [2 ** 53, -1e17, 1e21, 1e300, -0]) {
    const read = parseJson(canonicalJson(value), 100);
    assert.ok(read instanceof Real);
    assert.equal(read.valueOf(), value);
  }
});

const HELLO = await blocks.manifestOf(bytes("hello"), "model");
const READERS = {
  json: (text) => parseJson(bytes(text), messages.MAX_MESSAGE_BYTES),
  messages: (route, text) => messages.readMessage(bytes(text), route),
  manifests: (manifest) => blocks.checkInline(blocks.readManifestForm(parseJson(canonicalJson(manifest), 1 << 20))),
  blocks: (data) => blocks.unpackBlock(fromHex(data), HELLO, 0),
  bitmaps: (text) => blocks.Bitmap.fromBase64(10, text),
  topics: (topic) => new Topics("demo").parse(topic),
  programs: (text) => readProgram(bytes(text)),
  files: (data) => codecs.decodeVector(fromHex(data), SCHEMA, { kind: "model" }),
};

test("every list of refusals has a reader", () => {
  assert.deepEqual(Object.keys(REFUSED).filter((name) => name !== "about").sort(), Object.keys(READERS).sort());
});

for (const [name, reader] of Object.entries(READERS)) {
  test(`each of the hostile ${name} is refused with the recorded code`, async () => {
    for (const [i, row] of REFUSED[name].entries()) {
      const given = row.slice(0, -1);
      await assert.rejects(async () => reader(...given), { code: row.at(-1) }, `${name} ${i}: ${row.at(-1)}`);
    }
  });
}

test("a bomb of brackets or digits is refused, and the process lives", () => {
  for (const text of ["[".repeat(8_000), "9".repeat(8_000), `{"a":${"1".repeat(400)}.5}`, '{"__proto__":1,"__proto__":2}']) {
    assert.throws(() => parseJson(bytes(text), messages.MAX_MESSAGE_BYTES), { code: "bad_json" });
  }
  assert.throws(() => parseJson(new Uint8Array(8_193), messages.MAX_MESSAGE_BYTES), { code: "too_big" });
  assert.throws(() => parseJson(Uint8Array.of(0x22, 0xff, 0x22), 10), { code: "bad_json" });
});

test("names of JavaScript's own are names like others", async () => {
  const message = await messages.readMessage(bytes('{"v":1,"k":"rebirth","id":"x","t":0,"epoch":1,"__proto__":{"s":1},"constructor":2}'));
  assert.deepEqual(Object.keys(message).sort(), ["epoch", "id", "k", "t", "v"]);
  await assert.rejects(messages.readMessage(bytes('{"v":1,"k":"constructor","id":"x","t":0}')), { code: "bad_kind" });
});
