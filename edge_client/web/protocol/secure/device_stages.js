// A device's answer to one stage of a masked sum, by the rules of edge_client/protocol/secure/device_stages.py: those of keys and shares
// are in device_sums.js, this file ties a stage to its task. Each function gives {state, out}; both are stored before `out` is sent.

import { Malformed } from "../errors.js";
import * as sums from "./device_sums.js";
import { KEY_BYTES } from "./keys.js";
import { MAX_PREKEYS, readSumMessage } from "./sum_messages.js";

const MAX_NUMBER_JUMP = 1_000_000; // prekeys of which a device may have lost its state; numbers end at 2^53 - 1
const AFTER_ROSTER = { shares: 0, add: 1, show: 2 }; // numbers of exchanges after the roster's

/** As many random roots as a device can offer prekeys. */
export const freshRoots = () => Array.from({ length: MAX_PREKEYS }, () => crypto.getRandomValues(new Uint8Array(KEY_BYTES)));

/**
 * Refill the unused prekeys from random roots [32 bytes each], and offer them; fresh ones have numbers beyond `after`. Sums have taken all
 * up to there, also those of which the device never saw the roster, or of whose keys it lost its state since. Numbers that it can
 * hardly have offered are refused: it would soon have none left.
 */
export async function offer(state, roots, after = -1) {
  if (after >= state.nextNumber + MAX_NUMBER_JUMP) throw new Malformed("bad_task", `prekeys after ${after}, and the next one here is ${state.nextNumber}`);
  const left = new Map([...state.roots].filter(([number]) => number > after));
  return sums.offerPrekeys({ ...state, nextNumber: Math.max(state.nextNumber, after + 1), roots: left }, roots);
}

/** Take part in the sum of this roster. Earlier sums are over then, and their keys are deleted. */
export async function deal(state, data, key) {
  const roster = readSumMessage("roster", data);
  checkPlace(roster, key, "shares");
  const { state: after, out } = await sums.onRoster(state, data);
  return { state: { ...after, sums: new Map([[roster.roster, after.sums.get(roster.roster)]]) }, out };
}

/** Mask the device's words for the sum whose shares were relayed; `scale` is that of the words. */
export async function mask(state, data, key, scale, words) {
  const name = readSumMessage("relay", data).roster;
  const roster = rosterOf(state, name, key, "add");
  if (roster.bits !== scale.bits || roster.devices > scale.devices) {
    throw new Malformed("bad_task", `a sum of ${roster.devices} devices in ${roster.bits} bits could overflow`);
  }
  return sums.onVector((await sums.onRelay(state, data)).state, name, words);
}

/**
 * Show the shares that take the masks off, of one kind for each neighbour. The sum is over then for this device: its keys are deleted with
 * the answer's storage, so no other question about it can be answered.
 */
export async function show(state, data, key) {
  const name = readSumMessage("unmask", data).roster;
  rosterOf(state, name, key, "show");
  const { state: after, out } = await sums.onUnmask(state, data);
  return { state: sums.onEnd(after, name).state, out };
}

function rosterOf(state, name, key, stage) {
  const { roster } = sums.sumOf(state, name);
  checkPlace(roster, key, stage);
  return roster;
}

/** `key` is {run, round, exchange} of the task. */
function checkPlace(roster, key, stage) {
  if (roster.run !== key.run || roster.round !== key.round || roster.exchange + AFTER_ROSTER[stage] !== key.exchange) {
    throw new Malformed("bad_task", `stage ${stage} of the sum belongs to another exchange`);
  }
}
