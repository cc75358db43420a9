// Hex, base64, CRC-32 and SHA-256 over Uint8Array.

import { Malformed, shown } from "./errors.js";

const BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
const FORM = /^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$/;
const CRC = Uint32Array.from({ length: 256 }, (_, i) => {
  let c = i;
  for (let k = 0; k < 8; k += 1) c = c & 1 ? 0xedb88320 ^ (c >>> 1) : c >>> 1;
  return c;
});

/** Lower-case hex digits. */
export function toHex(data) {
  return Array.from(data, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** An even number of hex digits -> bytes. */
export function fromHex(text) {
  if (!/^(?:[0-9a-f]{2})*$/.test(text)) throw new Malformed("bad_field", `${shown(text)} is not hex`);
  return Uint8Array.from({ length: text.length / 2 }, (_, i) => Number.parseInt(text.slice(2 * i, 2 * i + 2), 16));
}

/** The standard alphabet, padded. */
export function toBase64(data) {
  let out = "";
  for (let i = 0; i < data.length; i += 3) {
    const left = data.length - i;
    const three = (data[i] << 16) | ((data[i + 1] ?? 0) << 8) | (data[i + 2] ?? 0);
    out += BASE64[three >> 18] + BASE64[(three >> 12) & 63];
    out += (left > 1 ? BASE64[(three >> 6) & 63] : "=") + (left > 2 ? BASE64[three & 63] : "=");
  }
  return out;
}

/** Strict base64 of at most `limit` bytes: no line breaks, padded, no spare bits. */
export function fromBase64(text, limit) {
  if (typeof text !== "string" || /[^\x00-\x7f]/.test(text)) throw new Malformed("bad_field", `expected base64 text, got ${shown(text)}`);
  const size = Math.floor(text.length / 4) * 3 - (text.endsWith("==") ? 2 : text.endsWith("=") ? 1 : 0);
  if (size > limit) throw new Malformed("too_big", `base64 of ${size} bytes, at most ${limit} are allowed`);
  if (!FORM.test(text)) throw new Malformed("bad_field", "not base64");
  const out = new Uint8Array(size);
  for (let i = 0, at = 0; i < text.length; i += 4) {
    const four = [0, 1, 2, 3].map((k) => Math.max(0, BASE64.indexOf(text[i + k])));
    const three = (four[0] << 18) | (four[1] << 12) | (four[2] << 6) | four[3];
    for (const shift of [16, 8, 0]) if (at < out.length) out[at++] = (three >> shift) & 255;
  }
  if (toBase64(out) !== text) throw new Malformed("bad_field", "base64 with spare bits");
  return out;
}

/** zlib's CRC-32; `crc` goes on from an earlier part. */
export function crc32(data, crc = 0) {
  let c = ~crc;
  for (let i = 0; i < data.length; i += 1) c = CRC[(c ^ data[i]) & 255] ^ (c >>> 8);
  return ~c >>> 0;
}

/** SHA-256 as 64 hex digits. */
export async function sha256(data) {
  return toHex(new Uint8Array(await crypto.subtle.digest("SHA-256", data)));
}

/** Whether two byte arrays are the same. */
export function equal(a, b) {
  return a.length === b.length && a.every((byte, i) => byte === b[i]);
}
