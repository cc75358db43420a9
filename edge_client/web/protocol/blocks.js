// Blobs: the manifest that names one, the blocks that carry it, the bitmap of what has arrived (PROTOCOL.md, section 4).
// Everything about a block is checked against the manifest before its bytes are used.

import { crc32, fromBase64, sha256, toBase64 } from "./bytes.js";
import { Malformed, shown } from "./errors.js";

export const BLOCK_BYTES_STEP = 4_096;
export const MAX_BLOCK_BYTES = 1 << 20;
export const DEFAULT_BLOCK_BYTES = 65_536;
export const MAX_BLOCKS = 65_536;
export const MAX_INLINE_BYTES = 2_048;
export const MAX_BITMAP_BYTES = 4_096;
export const HEADER_BYTES = 16;
const VERSION = 1;
const MAX_BLOB_BYTES = 4 * 2 ** 30;
/** The most bytes of a blob of each kind. */
export const KIND_LIMITS = {
  model: MAX_BLOB_BYTES,
  linear: MAX_BLOB_BYTES,
  delta: MAX_BLOB_BYTES,
  stats: MAX_BLOB_BYTES,
  program: 1 << 20,
  container: 256 << 20,
  frozen: MAX_BLOB_BYTES,
  catalog: 1 << 20,
  release: 64 << 20,
  router: 8 << 20,
  sketch: MAX_BLOB_BYTES,
  sum: 65_536,
  masked: MAX_BLOB_BYTES,
  points: 2 ** 30,
};
const SIGNATURE = { key: /^[0-9a-f]{16}$/, sig: /^[0-9a-f]{128}$/ };

/** True for an integer that was written as one, from `low` to `high`. */
export function isCount(value, low, high = Number.MAX_SAFE_INTEGER) {
  return typeof value === "number" && Number.isInteger(value) && low <= value && value <= high;
}

/** The fields of a manifest, checked; all but the hash of an inline blob, which `checkInline` looks at. */
export function readManifestForm(obj) {
  if (obj === null || typeof obj !== "object" || Array.isArray(obj)) {
    throw new Malformed("bad_field", `a manifest is an object, got ${shown(obj)}`);
  }
  for (const name of ["sha256", "size", "block", "kind"]) {
    if (!Object.hasOwn(obj, name)) throw new Malformed("bad_field", `manifest without ${name}`);
  }
  const { size, block, kind } = obj;
  if (typeof obj.sha256 !== "string" || !/^[0-9a-f]{64}$/.test(obj.sha256)) {
    throw new Malformed("bad_field", `sha256 ${shown(obj.sha256)} is not 64 lower-case hex digits`);
  }
  if (typeof kind !== "string" || !Object.hasOwn(KIND_LIMITS, kind)) {
    throw new Malformed("bad_field", `kind ${shown(kind)} is none of ${Object.keys(KIND_LIMITS).join(", ")}`);
  }
  if (!isCount(block, BLOCK_BYTES_STEP, MAX_BLOCK_BYTES) || block % BLOCK_BYTES_STEP) {
    throw new Malformed("bad_field", `block ${shown(block)}: a multiple of ${BLOCK_BYTES_STEP} up to ${MAX_BLOCK_BYTES}`);
  }
  if (!isCount(size, 1)) {
    throw new Malformed("bad_field", `size ${shown(size)} is not a positive integer`);
  }
  if (size > KIND_LIMITS[kind]) throw new Malformed("too_big", `${kind} of ${size} bytes, at most ${KIND_LIMITS[kind]}`);
  const found = { sha256: obj.sha256, size, block, kind };
  if (totalOf(found) > MAX_BLOCKS) throw new Malformed("bad_field", `${totalOf(found)} blocks, at most ${MAX_BLOCKS}`);
  if (Object.hasOwn(obj, "inline")) found.inline = checkInlineForm(obj.inline, size);
  return { ...found, ...readSignatureForm(obj, kind) };
}

/** "bad_hash" unless an inline blob is the one that its manifest names. */
export async function checkInline(manifest) {
  if (manifest.inline === undefined) return;
  if ((await sha256(inlineBytes(manifest))) !== manifest.sha256) {
    throw new Malformed("bad_hash", "the inline blob is not the one that its manifest names");
  }
}

/** The bytes of an inline blob. */
export function inlineBytes(manifest) {
  return fromBase64(manifest.inline, MAX_INLINE_BYTES);
}

/** Name `data`; with `inline` it travels in the manifest itself if it is small. */
export async function manifestOf(data, kind, { block = DEFAULT_BLOCK_BYTES, inline = false } = {}) {
  const found = { sha256: await sha256(data), size: data.length, block, kind };
  if (inline && data.length <= MAX_INLINE_BYTES) found.inline = toBase64(data);
  return found;
}

/** Number of blocks. */
export function totalOf(manifest) {
  return Math.ceil(manifest.size / manifest.block);
}

/** Where block `index` lies in the blob: [start, stop). */
export function bodyRange(manifest, index) {
  if (!isCount(index, 0, totalOf(manifest) - 1)) {
    throw new Malformed("bad_range", `block ${shown(index)} of a blob of ${totalOf(manifest)} blocks`);
  }
  const start = index * manifest.block;
  return [start, Math.min(start + manifest.block, manifest.size)];
}

/** The message that carries one block. */
export function packBlock(body, index, total) {
  if (body.length < 1 || body.length > MAX_BLOCK_BYTES) throw new Malformed("bad_field", `block body of ${body.length} bytes`);
  if (!isCount(total, 1, MAX_BLOCKS) || !isCount(index, 0, total - 1)) {
    throw new Malformed("bad_range", `block ${index} of ${total}, at most ${MAX_BLOCKS} blocks`);
  }
  const message = new Uint8Array(HEADER_BYTES + body.length);
  const view = new DataView(message.buffer);
  view.setUint8(0, VERSION);
  view.setUint32(4, index, true);
  view.setUint32(8, total, true);
  view.setUint32(12, crc32(body, crc32(message.subarray(0, 12))), true);
  message.set(body, HEADER_BYTES);
  return message;
}

