// Blobs that come block by block, and a stored result that goes out: when each is asked for or announced again, and what ends that.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Bitmap } from "../../edge_client/web/protocol/blocks.js";
import { BlobPull, Downloader } from "../../edge_client/web/runtime/downloader.js";
import { Uploader } from "../../edge_client/web/runtime/uploader.js";

const KEY = { run: "r1", round: 1, exchange: 0 };
const UPDATE = { sha256: "a".repeat(64), size: 10, block: 4096, kind: "delta" };

/** A result that was announced; `settled` are the coordinator's answers that counted, `now` is the time. */
async function announced() {
  const told = { now: 0, rdys: 0, settled: [] };
  const state = {
    result: { key: KEY, update: UPDATE, status: null },
    commitAcknowledgement: async (status) => told.settled.push(status),
  };
  const sender = { send: () => `rdy-${(told.rdys += 1)}` };
  const uploader = new Uploader({ state, sender, transport: { isUp: true }, now: () => told.now, random: () => 0.5 });
  await uploader.announce();
  const ack = (changes) => uploader.onAck({ ...KEY, sha256: UPDATE.sha256, ...changes });
  return { uploader, told, ack };
}

test("an update whose bytes came wrong is sent again once, and then given up", async () => {
  const { told, ack } = await announced();
  await ack({ status: "bad_hash" });
  assert.deepEqual([told.rdys, told.settled], [2, []]);
  await ack({ status: "bad_hash" });
  assert.deepEqual([told.rdys, told.settled], [2, ["bad_hash"]]);
});

test("an answer to another update, or to another announcement, changes nothing", async () => {
  const { uploader, told, ack } = await announced();
  await ack({ status: "ok", sha256: "b".repeat(64) });
  await ack({ status: "ok", round: 2 });
  await uploader.onError({ re: "rdy-0", code: "closed" });
  uploader.onGo({ sha256: "b".repeat(64), shard: 0, window: 4 });
  assert.deepEqual([told.settled, uploader.upload], [[], null]);
  await ack({ status: "ok" });
  assert.deepEqual([told.settled, uploader.waitMs()], [["ok"], Infinity]);
});

test("a coordinator that asks for patience is asked again after it, and one that refuses is not", async () => {
  for (const code of ["busy", "rate", "internal"]) {
    const { uploader, told } = await announced();
    await uploader.onError({ re: "rdy-1", code, retry_ms: 1_000 });
    told.now = 999;
    await uploader.step();
    assert.deepEqual([told.rdys, told.settled], [1, []]);
    told.now = 1_000 + 15_000;
    await uploader.step();
    assert.equal(told.rdys, 2);
  }
  const { uploader, told } = await announced();
  await uploader.onError({ re: "rdy-1", code: "closed" });
  assert.deepEqual([told.settled, uploader.waitMs()], [["closed"], Infinity]);
});

test("a coordinator that was started again hears of the update within its spread, one without an update to hear of does not", async () => {
  const { uploader, told, ack } = await announced();
  uploader.coordinatorRestarted(400);
  assert.equal(uploader.waitMs(), 200);
  told.now = 200;
  await uploader.step();
  assert.equal(told.rdys, 2);
  await ack({ status: "ok" });
  uploader.coordinatorRestarted(400);
  assert.equal(uploader.waitMs(), Infinity);
});

test("a window grows by one for each that arrives whole and is halved when blocks do not come, until the coordinator is given up", () => {
  const bitmap = new Bitmap(100);
  const pull = new BlobPull(bitmap);
  const arrive = (from, to) => {
    for (let i = from; i < to; i += 1) {
      bitmap.add(i);
      pull.markArrived(i);
    }
  };
  assert.deepEqual(pull.nextRequest(0), [[0, 4]]);
  arrive(0, 4);
  assert.deepEqual(pull.nextRequest(0), [[4, 5]]);
  assert.deepEqual(pull.nextRequest(7_999), []);
  assert.deepEqual(pull.nextRequest(8_000), [[4, 2]]);
  assert.deepEqual(pull.nextRequest(24_000), [[4, 1]]);
  arrive(4, 5); // one that comes begins the count anew
  assert.deepEqual(pull.nextRequest(24_000), [[5, 2]]);
  for (const [now, again] of [[32_000, [[5, 1]]], [48_000, [[5, 1]]], [80_000, []]]) assert.deepEqual(pull.nextRequest(now), again);
  assert.equal(pull.exhausted, true);
});

test("a coordinator that is busy is asked again when it said, one that does not give a blob is not", async () => {
  const manifest = { sha256: "c".repeat(64), size: 10_000, block: 4096, kind: "model" };
  const wanted = async () => {
    const gets = [];
    const blobs = { has: async () => false, arrivedBlocks: async () => new Bitmap(3) };
    const downloader = new Downloader(blobs, (_manifest, runs) => `get-${gets.push(runs)}`);
    await downloader.start([manifest]);
    await downloader.step(0);
    return { downloader, gets };
  };
  for (const code of ["busy", "rate"]) {
    const { downloader, gets } = await wanted();
    downloader.onError("get-1", code, 5_000);
    assert.equal(await downloader.step(4_000), 1_000);
    await downloader.step(5_000);
    assert.deepEqual(gets, [[[0, 3]], [[0, 3]]]);
  }
  const { downloader } = await wanted();
  downloader.onError("get-9", "not_yours", 0); // of a request that is none of its own
  await downloader.step(0);
  downloader.onError("get-1", "not_yours", 0);
  await assert.rejects(downloader.step(0), { code: "unreachable" });
});

test("a block that comes after its task was stopped is not kept, and the next request proves that it came", async () => {
  const marks = [];
  const blobs = { has: async () => false, arrivedBlocks: async () => new Bitmap(3) };
  const downloader = new Downloader(blobs, (_manifest, _runs, mark) => `get-${marks.push(mark)}`);
  const fetch = async (letter) => {
    await downloader.start([{ sha256: letter.repeat(64), size: 10_000, block: 4096, kind: "model" }]);
    await downloader.step(0);
  };
  await fetch("c");
  await fetch("d");
  await downloader.onBlock("c".repeat(16), 0, new Uint8Array([1, 0, 1, 2, ...new Array(20).fill(0)]));
  await fetch("e");
  assert.deepEqual([marks, downloader.arrived], [[0, 0, 513], 0]);
});
