// Shamir's secret sharing over the prime 2^255 - 19 (PROTOCOL.md, section 21). Secrets have 31 bytes, shares 32, little-endian.

import { toHex } from "../bytes.js";
import { Malformed } from "../errors.js";

export const SECRET_BYTES = 31;
export const SHARE_BYTES = 32;
export const COEFFICIENT_BYTES = 48;
const PRIME = 2n ** 255n - 19n;

const fromBytes = (data) => BigInt(`0x${toHex(Uint8Array.from(data).reverse())}`);

function toBytes(value) {
  const out = new Uint8Array(SHARE_BYTES);
  for (let i = 0, left = value; i < SHARE_BYTES; i += 1, left >>= 8n) out[i] = Number(left & 255n);
  return out;
}

/** The shares [32 bytes] of a secret for x = 1 to `count`; `random` has 48 (threshold - 1) bytes. */
export function splitSecret(secret, random, threshold, count) {
  if (!(threshold >= 1 && threshold <= count && count <= 255)) throw new Malformed("bad_field", `${threshold} of ${count} shares`);
  if (secret.length !== SECRET_BYTES || random.length !== COEFFICIENT_BYTES * (threshold - 1)) {
    throw new Malformed("bad_field", `secret of ${secret.length} bytes with ${random.length} random bytes`);
  }
  const coefficients = [fromBytes(secret)];
  for (let at = 0; at < random.length; at += COEFFICIENT_BYTES) coefficients.push(fromBytes(random.slice(at, at + COEFFICIENT_BYTES)) % PRIME);
  coefficients.reverse();
  return Array.from({ length: count }, (_, i) => toBytes(coefficients.reduce((value, c) => (value * BigInt(i + 1) + c) % PRIME, 0n)));
}