/** The body of block `index` (from the topic) of the blob `manifest`; Malformed unless everything fits. A mark is refused. */
export function unpackBlock(message, manifest, index) {
  const { body, mark } = unpackMarkedBlock(message, manifest, index);
  if (mark) throw new Malformed("bad_field", `block mark ${mark}, where none belongs`);
  return body;
}

/** The body of a block and its mark, which the next `get` names; 0 without one. */
export function unpackMarkedBlock(message, manifest, index) {
  const [start, stop] = bodyRange(manifest, index);
  if (message.length < HEADER_BYTES) throw new Malformed("bad_field", `block message of ${message.length} bytes`);
  const view = new DataView(message.buffer, message.byteOffset, message.byteLength);
  if (view.getUint8(0) !== VERSION) throw new Malformed("bad_version", `block version ${view.getUint8(0)}`);
  if (view.getUint8(1)) throw new Malformed("bad_field", "block flags; none is defined");
  const [saidIndex, saidTotal] = [view.getUint32(4, true), view.getUint32(8, true)];
  if (saidIndex !== index || saidTotal !== totalOf(manifest)) {
    throw new Malformed("bad_range", `block ${saidIndex} of ${saidTotal}, expected ${index} of ${totalOf(manifest)}`);
  }
  if (message.length - HEADER_BYTES !== stop - start) {
    throw new Malformed("bad_field", `block body of ${message.length - HEADER_BYTES} bytes, expected ${stop - start}`);
  }
  const body = message.slice(HEADER_BYTES);
  if (crc32(body, crc32(message.subarray(0, 12))) !== view.getUint32(12, true)) {
    throw new Malformed("bad_hash", `block ${index}: checksum differs`);
  }
  return { body, mark: view.getUint16(2, true) };
}

/** The mark of a block that is no longer wanted, unchecked; 0 without one. */
export const readMark = (message) => (message.length < HEADER_BYTES ? 0 : message[2] | (message[3] << 8));

/** Which of `total` blocks have arrived: block i is bit i mod 8, least significant first, of byte i div 8. */
export class Bitmap {
  constructor(total) {
    if (!isCount(total, 1, MAX_BLOCKS)) throw new Malformed("bad_field", `a bitmap of ${shown(total)} blocks`);
    this.total = total;
    this.count = 0;
    this.bits = new Uint8Array(Math.ceil(total / 8));
  }

  /** What `toBase64` wrote; Malformed on another length or a bit beyond `total`. */
  static fromBase64(total, text) {
    const bitmap = new Bitmap(total);
    const data = fromBase64(text, MAX_BLOCKS / 8);
    if (data.length !== bitmap.bits.length) throw new Malformed("bad_field", `bitmap of ${data.length} bytes`);
    if (total % 8 && data.at(-1) >> (total % 8)) throw new Malformed("bad_field", "bitmap has bits beyond its blocks");
    for (let i = 0; i < total; i += 1) if ((data[i >> 3] >> (i & 7)) & 1) bitmap.add(i);
    return bitmap;
  }

  has(index) {
    if (!isCount(index, 0, this.total - 1)) throw new Malformed("bad_range", `block ${shown(index)} of ${this.total}`);
    return Boolean((this.bits[index >> 3] >> (index & 7)) & 1);
  }

  /** Note a block; true if it is new. */
  add(index) {
    if (this.has(index)) return false;
    this.bits[index >> 3] |= 1 << (index & 7);
    this.count += 1;
    return true;
  }

  get complete() {
    return this.count === this.total;
  }

  /** The first `limit` missing blocks that are not in `skip`, as runs [first, count]: the `at` of a `get`. */
  missing(limit, skip = new Set()) {
    const runs = [];
    for (let index = 0, found = 0; index < this.total && found < limit; index += 1) {
      if (this.has(index) || skip.has(index)) continue;
      found += 1;
      const last = runs.at(-1);
      if (last && last[0] + last[1] === index) last[1] += 1;
      else runs.push([index, 1]);
    }
    return runs;
  }

  toBase64() {
    return toBase64(this.bits);
  }
}

/** The blocks that an upload still owes, in order; `have` is the bitmap of a `go`. */
export function missingBlocks(manifest, have) {
  const total = totalOf(manifest);
  const bitmap = have === undefined ? new Bitmap(total) : Bitmap.fromBase64(total, have);
  return bitmap.missing(total).flatMap(([first, count]) => Array.from({ length: count }, (_, i) => first + i));
}

function checkInlineForm(text, size) {
  if (fromBase64(text, MAX_INLINE_BYTES).length !== size) {
    throw new Malformed("bad_hash", "the inline blob is not the one that its manifest names");
  }
  return text;
}

function readSignatureForm(obj, kind) {
  const there = ["key", "sig"].filter((name) => Object.hasOwn(obj, name));
  if (there.length === 1) throw new Malformed("bad_signature", "key and sig come together");
  for (const name of there) {
    if (typeof obj[name] !== "string" || !SIGNATURE[name].test(obj[name])) {
      throw new Malformed("bad_signature", `${name} ${shown(obj[name])} is not of the form ${SIGNATURE[name].source}`);
    }
  }
  if (kind === "program" && !there.length) throw new Malformed("bad_signature", "a program's manifest must be signed");
  return there.length ? { key: obj.key, sig: obj.sig } : {};
}
