// The federation's public facts (join.json) and this device's identity. A link carries the secret after the '#', which a
// browser never sends: `#id=web-0001&secret=...`. It is kept in this browser and wiped from the address at once.

import { fromHex, toHex } from "./protocol/bytes.js";
import { checkName } from "./protocol/topics.js";

const IDENTITY = "fedcenters/identity";

/** What the coordinator says at join.json, checked: {federation, broker, keys, open, model}. Throws Error with words. */
export async function fetchJoin(url) {
  const answer = await fetch(url, { cache: "no-store" });
  if (!answer.ok) throw new Error(`the coordinator answers ${answer.status}`);
  const raw = await answer.json();
  if (!/^wss?:\/\//.test(raw.broker)) throw new Error("this coordinator offers no broker for browsers");
  if (!raw.signing_keys.length) throw new Error("this coordinator names no signing key");
  const keys = raw.signing_keys.map((key) => {
    const bytes = fromHex(key);
    if (bytes.length !== 32) throw new Error("a signing key has 32 bytes");
    return bytes;
  });
  return { federation: checkName("federation", raw.federation), broker: raw.broker, keys, open: raw.open === true, model: raw.model };
}

/** {id, username, password} of this browser in a federation; null where a link is needed and none was followed. */
export function loadIdentity({ federation, open }, address, kept = localStorage) {
  const given = new URLSearchParams(address.hash.slice(1));
  const name = `${IDENTITY}/${federation}`;
  if (given.has("id")) {
    const found = { id: checkName("cid", given.get("id")), secret: given.get("secret") ?? "" };
    kept.setItem(name, JSON.stringify(found));
    return credentialsOf(found);
  }
  const old = kept.getItem(name);
  if (old !== null) return credentialsOf(JSON.parse(old));
  if (!open) return null;
  const fresh = { id: `phone-${toHex(crypto.getRandomValues(new Uint8Array(5)))}`, secret: "" };
  kept.setItem(name, JSON.stringify(fresh));
  return credentialsOf(fresh);
}

function credentialsOf({ id, secret }) {
  return secret ? { id, username: id, password: secret } : { id };
}
