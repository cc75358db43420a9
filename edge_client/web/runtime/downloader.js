// Download of blobs, one after another, block by block (PROTOCOL.md, section 9). The receiver sets the pace. The client
// passes in events and calls `step`. Times are in ms.

import { readMark, totalOf, unpackMarkedBlock } from "../protocol/blocks.js";
import { Malformed } from "../protocol/errors.js";
import { routingLabel } from "../protocol/topics.js";

const INITIAL_WINDOW = 4;
export const MAX_WINDOW = 16;
const REQUEST_TIMEOUTS_MS = [8_000, 16_000, 32_000]; // then the coordinator is given up
const MAX_POLL_MS = 60_000;
const MAX_KNOWN_REQUESTS = 64;

/** Which blocks to ask for next: the window adds one for each that arrives whole, and halves on a timeout. */
export class BlobPull {
  constructor(bitmap) {
    this.bitmap = bitmap;
    this.window = INITIAL_WINDOW;
    this.timeouts = 0;
    this.due = new Map(); // asked for -> when it counts as lost
    this.since = 0; // blocks that arrived since the window last changed
  }

  get exhausted() {
    return this.timeouts >= REQUEST_TIMEOUTS_MS.length;
  }

  /** The `at` of the next `get`, or nothing for now; asks once half of the window is free. */
  nextRequest(now) {
    this.expire(now);
    if (this.exhausted || this.due.size > Math.floor(this.window / 2)) return [];
    const runs = this.bitmap.missing(this.window - this.due.size, this.due);
    const until = now + REQUEST_TIMEOUTS_MS[this.timeouts];
    for (const [first, count] of runs) for (let i = first; i < first + count; i += 1) this.due.set(i, until);
    return runs;
  }

  markArrived(index) {
    this.due.delete(index);
    this.timeouts = 0;
    this.since += 1;
    if (this.since >= this.window) {
      this.window = Math.min(this.window + 1, MAX_WINDOW);
      this.since = 0;
    }
  }

  expire(now) {
    const late = [...this.due].filter(([, until]) => until <= now).map(([index]) => index);
    for (const index of late) this.due.delete(index);
    if (late.length) {
      this.timeouts += 1;
      this.window = Math.max(1, Math.floor(this.window / 2));
      this.since = 0;
    }
  }
}

/** A queue of blobs to fetch; `sendGet(manifest, runs, mark)` sends one request and gives its id. */
export class Downloader {
  constructor(blobs, sendGet, tell = () => {}) {
    Object.assign(this, { blobs, sendGet, tell });
    this.mark = 0; // of the block that came last
    this.arrived = 0; // blocks so far
    this.clear();
  }

  clear() {
    this.queue = [];
    this.requests = []; // an error about what was wanted before stops nothing of this
    this.pull = null;
    this.failed = null;
    this.badHashes = 0;
    this.notBefore = 0;
  }

  /** Want these blobs, instead of what was wanted before. */
  async start(manifests) {
    this.clear();
    for (const manifest of manifests) {
      if (manifest.inline !== undefined) await this.blobs.putInline(manifest);
      else if (!(await this.blobs.has(manifest.sha256))) this.queue.push(manifest);
    }
  }

  /** Ask for what is due; -> ms until the next call, null once all is here. Throws Malformed for what failed. */
  async step(now) {
    while (this.queue.length && this.pull === null && this.failed === null) await this.begin(this.queue[0]);
    if (this.failed !== null) throw this.failed;
    if (this.pull === null) return null;
    if (now < this.notBefore) return this.notBefore - now;
    const runs = this.pull.nextRequest(now);
    if (runs.length) this.requests = [...this.requests, this.sendGet(this.queue[0], runs, this.mark)].slice(-MAX_KNOWN_REQUESTS);
    if (this.pull.exhausted) throw new Malformed("unreachable", `no block of ${this.queue[0].sha256.slice(0, 16)} came`);
    const due = Math.min(...this.pull.due.values());
    return Number.isFinite(due) ? Math.max(0, due - now) : MAX_POLL_MS;
  }

  /** One block message; what is damaged is dropped, and of what belongs to no transfer all but the mark. */
  async onBlock(name, index, payload) {
    const { pull } = this;
    const manifest = this.queue[0];
    if (pull === null || name !== routingLabel(manifest.sha256)) {
      this.mark = readMark(payload);
      return;
    }
    let body;
    try {
      ({ body, mark: this.mark } = unpackMarkedBlock(payload, manifest, index));
    } catch (wrong) {
      console.warn("dropped a block:", wrong.message);
      return;
    }
    if (pull.bitmap.has(index)) return;
    await this.blobs.putBlock(manifest, index, body);
    pull.bitmap.add(index);
    pull.markArrived(index);
    this.arrived += 1;
    this.notBefore = 0; // a block shows that the coordinator is no longer busy
    this.tell({ what: "fetching", done: pull.bitmap.count / totalOf(manifest), size: manifest.size, kind: manifest.kind });
    if (pull.bitmap.complete) await this.finish(manifest);
  }

  /** An error answer to one of our requests: ask again later, or fail. Others are ignored. */
  onError(request, code, notBefore) {
    if (!this.requests.includes(request) && !(request === undefined && code === "rate")) return;
    if (code === "rate" || code === "busy") {
      this.linkLost();
      this.notBefore = notBefore;
    } else {
      this.failed = new Malformed("unreachable", `the coordinator answered ${code}`);
    }
  }

  /** Ask again for what was under way. */
  linkLost() {
    this.pull?.due.clear();
  }

  async begin(manifest) {
    if (await this.blobs.has(manifest.sha256)) {
      this.next(); // the same blob was wanted twice
      return;
    }
    const bitmap = await this.blobs.arrivedBlocks(manifest);
    this.pull = new BlobPull(bitmap);
    if (bitmap.complete) await this.finish(manifest); // its last block came just before the tab was closed
  }

  async finish(manifest) {
    this.pull = null;
    try {
      await this.blobs.finish(manifest);
    } catch (wrong) {
      this.badHashes += 1;
      if (wrong.code !== "bad_hash" || this.badHashes > 1) this.failed = wrong;
      return;
    }
    this.next();
  }

  next() {
    this.queue.shift();
    this.pull = null;
    this.badHashes = 0;
  }
}
