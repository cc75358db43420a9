// The federation's public facts (join.json) and this device's identity. A link carries the secret after the '#', which a
// browser never sends: `#id=web-0001&secret=...`. It is kept in this browser, and then wiped from the address. `kept` is a
// Store (runtime/store.js), whose writes are on the disk: localStorage loses the last seconds of a browser that is killed.

import { fromHex, toHex } from "./protocol/bytes.js";
import { CLASS_NAMES } from "./protocol/nearest/catalog.js";
import { checkName } from "./protocol/topics.js";

export const PAGE_STORE = "fedcenters"; // what is no single federation's
const IDENTITY = "identity/";
const LAST_FACTS = "join/"; // of each address: below another path may be another coordinator
const RETRY_MS = 5_000;
const MODEL_POLL_MS = 2_000;
const PATIENCE_MS = 8_000; // as worker.js has it: a network that drops what is sent answers nothing, for minutes
export const PAGE_VERSION = new URL(import.meta.url).pathname.split("/").at(-2);

/** The coordinator cannot be reached, or what stands before it says so. */
class Unreachable extends Error {}

/** The coordinator was upgraded since this page was loaded. */
export class OldPage extends Error {}

/** What the coordinator says at join.json, checked: {federation, broker, keys, open, model}. Throws Error with words. */
async function fetchJoin(url, kept) {
  const signal = AbortSignal.timeout(PATIENCE_MS); // also for the body
  let answer;
  try {
    answer = await fetch(url, { cache: "no-store", signal });
  } catch (wrong) {
    throw new Unreachable(`cannot reach the coordinator: ${wrong.message}`);
  }
  if (answer.status >= 500 || answer.status === 429) throw new Unreachable(`the coordinator answers ${answer.status}`);
  if (!answer.ok) throw new Error(`the coordinator answers ${answer.status}: load this page again, or ask its operator for a link that works`);
  const raw = await answer.json().catch(() => {
    throw new Unreachable("what answers there is not the coordinator");
  });
  if (raw.page !== PAGE_VERSION) throw new OldPage("this page is older than its coordinator; load it again");
  const join = readFacts(raw);
  await kept.write({ [LAST_FACTS + url]: raw }).catch((wrong) => console.warn("an offline start has the facts of an earlier visit:", wrong.message)); // a full disk
  return join;
}

/**
 * The facts, or those of the last visit where the coordinator cannot be reached. `confirmed` settles once it has answered:
 * nothing may be sent before, since the broker, the keys or the page may be others by then.
 */
export async function findJoin(url, kept) {
  try {
    const join = await fetchJoin(url, kept);
    return { join, confirmed: Promise.resolve(), offline: false };
  } catch (wrong) {
    const last = await kept.get(LAST_FACTS + url);
    if (!(wrong instanceof Unreachable)) throw wrong;
    if (last === undefined) throw new Error(`${wrong.message}. Look at the phone's network, then load this page again`);
    const join = readFacts(last);
    const confirmed = confirm(url, join, kept);
    confirmed.catch(() => {}); // a page that has ended meanwhile does not wait for it
    return { join, confirmed, offline: true };
  }
}

const factsOf = ({ federation, broker, keys }) => JSON.stringify([federation, broker, keys.map(toHex)]);

async function confirm(url, join, kept) {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    try {
      if (factsOf(await fetchJoin(url, kept)) === factsOf(join)) return;
      throw new Error("the coordinator has another broker, or other keys, than at the last visit; load this page again");
    } catch (wrong) {
      if (!(wrong instanceof Unreachable)) throw wrong;
    }
  }
}

/** Whether the coordinator has another broker, or other keys, than `join` says; not known while it cannot be reached. Else throws as fetchJoin does. */
export async function hasMoved(url, join, kept) {
  try {
    return factsOf(await fetchJoin(url, kept)) !== factsOf(join);
  } catch (wrong) {
    if (wrong instanceof Unreachable) return false;
    throw wrong;
  }
}

/** The model, once the coordinator has prepared it. Throws as fetchJoin does, but waits for a coordinator that cannot be reached. */
export async function awaitModel(url, kept) {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, MODEL_POLL_MS));
    try {
      const { model } = await fetchJoin(url, kept);
      if (model) return model;
    } catch (wrong) {
      if (!(wrong instanceof Unreachable)) throw wrong;
    }
  }
}

/** What to tell where a coordinator that began anew has another model than the page's entries are for; else "". */
export async function otherModel(url, kept, model) {
  const now = await awaitModel(url, kept);
  return JSON.stringify(now) === JSON.stringify(model) ? "" : "the coordinator has another model now: load this page again to add samples for it";
}

function readFacts(raw) {
  if (!/^wss?:\/\//.test(raw.broker)) throw new Error("this coordinator offers no broker for browsers: ask its operator for web-port or web-broker");
  if (!raw.signing_keys.length) throw new Error("this coordinator names no signing key: ask its operator");
  const keys = raw.signing_keys.map((key) => {
    const bytes = fromHex(key);
    if (bytes.length !== 32) throw new Error("a signing key has 32 bytes");
    return bytes;
  });
  if (raw.model?.classes !== undefined) CLASS_NAMES(raw.model.classes, "model.classes");
  return { federation: checkName("federation", raw.federation), broker: raw.broker, keys, open: raw.open === true, model: raw.model };
}

/**
 * {id, username, password, before} of this browser in a federation, kept before it is returned; null where a link is needed and
 * none was followed. `before` is the id that another link replaced, if one did; `earlier`, where earlier versions of the page kept it.
 */
export async function loadIdentity({ federation, open }, address, kept, earlier = globalThis.localStorage) {
  const name = IDENTITY + federation;
  const here = await kept.get(name);
  const old = here ?? JSON.parse(earlier?.getItem(`fedcenters/identity/${federation}`) ?? "null");
  const found = givenIn(address, open) ?? old ?? (open ? freshIdentity() : null);
  if (found === null) return null;
  const { id, secret } = found;
  const before = old && old.id !== id ? old.id : old?.before;
  const more = before ? { before } : {};
  if (found !== here) await kept.write({ [name]: { id, secret, ...more } }); // a full disk takes not even the same again
  return { id, ...(secret ? { username: id, password: secret } : {}), ...more };
}

/** The samples under the name before are not wanted: they stay there, and nothing asks about them until a link is followed anew. */
export async function forgetEarlier({ federation }, { id, password = "" }, kept) {
  await kept.write({ [IDENTITY + federation]: { id, secret: password } });
}

function givenIn(address, open) {
  const given = new URLSearchParams(address.hash.slice(1));
  if (!given.has("id")) return null;
  const secret = given.get("secret") ?? "";
  if (!open && !secret) throw new Error("this link is not whole: it has no secret. Open all of it, or ask for a new one");
  return { id: checkName("cid", given.get("id")), secret };
}

function freshIdentity() {
  return { id: `phone-${toHex(crypto.getRandomValues(new Uint8Array(5)))}`, secret: "" };
}
