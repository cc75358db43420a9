// The one place where topics are built and read (PROTOCOL.md, section 2). A topic is the identity of a message.

import { crc32 } from "./bytes.js";
import { Malformed, shown } from "./errors.js";

export const MAX_TOPIC_NUMBER = 65_535;
const PREFIX = "fc/v1";
const MAX_TOPIC_BYTES = 256;
const ENCODER = new TextEncoder();
const FORMS = {
  federation: /^[a-z0-9-]{1,32}$/,
  cid: /^[A-Za-z0-9_-]{1,64}$/,
  run: /^[a-z0-9]{1,16}$/,
  sha256: /^[0-9a-f]{64}$/,
  label: /^[0-9a-f]{16}$/,
  number: /^(?:0|[1-9][0-9]{0,4})$/,
};
// levels after the federation -> kind; a name in braces is a level of that form
const ROWS = [
  ["coord", ["bc", "coord"]],
  ["cat", ["bc", "cat"]],
  ["st", ["st", "{cid}"]],
  ["rq", ["rq", "{cid}"]],
  ["in", ["in", "{shard}", "{cid}", "{label}", "{index}"]],
  ["t", ["dn", "{cid}", "t"]],
  ["b", ["dn", "{cid}", "b", "{label}", "{index}"]],
];

/** A text of one of the forms above; Malformed for anything else. */
export function checkName(form, value) {
  if (typeof value !== "string" || !FORMS[form].test(value)) {
    throw new Malformed("bad_field", `${form} ${shown(value)} is not of the form ${FORMS[form].source}`);
  }
  return value;
}

/** The 16 digits that route a blob's blocks; never a key. */
export function routingLabel(sha256) {
  return checkName("sha256", sha256).slice(0, 16);
}

/** The aggregator that takes all uploads of a device. */
export function clientShard(cid, shards) {
  return crc32(ENCODER.encode(checkName("cid", cid))) % shards;
}

/** All topics of one federation. */
export class Topics {
  constructor(federation) {
    this.root = `${PREFIX}/${checkName("federation", federation)}`;
    this.federation = federation;
  }

  coord() {
    return `${this.root}/bc/coord`;
  }

  catalog() {
    return `${this.root}/bc/cat`;
  }

  state(cid) {
    return `${this.root}/st/${checkName("cid", cid)}`;
  }

  request(cid) {
    return `${this.root}/rq/${checkName("cid", cid)}`;
  }

  upload(shard, cid, name, index) {
    return `${this.root}/in/${number(shard)}/${checkName("cid", cid)}/${checkName("label", name)}/${number(index)}`;
  }

  down(cid) {
    return `${this.root}/dn/${checkName("cid", cid)}/t`;
  }

  downBlock(cid, name, index) {
    return `${this.root}/dn/${checkName("cid", cid)}/b/${checkName("label", name)}/${number(index)}`;
  }

  /** The MQTT client id of a device. */
  clientId(cid) {
    return `${this.federation}.${checkName("cid", cid)}`;
  }

  /** What a device subscribes to: records by name, since some brokers bring no retained message for a pattern. */
  deviceFilters(cid) {
    return [`${this.root}/bc/coord`, `${this.root}/bc/cat`, `${this.root}/dn/${checkName("cid", cid)}/#`];
  }

  /** A topic of this federation -> {kind, cid, label, shard, index}; Malformed for any other text. */
  parse(topic) {
    if (topic.length > MAX_TOPIC_BYTES || !topic.startsWith(`${this.root}/`)) {
      throw new Malformed("bad_field", `topic ${shown(topic)} is not of federation ${this.federation}`);
    }
    const levels = topic.slice(this.root.length + 1).split("/");
    for (const [kind, row] of ROWS) {
      if (row.length === levels.length && row.every((word, i) => word.startsWith("{") || word === levels[i])) {
        return { kind, ...readLevels(row, levels) };
      }
    }
    throw new Malformed("bad_field", `topic ${shown(topic)} is none of the protocol's`);
  }
}

function readLevels(row, levels) {
  const found = {};
  row.forEach((word, i) => {
    if (!word.startsWith("{")) return;
    const name = word.slice(1, -1);
    found[name] = name === "cid" || name === "label" ? checkName(name, levels[i]) : readNumber(levels[i]);
  });
  return found;
}

function number(value) {
  if (!Number.isInteger(value) || value < 0 || value > MAX_TOPIC_NUMBER) {
    throw new Malformed("bad_field", `a shard or block number must be 0 to ${MAX_TOPIC_NUMBER}, got ${shown(value)}`);
  }
  return String(value);
}

function readNumber(text) {
  const value = Number(checkName("number", text));
  if (value > MAX_TOPIC_NUMBER) throw new Malformed("bad_field", `number ${value} in a topic is above ${MAX_TOPIC_NUMBER}`);
  return value;
}
