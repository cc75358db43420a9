// Every message that a device sends is built here, with a fresh id and the time.

import { packBlock, totalOf } from "../protocol/blocks.js";
import { toHex } from "../protocol/bytes.js";
import { writeMessage } from "../protocol/messages.js";
import { routingLabel } from "../protocol/topics.js";

const ident = () => toHex(crypto.getRandomValues(new Uint8Array(8)));

/** Sends the messages of one device; `transport` is set after construction. */
export class DeviceSender {
  constructor(topics, cid) {
    Object.assign(this, { topics, cid, transport: null });
  }

  /** One request or answer to the coordinator; its id. */
  send(kind, fields) {
    const id = ident();
    this.transport.publish(this.topics.request(this.cid), writeMessage(kind, { id, t: Date.now(), ...fields }));
    return id;
  }

  /** Ask for blocks; `mark` is that of the last block that arrived, 0 without one. */
  requestBlocks(manifest, at, mark) {
    return this.send("get", { sha256: manifest.sha256, block: manifest.block, at, mark });
  }

  /** The retained record of this device. */
  sendPresence(s, bd, fields = {}) {
    this.transport.publish(this.topics.state(this.cid), this.presenceMessage(s, bd, fields), { retain: true });
  }

  /** A presence message as bytes; the will is one. */
  presenceMessage(s, bd, fields = {}) {
    return writeMessage("st", { id: ident(), t: Date.now(), s, bd, ...fields });
  }

  /** One block of an upload. */
  sendBlock(manifest, shard, index, body) {
    const topic = this.topics.upload(shard, this.cid, routingLabel(manifest.sha256), index);
    this.transport.publish(topic, packBlock(body, index, totalOf(manifest)));
  }
}
