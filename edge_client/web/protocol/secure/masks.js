// Masks over vectors of words modulo 2^b, and the words as bytes (PROTOCOL.md, section 21). A vector is a Uint32Array, whose sums wrap.

import { Malformed } from "../errors.js";

const BLOCK_WORDS = 1 << 16; // a mask is made in pieces of 256 KiB, so memory does not grow with their number
const subtle = globalThis.crypto.subtle;

async function piece(key, start, size) {
  const counter = new Uint8Array(16);
  new DataView(counter.buffer).setBigUint64(8, BigInt(start / 16));
  return new Uint8Array(await subtle.encrypt({ name: "AES-CTR", counter, length: 128 }, key, new Uint8Array(size)));
}

/** The first `size` bytes of the stream of this key [16 bytes]. */
export async function streamBytes(raw, size) {
  return piece(await subtle.importKey("raw", raw, "AES-CTR", false, ["encrypt"]), 0, size);
}

/** Add to `words` the masks of `keys`: [key of 16 bytes, sign 1 or -1]. */
export async function addMasksInto(words, keys) {
  for (const [raw, sign] of keys) {
    const key = await subtle.importKey("raw", raw, "AES-CTR", false, ["encrypt"]);
    for (let start = 0; start < words.length; start += BLOCK_WORDS) {
      const count = Math.min(BLOCK_WORDS, words.length - start);
      const mask = new DataView((await piece(key, 4 * start, 4 * count)).buffer);
      for (let i = 0; i < count; i += 1) words[start + i] += sign * mask.getUint32(4 * i, true);
    }
  }
}

/** 1 where the own id comes before the other's, else -1; ids are ASCII. */
export const pairSign = (own, other) => (own < other ? 1 : -1);

/** The lower `bits` bits of each word, one after the other, least significant bit first. */
export function packWords(words, bits) {
  if (!(bits >= 16 && bits <= 32)) throw new Malformed("bad_field", `words of ${bits} bits: 16 to 32`);
  if (bits === 32) return new Uint8Array(words.slice().buffer);
  const out = new Uint8Array(Math.ceil((words.length * bits) / 8));
  let at = 0;
  let kept = 0; // bits that wait for a whole byte, fewer than 8
  let waiting = 0;
  for (const word of words) {
    waiting += (word % 2 ** bits) * 2 ** kept; // below 2^40, so a double is exact
    for (kept += bits; kept >= 8; kept -= 8) {
      out[at++] = waiting % 256;
      waiting = Math.floor(waiting / 256);
    }
  }
  if (kept) out[at] = waiting;
  return out;
}
