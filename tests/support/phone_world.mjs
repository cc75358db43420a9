// A coordinator and a broker in memory for the page's client, which runs under Node. PROGRAM names a folder with a real program
// (web_steps.py writes it), THIRD the folder of ONNX Runtime Web.

import assert from "node:assert/strict";
import { createPrivateKey, sign } from "node:crypto";
import { EventEmitter } from "node:events";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

import { Client } from "../../edge_client/web/runtime/client.js";
import { bodyRange, inlineBytes, manifestOf, packBlock, totalOf, unpackBlock } from "../../edge_client/web/protocol/blocks.js";
import { fromHex, sha256 } from "../../edge_client/web/protocol/bytes.js";
import { encodeVector } from "../../edge_client/web/protocol/codecs.js";
import { readMessage, writeMessage } from "../../edge_client/web/protocol/messages.js";
import { readProgram } from "../../edge_client/web/protocol/program.js";
import { signedText } from "../../edge_client/web/protocol/signing.js";
import { Topics } from "../../edge_client/web/protocol/topics.js";

const { PROGRAM, THIRD } = process.env;
export const ort = await import(pathToFileURL(join(THIRD, "ort.wasm.min.mjs")));
ort.env.wasm.numThreads = 1;
ort.env.wasm.wasmPaths = `${pathToFileURL(THIRD)}/`;
ort.env.wasm.wasmBinary = readFileSync(join(THIRD, "ort-wasm-simd-threaded.wasm"));

const PUBLIC = fromHex("03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8");
const PKCS8 = Buffer.from("302e020100300506032b657004220420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f", "hex");
const SECRET = createPrivateKey({ key: PKCS8, format: "der", type: "pkcs8" });
export const FEDERATION = "test";
export const CID = "phone-1";
export const TOPICS = new Topics(FEDERATION);
const BLOCK = 4096;
export const N = 24;
export const file = (name) => new Uint8Array(readFileSync(join(PROGRAM, name)));
export const program = await readProgram(file("program.json"));
export const SECRET_SAMPLE = Float32Array.from({ length: 64 }, (_, i) => 0.123456 + i / 1000);

/** A coordinator and a broker in one: it keeps what it was told, and answers each `get` while `serves`. */
export class World {
  constructor() {
    this.blobs = new Map();
    this.said = [];
    this.payloads = [];
    this.answers = []; // of sums, as they were before they travelled
    this.waiting = [];
    this.served = [];
    this.serves = true;
    this.epoch = 1;
    this.count = 0;
    this.link = null;
  }

  /** Stands for the module of MQTT.js. */
  connect(_url, options) {
    const link = new EventEmitter();
    Object.assign(link, { connected: true, options });
    link.sendPing = () => {}; // a test on a busy machine takes longer than the time between two
    link.subscribe = (filters, _qos, done) => setImmediate(() => done(null, filters));
    link.publish = (topic, payload, _options, done) => {
      this.hear(topic, new Uint8Array(Buffer.from(payload))).then(() => done());
    };
    link.end = () => {
      link.connected = false;
      setImmediate(() => link.emit("close"));
    };
    this.link = link;
    setImmediate(() => link.emit("connect"));
    return link;
  }

  async hear(topic, payload) {
    this.payloads.push(Buffer.from(payload));
    const route = TOPICS.parse(topic);
    const message = route.kind === "in" ? { k: "block", ...route, payload } : await readMessage(payload, route.kind);
    this.said.push(message);
    if (message.k === "get" && this.serves) this.serve(message);
    for (const wait of [...this.waiting]) wait();
  }

  serve({ sha256: hash, block, at }) {
    const data = this.blobs.get(hash);
    const manifest = { size: data.length, block, sha256: hash };
    for (const [first, count] of at) {
      for (let i = first; i < first + count; i += 1) {
        this.served.push(`${hash.slice(0, 8)}/${i}`);
        const message = packBlock(data.subarray(...bodyRange(manifest, i)), i, totalOf(manifest));
        this.link.emit("message", TOPICS.downBlock(CID, hash.slice(0, 16), i), message, { retain: false });
      }
    }
  }

  /** Resolves with the first message, from `from` on, that fits. */
  async heard(fits, from = 0) {
    for (;;) {
      const found = this.said.slice(from).find(fits);
      if (found) return found;
      await new Promise((resolve) => {
        this.waiting = [resolve];
      });
    }
  }

