// Control messages: strict JSON in, canonical JSON out. `readMessage` gives only what the kind's table allows, and `writeMessage` holds
// what we send to the same table.

import { checkInline, isCount } from "./blocks.js";
import { Malformed, shown } from "./errors.js";
import { isObject, record } from "./validators.js";
import { canonicalJson, parseJson, plain } from "./json.js";
import { checkRules, isDownlink, KINDS, ROUTES, tableOf } from "./message_schemas.js";

export const VERSION = 1;
export const MAX_MESSAGE_BYTES = 8_192;

/** One control message of a topic of kind `route` (absent: any); fields are valid, unknown ones dropped. Throws Malformed. */
export async function readMessage(payload, route) {
  return plain(await readExactMessage(payload, route));
}

/** The same, with fractions as json.js reads them, so that it can be written back byte by byte. */
export async function readExactMessage(payload, route) {
  const message = parseJson(payload, MAX_MESSAGE_BYTES);
  if (!isObject(message)) {
    throw new Malformed("bad_json", "a control message is a JSON object");
  }
  if (!isCount(message.v, VERSION, VERSION)) throw new Malformed("bad_version", `message version ${shown(message.v)}`);
  const kind = message.k;
  if (typeof kind !== "string" || !KINDS.includes(kind)) throw new Malformed("bad_kind", `unknown kind ${shown(kind)}`);
  if (route !== undefined && !(ROUTES[route] ?? []).includes(kind)) {
    throw new Malformed("bad_kind", `${kind} does not belong on topic ${route}`);
  }
  const found = checked(kind, message, isDownlink(kind, message, route));
  await Promise.all(manifestsIn(found).map(checkInline));
  return Object.assign(Object.create(null), { v: VERSION, k: kind }, found);
}

/** One canonical control message; fields given as undefined are left out, unknown ones refused. */
export function writeMessage(kind, { id, t, ...fields }) {
  if (!KINDS.includes(kind)) throw new Malformed("bad_kind", `unknown kind ${shown(kind)}`);
  const given = Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined));
  const message = checked(kind, { ...given, id, t }, isDownlink(kind, given));
  const unknown = Object.keys(given).filter((name) => !Object.hasOwn(message, name));
  if (unknown.length) throw new Malformed("bad_field", `${kind} has no field ${unknown.join(", ")}`);
  const payload = canonicalJson({ ...message, v: VERSION, k: kind });
  if (payload.length > MAX_MESSAGE_BYTES) throw new Malformed("too_big", `${kind} message of ${payload.length} bytes`);
  return payload;
}

function checked(kind, message, down) {
  const found = record(tableOf(kind, message, down))(message, kind);
  checkRules(kind, found);
  return found;
}

function manifestsIn(value) {
  if (value === null || typeof value !== "object") return [];
  if (typeof value.inline === "string" && typeof value.sha256 === "string") return [value];
  return Object.values(value).flatMap(manifestsIn);
}
