// How an error is told to the coordinator: the `nack` of a task that will not be done (PROTOCOL.md, section 13).

import { Malformed } from "../protocol/errors.js";
import { MAX_DETAIL_CHARS, NACK_CODES } from "../protocol/message_schemas.js";
import { NoRoom } from "./store.js";

export const RETRY_MS = 60_000;

/** {code, detail, retry} of the `nack` that tells of an error. */
export function nackFields(wrong) {
  if (wrong instanceof Malformed) {
    const code = NACK_CODES.includes(wrong.code) ? wrong.code : "internal";
    return { code, detail: [...wrong.detail.toWellFormed()].slice(0, MAX_DETAIL_CHARS).join(""), retry: code === "unavailable" ? RETRY_MS : undefined };
  }
  if (wrong instanceof NoRoom || wrong instanceof RangeError) {
    return { code: "no_space", detail: String(wrong.message).slice(0, MAX_DETAIL_CHARS) };
  }
  console.error(wrong);
  return { code: "internal", detail: "see this device's own log" };
}