  say(kind, fields) {
    this.count += 1;
    const id = `c-${this.count}`;
    this.link.emit("message", TOPICS.down(CID), writeMessage(kind, { id, t: 0, epoch: this.epoch, ...fields }), { retain: false });
    return id;
  }

  /** The record of a coordinator, signed; `changes` replace some of its fields. `retain`: the broker had it. */
  async lead(epoch, changes = {}, retain = false) {
    const boot = epoch.toString(16).padStart(16, "0");
    const sig = sign(null, signedText(FEDERATION, { kind: "coord", sha256: boot, size: epoch }), SECRET).toString("hex");
    const about = { online: true, proto: [1], spread_ms: 0, block: BLOCK, window: 16, src: ["mqtt"] };
    const fields = { boot, ...about, key: "56475aa75463474c", sig, ...changes };
    this.link.emit("message", TOPICS.coord(), writeMessage("coord", { id: `c-${epoch}`, t: 0, epoch, ...fields }), { retain });
  }

  async blob(data, kind, signed = false) {
    const manifest = await manifestOf(data, kind, { block: BLOCK });
    this.blobs.set(manifest.sha256, data);
    if (!signed) return manifest;
    const sig = sign(null, signedText(FEDERATION, manifest), SECRET).toString("hex");
    return { ...manifest, key: "56475aa75463474c", sig };
  }

  /** The bytes of an announced update; its blocks are given a credit. */
  async fetched({ id, update }) {
    if (update.inline) return inlineBytes(update);
    const from = this.said.length;
    const blocks = () => this.said.slice(from).filter((m) => m.k === "block");
    this.say("go", { re: id, sha256: update.sha256, shard: 0, window: 4, have: undefined });
    await this.heard(() => blocks().length === totalOf(update));
    const data = new Uint8Array(update.size);
    for (const { index, payload } of blocks()) data.set(unpackBlock(payload, update, index), index * update.block);
    assert.equal(await sha256(data), update.sha256);
    return data;
  }

  /** The coordinator has stored an announced update. */
  take({ run, round, exchange, update }) {
    this.say("ack", { run, round, exchange, attempt: 0, sha256: update.sha256, status: "ok" });
  }

  /** The file of the function `evaluate`. */
  async evaluation() {
    return this.blob(file("evaluate.onnx"), "container");
  }

  /** The fields of a fit over the compiled program; `changes` replace some. */
  async task(changes = {}) {
    const container = program.containers.onnx.step;
    const flat = Float32Array.from({ length: program.schema.size }, (_, i) => Math.sin(i) / 10);
    this.start = encodeVector(flat, program.schema, { codec: "f32", kind: "model" });
    const step = await this.blob(file("step.onnx"), "container");
    assert.equal(step.sha256, container.sha256);
    return {
      run: "r1", round: 1, exchange: 0, left_ms: 600_000, job: "fit", program: await this.blob(file("program.json"), "program", true),
      container: step, schema: program.schema.sha256, reply: { codec: "i8", base: "start", max_size: 1 << 20 },
      start: await this.blob(this.start, "model", true), lr: 0.1, momentum: 0, mu: 0, steps: 3, batch: 8, seed: 7, ...changes,
    };
  }
}

const KEYS = { federation: FEDERATION, broker: "ws://nowhere", keys: [PUBLIC] };
const SAMPLES = {
  n: N,
  x: Float32Array.from({ length: N * 64 }, (_, i) => SECRET_SAMPLE[i % 64]),
  labels: Int32Array.from({ length: N }, (_, i) => i % 10),
};

const firstOf = ({ x, labels }, n) => ({ n, x: x.slice(0, n * 64), labels: labels.slice(0, n) });

/** A phone with the first `count` samples over a store; `stop` ends its life as a closed tab does, or in good order. */
export async function phone(world, store, { participates = true, tell = () => {}, runtime = ort, now, count = N } = {}) {
  if (participates) await store.write({ "takes part": true });
  const client = await Client.open({
    join: KEYS, device: { id: CID }, store, ort: runtime, mqtt: world, local: async () => ({ train: firstOf(SAMPLES, count), test: firstOf(SAMPLES, 0) }), trains: async () => count, tell, now,
  });
  const life = client.run();
  await world.heard((m) => m.k === "st" && m.s === "on", world.said.length);
  return { client, life, leave: async () => { client.stop(); await life; } };
}
