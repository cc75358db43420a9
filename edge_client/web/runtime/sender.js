// A device's voice: every message that it sends is built here, with a fresh id and the time. Decides nothing.

import { pack, totalOf } from "../protocol/blocks.js";
import { toHex } from "../protocol/bytes.js";
import { write } from "../protocol/messages.js";
import { label } from "../protocol/topics.js";

const ident = () => toHex(crypto.getRandomValues(new Uint8Array(8)));

/** Speaks for one device; `transport` is set once there is one. */
export class Voice {
  constructor(topics, cid) {
    Object.assign(this, { topics, cid, transport: null });
  }

  /** One request or answer to the coordinator; its id. */
  say(kind, fields) {
    const id = ident();
    this.transport.publish(this.topics.request(this.cid), write(kind, { id, t: Date.now(), ...fields }));
    return id;
  }

  get(manifest, at) {
    return this.say("get", { sha256: manifest.sha256, block: manifest.block, at });
  }

  /** The retained record of this device. */
  presence(s, bd, fields = {}) {
    this.transport.publish(this.topics.state(this.cid), this.record(s, bd, fields), { retain: true });
  }

  /** A presence message as bytes; the will is one. */
  record(s, bd, fields = {}) {
    return write("st", { id: ident(), t: Date.now(), s, bd, ...fields });
  }

  /** One block of an upload. */
  block(manifest, shard, index, body) {
    const topic = this.topics.upload(shard, this.cid, label(manifest.sha256), index);
    this.transport.publish(topic, pack(body, index, totalOf(manifest)));
  }
}
