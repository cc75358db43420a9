// Ed25519 signatures of blobs (PROTOCOL.md, section 5), checked by the browser's WebCrypto. Public keys come with the join
// file, never over MQTT.

import { fromHex, sha256 } from "./bytes.js";
import { Malformed } from "./errors.js";
import { checkName } from "./topics.js";

const MAX_EPOCH_JUMP = 1_000_000;

/** What is signed. */
export function signedText(federation, manifest) {
  const { kind, sha256: hash, size } = manifest;
  return new TextEncoder().encode(`fedcenters/v1/blob\n${checkName("federation", federation)}\n${kind}\n${hash}\n${size}\n`);
}

/** The 16 hex digits that name a public key [32 bytes]. */
export async function keyId(key) {
  return (await sha256(key)).slice(0, 16);
}

/** Whether this browser can check signatures at all: Chrome 137, Firefox 129, Safari 17 and newer can. */
export async function canVerify() {
  try {
    await crypto.subtle.importKey("raw", new Uint8Array(32), "Ed25519", false, ["verify"]);
    return true;
  } catch (wrong) {
    return wrong.name !== "NotSupportedError" && Boolean(globalThis.crypto?.subtle);
  }
}

/** Return if one of the `trusted` public keys signed this manifest for this federation; Malformed otherwise. */
export async function verifyManifest(manifest, trusted, federation) {
  for (const key of trusted) {
    if (manifest.sig !== undefined && manifest.key === (await keyId(key))) {
      if (await isValidSignature(key, manifest, federation)) return;
      throw new Malformed("bad_signature", `${manifest.kind} ${manifest.sha256.slice(0, 16)} was not signed by its key`);
    }
  }
  throw new Malformed("bad_signature", `${manifest.kind} ${manifest.sha256.slice(0, 16)} is signed by no key that is trusted here`);
}

/**
 * Return if one of the `trusted` keys signed the epoch and boot of this `coord`; `known` is the highest epoch so far.
 * A record is signed as a blob whose hash is its boot and whose size is its epoch.
 */
export async function verifyRecord({ boot, epoch, key, sig }, trusted, federation, known) {
  await verifyManifest({ kind: "coord", sha256: boot, size: epoch, key, sig }, trusted, federation);
  if (epoch > known + MAX_EPOCH_JUMP) throw new Malformed("bad_field", `epoch ${epoch} is more than ${MAX_EPOCH_JUMP} above ${known}`);
}

async function isValidSignature(key, manifest, federation) {
  try {
    const imported = await crypto.subtle.importKey("raw", key, "Ed25519", false, ["verify"]);
    return await crypto.subtle.verify("Ed25519", imported, fromHex(manifest.sig), signedText(federation, manifest));
  } catch {
    return false;
  }
}
