// The keys of one masked sum (PROTOCOL.md, section 21), by the browser's WebCrypto: HKDF, X25519, AES-GCM, SHA-256.
// A sum's context is {federation, run, round, exchange, roster}.

import { Malformed } from "../errors.js";
import { streamBytes } from "./masks.js";
import { COEFFICIENT_BYTES, SECRET_BYTES, SHARE_BYTES, splitSecret } from "./shamir.js";

export const KEY_BYTES = 32;
export const DIGEST_BYTES = 16;
export const COMMITMENT_BYTES = 32;
export const SEALED_BYTES = 2 * SHARE_BYTES + 16;
const MASK_KEY_BYTES = 16;
const PKCS8 = Uint8Array.of(0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x6e, 4, 0x22, 4, 0x20); // a private X25519 key follows
const BASE_POINT = Uint8Array.of(9, ...new Uint8Array(31));
const subtle = globalThis.crypto.subtle;
const ascii = (text) => new TextEncoder().encode(text);

/** Bytes one after the other. */
export function joined(...parts) {
  const out = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let at = 0;
  for (const part of parts) {
    out.set(part, at);
    at += part.length;
  }
  return out;
}

/** Whether two byte strings are equal. */
export const same = (one, other) => one.length === other.length && one.every((byte, i) => byte === other[i]);

/** The text that a derived key or a digest is bound to. */
export function label({ federation, run, round, exchange, roster }, purpose, ...parts) {
  return ascii(["fedcenters/v1/sum", federation, run, round, exchange, roster, purpose, ...parts].map((line) => `${line}\n`).join(""));
}

/** `size` bytes of HKDF-SHA256 without salt. */
export async function derive(secret, info, size) {
  const key = await subtle.importKey("raw", secret, "HKDF", false, ["deriveBits"]);
  const bits = await subtle.deriveBits({ name: "HKDF", hash: "SHA-256", salt: new Uint8Array(0), info }, key, 8 * size);
  return new Uint8Array(bits);
}

export const sealPrivate = (root) => derive(root, ascii("fedcenters/v1/prekey\nseal\n"), KEY_BYTES);
export const maskSecret = (root) => derive(root, ascii("fedcenters/v1/prekey\nmask secret\n"), SECRET_BYTES);
export const maskPrivate = (secret) => derive(secret, ascii("fedcenters/v1/prekey\nmask key\n"), KEY_BYTES);
export const selfSecret = (root, context) => derive(root, label(context, "self secret"), SECRET_BYTES);
export const selfMaskKey = (secret, context) => derive(secret, label(context, "self mask"), MASK_KEY_BYTES);

/** Both public keys of a root [64 bytes]: seal, then mask. */
export async function publicKeys(root) {
  return joined(await publicOf(await sealPrivate(root)), await publicOf(await maskPrivate(await maskSecret(root))));
}

/** The key [16 bytes] of the mask that two devices share. */
export async function pairMaskKey(secretKey, publicKey, context, one, other) {
  return derive(await agree(secretKey, publicKey), label(context, "pair mask", ...[one, other].sort()), MASK_KEY_BYTES);
}

export async function commitment(secret, context, cid) {
  return new Uint8Array(await subtle.digest("SHA-256", joined(label(context, "commitment", cid), secret)));
}

/** The first 16 bytes of a share's hash, by which its dealer announces it. */
export async function shareDigest(share, context, kind, dealer, holder) {
  const whole = await subtle.digest("SHA-256", joined(label(context, "share", kind, dealer, holder), share));
  return new Uint8Array(whole).slice(0, DIGEST_BYTES);
}

/** The digests of both shares [64 bytes], mask first. */
export async function digestsOf(both, context, dealer, holder) {
  const [mask, self] = [both.slice(0, SHARE_BYTES), both.slice(SHARE_BYTES)];
  return joined(await shareDigest(mask, context, "mask", dealer, holder), await shareDigest(self, context, "self", dealer, holder));
}

/** The shares of both secrets of a root: {mask, self}, each `count` of 32 bytes. */
export async function dealShares(root, context, threshold, count) {
  const deal = async (kind, secret) => {
    const key = await derive(root, label(context, "polynomial", kind), MASK_KEY_BYTES);
    return splitSecret(secret, await streamBytes(key, COEFFICIENT_BYTES * (threshold - 1)), threshold, count);
  };
  return { mask: await deal("mask", await maskSecret(root)), self: await deal("self", await selfSecret(root, context)) };
}

async function sealing(secretKey, publicKey, context, sender, receiver, use) {
  const text = label(context, "seal", sender, receiver);
  const raw = await derive(await agree(secretKey, publicKey), text, KEY_BYTES);
  const key = await subtle.importKey("raw", raw, "AES-GCM", false, [use]);
  return [{ name: "AES-GCM", iv: new Uint8Array(12), additionalData: text }, key]; // each key seals one message
}

export async function seal(secretKey, publicKey, context, sender, receiver, plain) {
  return new Uint8Array(await subtle.encrypt(...(await sealing(secretKey, publicKey, context, sender, receiver, "encrypt")), plain));
}

/** What `sender` sealed to `receiver`; Malformed for anything else. */
export async function unseal(secretKey, publicKey, context, sender, receiver, sealed) {
  const [how, key] = await sealing(secretKey, publicKey, context, sender, receiver, "decrypt");
  try {
    return new Uint8Array(await subtle.decrypt(how, key, sealed));
  } catch {
    throw new Malformed("bad_signature", `the sealed shares from ${sender} do not open at ${receiver}`);
  }
}

/** X25519; Malformed for a public key of small order. */
export async function agree(secretKey, publicKey) {
  try {
    const own = await subtle.importKey("pkcs8", joined(PKCS8, secretKey), "X25519", false, ["deriveBits"]);
    const other = await subtle.importKey("raw", publicKey, "X25519", false, []);
    const found = new Uint8Array(await subtle.deriveBits({ name: "X25519", public: other }, own, 256));
    if (found.some((byte) => byte)) return found;
  } catch (wrong) {
    if (wrong.name === "NotSupportedError") throw new Malformed("no_engine", "masked sums need X25519, which this browser has not: use a newer one");
  }
  throw new Malformed("bad_field", "X25519 refuses the key");
}

/** The public key of a private one: its product with the base point. */
export const publicOf = (secretKey) => agree(secretKey, BASE_POINT);
