// The federation's public facts (join.json) and this device's identity. A link carries the secret after the '#', which a
// browser never sends: `#id=web-0001&secret=...`. It is kept in this browser and wiped from the address at once.

import { fromHex, toHex } from "./protocol/bytes.js";
import { checkName } from "./protocol/topics.js";

const IDENTITY = "fedcenters/identity";
const LAST_FACTS = "fedcenters/join";
const RETRY_MS = 5_000;
const VERSION = new URL(import.meta.url).pathname.split("/").at(-2);

/** The coordinator cannot be reached, or what stands before it says so. */
class Unreachable extends Error {}

/** What the coordinator says at join.json, checked: {federation, broker, keys, open, model}. Throws Error with words. */
export async function fetchJoin(url, kept = localStorage) {
  let answer;
  try {
    answer = await fetch(url, { cache: "no-store" });
  } catch (wrong) {
    throw new Unreachable(`the coordinator cannot be reached: ${wrong.message}`);
  }
  if (answer.status >= 500) throw new Unreachable(`the coordinator answers ${answer.status}`);
  if (!answer.ok) throw new Error(`the coordinator answers ${answer.status}`);
  const raw = await answer.json();
  if (raw.page !== VERSION) throw new Error("this page is older than its coordinator; load it again");
  const join = readFacts(raw);
  kept.setItem(LAST_FACTS, JSON.stringify(raw));
  return join;
}

/**
 * The facts, or those of the last visit where the coordinator cannot be reached. `confirmed` settles once it has answered:
 * nothing may be sent before, since the broker, the keys or the page may be others by then.
 */
export async function findJoin(url, kept = localStorage) {
  try {
    const join = await fetchJoin(url, kept);
    return { join, confirmed: Promise.resolve(), offline: false };
  } catch (wrong) {
    const last = kept.getItem(LAST_FACTS);
    if (!(wrong instanceof Unreachable) || last === null) throw wrong;
    const join = readFacts(JSON.parse(last));
    return { join, confirmed: confirm(url, join, kept), offline: true };
  }
}

async function confirm(url, { federation, broker, keys }, kept) {
  const facts = (join) => JSON.stringify([join.federation, join.broker, join.keys.map(toHex)]);
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    try {
      if (facts(await fetchJoin(url, kept)) === facts({ federation, broker, keys })) return;
      throw new Error("the coordinator has another broker, or other keys, than at the last visit; load this page again");
    } catch (wrong) {
      if (!(wrong instanceof Unreachable)) throw wrong;
    }
  }
}

function readFacts(raw) {
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
