// Upload of a stored result: announce it, send blocks against a credit, until the coordinator acknowledges it. Each step is
// repeated after a closed tab, a lost link or a missing answer. Times are in ms.

import { bodyRange, missingBlocks } from "../protocol/blocks.js";
import { Malformed } from "../protocol/errors.js";
import { keyOf, sameKey } from "./state.js";

const REPEAT_MS = 60_000; // an announcement without an answer is repeated after this time
const JITTER_MS = 15_000;
const RETRIED_CODES = ["busy", "rate", "internal"];

/** Delivers the result in `state`, one at a time; `sender` builds the messages, `transport` limits the unacknowledged ones. */
export class Uploader {
  constructor({ state, sender, transport, now, random = Math.random, tell = () => {} }) {
    Object.assign(this, { state, sender, transport, now, random, tell });
    this.upload = null; // a credit: {manifest, shard, window, owed}
    this.announced = null; // id of the last `rdy`
    this.againAt = null; // when to announce again; null: nothing to deliver
    this.resentHash = null; // the update that a wrong hash made us send again
  }

  /** Send `rdy` for the stored result, and again later if no answer comes. */
  async announce() {
    const { result } = this.state;
    if (!result) {
      this.cancel();
      return;
    }
    const { key, attempt, n, what, update, seconds, metrics } = result;
    this.upload = null;
    try {
      this.announced = this.sender.send("rdy", { ...key, attempt, n, what, update, seconds, metrics });
    } catch (wrong) {
      if (!(wrong instanceof Malformed)) throw wrong;
      console.warn("a result cannot be announced:", wrong.message);
      await this.giveUp();
      return;
    }
    this.announceIn(REPEAT_MS);
    if (this.transport.isUp) this.tell({ what: "delivering", size: update.size, done: 0 }); // else nothing went out
  }

  /** After a new connection: what is not acknowledged is announced again. */
  async linkUp() {
    this.upload = null;
    if (this.state.result && this.state.result.status === null) await this.announce();
  }

  linkLost() {
    this.upload = null;
  }

  /** Announce again to a restarted coordinator, within `spread` ms so that devices do not all send at once. */
  coordinatorRestarted(spread) {
    if (this.againAt === null) return;
    this.upload = null;
    this.againAt = this.now() + this.random() * spread;
  }

  cancel() {
    this.upload = null;
    this.againAt = null;
  }

  /** How long `step` has nothing to do; Infinity: until something happens. */
  waitMs() {
    if (this.upload !== null) return 0;
    return this.againAt === null ? Infinity : Math.max(0, this.againAt - this.now());
  }

  /** Send one block, or announce again, if either is due. */
  async step() {
    if (this.upload !== null) await this.sendBlock(this.upload);
    else if (this.againAt !== null && this.now() >= this.againAt) await this.announce();
  }

  /** A credit for blocks. One for anything but the announced update is ignored. */
  onGo(message) {
    const { result } = this.state;
    if (!result || result.update.sha256 !== message.sha256 || this.againAt === null) return;
    try {
      const owed = missingBlocks(result.update, message.have);
      this.upload = { manifest: result.update, shard: message.shard, window: message.window, owed };
    } catch (wrong) {
      console.warn("a credit with a bad bitmap:", wrong.message);
    }
  }

  /** The coordinator has decided about the update. An `ack` for what we did not send is ignored. */
  async onAck(message) {
    const { result } = this.state;
    if (!result || !sameKey(result.key, keyOf(message)) || result.update.sha256 !== message.sha256) return;
    this.upload = null;
    if (message.status === "retry") {
      this.announceIn(message.retry_ms ?? REPEAT_MS);
    } else if (message.status === "bad_hash" && this.resentHash !== message.sha256) {
      this.resentHash = message.sha256;
      await this.announce();
    } else {
      await this.settle(message.status);
    }
  }

  /** An error answer; it is ours when it names our announcement. */
  async onError(message) {
    if (message.re !== this.announced || this.againAt === null) return;
    if (RETRIED_CODES.includes(message.code)) this.announceIn(message.retry_ms ?? REPEAT_MS);
    else await this.settle(message.code);
  }

  async settle(status) {
    await this.state.commitAcknowledgement(status, { sent: this.state.result.update.size });
    this.cancel();
    this.tell({ what: "answered", status, sent: this.state.sent });
  }

  /** Forget a result that cannot be delivered: its task may come again. */
  async giveUp() {
    await this.state.forgetResult();
    this.cancel();
    this.tell({ what: "rest", owes: false });
  }

  announceIn(ms) {
    this.againAt = this.now() + ms + this.random() * JITTER_MS;
  }

  /** One block, once the broker has acknowledged enough of those before. */
  async sendBlock(upload) {
    await this.transport.drained(upload.window - 1);
    if (this.upload !== upload) return;
    const index = upload.owed.shift();
    if (index === undefined) {
      this.upload = null;
      this.announceIn(REPEAT_MS);
      return;
    }
    upload.data ??= await this.state.readUpdate();
    const { data } = upload;
    if (data === undefined) { // the browser lost it
      await this.giveUp();
      return;
    }
    const [start, stop] = bodyRange(upload.manifest, index);
    this.sender.sendBlock(upload.manifest, upload.shard, index, data.subarray(start, stop));
    this.tell({ what: "delivering", size: upload.manifest.size, done: stop / upload.manifest.size });
  }
}
