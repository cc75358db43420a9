// The messages of one masked sum (PROTOCOL.md, section 21). `read(kind, data)` gives an object whose lists by device are Maps of bytes;
// `write(kind, message)` gives canonical JSON.

import { fromBase64, fromHex, toBase64 } from "../bytes.js";
import { Malformed } from "../errors.js";
import { canonicalJson, parseJson } from "../json.js";
import { checkName } from "../topics.js";
import { integer, isObject, listOf, matching, record, required } from "../validators.js";
import { COMMITMENT_BYTES, DIGEST_BYTES, joined, KEY_BYTES, SEALED_BYTES } from "./keys.js";
import { SHARE_BYTES } from "./shamir.js";

const MAX_SUM_MESSAGE_BYTES = 65_536;
const MAX_NEIGHBOURS = 255;
export const MAX_PREKEYS = 16;
export const ENVELOPE_BYTES = SEALED_BYTES + 2 * DIGEST_BYTES;

const any = (value) => value;
const cid = (value) => checkName("cid", value);
const roster = matching("[0-9a-f]{64}");
const u32 = integer(0, 2 ** 32 - 1);

const bytesOf = (size) => (value, name) => {
  const data = fromBase64(value, size);
  if (data.length !== size) throw new Malformed("bad_field", `${name} has ${data.length} bytes, expected ${size}`);
  return data;
};

function rising(values, name) {
  if (values.some((value, i) => i && !(values[i - 1] < value))) throw new Malformed("bad_field", `${name} is not sorted, or has an entry twice`);
  return values;
}

const cids = (value, name) => rising(listOf(cid, 0, MAX_NEIGHBOURS)(value, name), name);

const byDevice = (size) => (value, name) => {
  const rows = listOf(listOf(any, 2, 2), 0, MAX_NEIGHBOURS)(value, name);
  rising(rows.map(([who]) => cid(who)), name);
  return new Map(rows.map(([who, data]) => [who, bytesOf(size)(data, `${name} of ${who}`)]));
};

function prekeys(value, name) {
  const rows = listOf(listOf(any, 2, 2), 0, MAX_PREKEYS)(value, name);
  rising(rows.map(([number]) => integer(0)(number, name)), name);
  return new Map(rows.map(([number, keys]) => [number, bytesOf(2 * KEY_BYTES)(keys, name)]));
}

const TABLES = {
  prekeys: required({ keys: prekeys }),
  roster: required({
    run: matching("[a-z0-9]{1,16}"), round: u32, exchange: u32, roster, cid, number: integer(0), devices: integer(5, 100_000),
    threshold: integer(2, MAX_NEIGHBOURS), words: integer(1, 2 ** 30), bits: integer(16, 32), neighbours: byDevice(2 * KEY_BYTES),
  }),
  shares: required({ roster, commitment: bytesOf(COMMITMENT_BYTES), envelopes: byDevice(ENVELOPE_BYTES) }),
  relay: required({ roster, envelopes: byDevice(ENVELOPE_BYTES) }),
  unmask: required({ roster, survivors: cids, dropped: cids }),
  reveal: required({ roster, self: byDevice(SHARE_BYTES), mask: byDevice(SHARE_BYTES) }),
};

/** Read a message of a kind; Malformed for what breaks a rule. */
export function readSumMessage(kind, data) {
  const given = parseJson(data, MAX_SUM_MESSAGE_BYTES);
  if (!isObject(given)) throw new Malformed("bad_json", `${kind} is a JSON object`);
  if (given.v !== 1) throw new Malformed("bad_version", `${kind} of another version than 1`);
  const message = record(TABLES[kind])(given, kind);
  if (kind === "roster") {
    const near = message.neighbours;
    if (near.has(message.cid) || message.threshold > near.size || near.size >= message.devices) {
      throw new Malformed("bad_field", `threshold ${message.threshold} of ${near.size} neighbours`);
    }
  }
  if (kind === "unmask") checkDisjoint(message.survivors, message.dropped);
  if (kind === "reveal") checkDisjoint([...message.self.keys()], [...message.mask.keys()]);
  return message;
}

function checkDisjoint(one, other) {
  if (one.some((who) => other.includes(who))) throw new Malformed("bad_task", "a device cannot both survive and drop out");
}

/** A message in canonical JSON: bytes become base64, Maps sorted lists. */
export function writeSumMessage(message) {
  const written = (value) => {
    if (value instanceof Uint8Array) return toBase64(value);
    if (value instanceof Map) return [...value].sort(([a], [b]) => (a < b ? -1 : 1)).map(([key, data]) => [key, written(data)]);
    return value;
  };
  return canonicalJson({ v: 1, ...Object.fromEntries(Object.entries(message).map(([name, value]) => [name, written(value)])) });
}

/** A masked vector as a blob: 40 bytes of header, then the packed words. */
export function writeUpload(name, words, bits, packed) {
  const head = new Uint8Array(8);
  head.set([1, bits]);
  new DataView(head.buffer).setUint32(4, words, true);
  return joined(head, fromHex(name), packed);
}
