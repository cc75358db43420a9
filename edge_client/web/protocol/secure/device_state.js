// What a device keeps of its masked sums, as a value that IndexedDB clones: Maps and bytes stay what they are. It is secret.

import { freshSums } from "./device_sums.js";

const VERSION = 1;

/** The value to store. */
export const writeState = (state) => ({ v: VERSION, ...state });

/** The stored state. That of another version or device, and none, is a fresh one: without its keys a sum can be told nothing any more. */
export function readState(kept, federation, cid) {
  if (kept?.v !== VERSION || kept.federation !== federation || kept.cid !== cid) return freshSums(federation, cid);
  const { roots, nextNumber, sums } = kept;
  return { federation, cid, roots, nextNumber, sums };
}
