// A device's side of masked sums as a state machine (PROTOCOL.md, section 21), the same rules as edge_client/protocol/secure/device_sums.py.
// Each function gives {state, out}: the caller stores `state` before it sends `out`. What must not be done throws Malformed and changes
// nothing. The state is {federation, cid, roots: Map(number -> bytes), nextNumber, sums: Map(roster -> sum)}.

import { sha256 } from "../bytes.js";
import { Malformed } from "../errors.js";
import * as keys from "./keys.js";
import { addMasksInto, packWords, pairSign } from "./masks.js";
import { thresholdOf } from "./parameters.js";
import { SHARE_BYTES } from "./shamir.js";
import { MAX_PREKEYS, readSumMessage, writeSumMessage, writeUpload } from "./sum_messages.js";

const bad = (detail) => new Malformed("bad_task", detail);
const contextOf = (state, { run, round, exchange, roster }) => ({ federation: state.federation, run, round, exchange, roster });
const withSum = (state, mine) => ({ ...state, sums: new Map(state.sums).set(mine.roster.roster, mine) });
const sealKey = (mine, cid) => mine.roster.neighbours.get(cid).slice(0, keys.KEY_BYTES);
const maskKey = (mine, cid) => mine.roster.neighbours.get(cid).slice(keys.KEY_BYTES);

/** The state of a device that never took part. */
export const freshSums = (federation, cid) => ({ federation, cid, roots: new Map(), nextNumber: 0, sums: new Map() });

/** Refill to 16 unused prekeys from random roots [32 bytes each]; the message offers all of them. */
export async function offerPrekeys(state, random) {
  const fresh = random.slice(0, Math.max(0, MAX_PREKEYS - state.roots.size));
  const roots = new Map([...state.roots, ...fresh.map((root, i) => [state.nextNumber + i, root])]);
  const offered = new Map();
  for (const [number, root] of roots) offered.set(number, await keys.publicKeys(root));
  return { state: { ...state, roots, nextNumber: state.nextNumber + fresh.length }, out: writeSumMessage({ keys: offered }) };
}

/** A roster for this device: its prekey is used up, and its shares go out. */
export async function onRoster(state, data) {
  const roster = readSumMessage("roster", data);
  const known = state.sums.get(roster.roster);
  if (known) {
    if (!keys.same(writeSumMessage(known.roster), writeSumMessage(roster))) throw bad("another roster under the same name");
    return { state, out: await dealt(state, known) };
  }
  if (roster.cid !== state.cid) throw bad(`a roster for ${roster.cid}`);
  if (!state.roots.has(roster.number)) throw bad(`prekey ${roster.number} was used, or never offered`);
  if (roster.threshold !== thresholdOf(roster.devices, roster.neighbours.size)) {
    throw bad(`threshold ${roster.threshold} of ${roster.neighbours.size} neighbours is not secret`);
  }
  const mine = { roster, root: state.roots.get(roster.number), shares: null, upload: null, shown: null };
  const out = await dealt(state, mine);
  const roots = new Map([...state.roots].filter(([number]) => number !== roster.number));
  return { state: withSum({ ...state, roots }, mine), out };
}

async function dealt(state, mine) {
  const { roster, root } = mine;
  const context = contextOf(state, roster);
  const shares = await keys.dealShares(root, context, roster.threshold, roster.neighbours.size);
  const own = await keys.sealPrivate(root);
  const envelopes = new Map();
  for (const [i, cid] of [...roster.neighbours.keys()].entries()) {
    const both = keys.joined(shares.mask[i], shares.self[i]);
    const sealed = await keys.seal(own, sealKey(mine, cid), context, state.cid, cid, both);
    envelopes.set(cid, keys.joined(sealed, await keys.digestsOf(both, context, state.cid, cid)));
  }
  const commitment = await keys.commitment(await keys.selfSecret(root, context), context, state.cid);
  return writeSumMessage({ roster: roster.roster, commitment, envelopes });
}

/** The envelopes of the neighbours that take part. */
export async function onRelay(state, data) {
  const relay = readSumMessage("relay", data);
  const mine = sumOf(state, relay.roster);
  for (const cid of relay.envelopes.keys()) if (!mine.roster.neighbours.has(cid)) throw bad("shares of a device that is no neighbour");
  if (relay.envelopes.size < mine.roster.threshold) throw bad(`${relay.envelopes.size} neighbours take part, too few`);
  const own = await keys.sealPrivate(mine.root);
  const shares = new Map();
  for (const [cid, envelope] of relay.envelopes) shares.set(cid, await opened(state, mine, own, cid, envelope));
  if (mine.shares && !keys.same(writeSumMessage({ shares }), writeSumMessage({ shares: mine.shares }))) throw bad("other shares than before");
  return { state: withSum(state, { ...mine, shares }), out: null };
}

/** Both shares [64 bytes] of a neighbour; empty where they do not open or are not the announced ones. */
async function opened(state, mine, own, dealer, envelope) {
  const context = contextOf(state, mine.roster);
  try {
    const both = await keys.unseal(own, sealKey(mine, dealer), context, dealer, state.cid, envelope.slice(0, keys.SEALED_BYTES));
    const digests = await keys.digestsOf(both, context, dealer, state.cid);
    return keys.same(digests, envelope.slice(keys.SEALED_BYTES)) ? both : new Uint8Array(0);
  } catch (wrong) {
    if (!(wrong instanceof Malformed)) throw wrong;
    return new Uint8Array(0); // the others can recover the neighbour's secrets without this device
  }
}

/** The device's own vector (Uint32Array, not changed); the upload goes out. */
export async function onVector(state, name, words) {
  const mine = sumOf(state, name);
  const { roster } = mine;
  if (!mine.shares) throw bad("no shares have come yet: a vector without pair masks is never sent");
  if (!(words instanceof Uint32Array) || words.length !== roster.words) throw new Malformed("bad_field", `a vector of ${words.length} words for ${roster.words}`);
  const context = contextOf(state, roster);
  const own = await keys.maskPrivate(await keys.maskSecret(mine.root));
  const masks = [[await keys.selfMaskKey(await keys.selfSecret(mine.root, context), context), 1]];
  for (const cid of mine.shares.keys()) {
    masks.push([await keys.pairMaskKey(own, maskKey(mine, cid), context, state.cid, cid), pairSign(state.cid, cid)]);
  }
  const masked = words.slice();
  await addMasksInto(masked, masks);
  const out = writeUpload(name, roster.words, roster.bits, packWords(masked, roster.bits));
  const upload = await sha256(out);
  if (mine.upload !== null && mine.upload !== upload) throw bad("another vector was masked in this sum");
  return { state: withSum(state, { ...mine, upload }), out };
}

/** The coordinator's question for shares: one kind of each neighbour, ever. */
export async function onUnmask(state, data) {
  const asked = readSumMessage("unmask", data);
  const mine = sumOf(state, asked.roster);
  if (!mine.shares || mine.upload === null) throw bad("asked for shares before the upload");
  const shown = new Map([...asked.survivors.map((cid) => [cid, "self"]), ...asked.dropped.map((cid) => [cid, "mask"])]);
  if (shown.size !== mine.shares.size || [...shown.keys()].some((cid) => !mine.shares.has(cid))) {
    throw bad("survivors and dropped are not the neighbours that take part");
  }
  if (asked.survivors.length < mine.roster.threshold) throw bad(`${asked.survivors.length} neighbours survive, too few`);
  if (mine.shown && [...shown].some(([cid, kind]) => mine.shown.get(cid) !== kind)) {
    throw bad("other shares were shown before; of one device only one kind is ever shown");
  }
  const answer = { roster: asked.roster, self: new Map(), mask: new Map() };
  for (const [cid, both] of mine.shares) {
    const kind = shown.get(cid);
    if (both.length) answer[kind].set(cid, kind === "mask" ? both.slice(0, SHARE_BYTES) : both.slice(SHARE_BYTES));
  }
  return { state: withSum(state, { ...mine, shown }), out: writeSumMessage(answer) };
}

/** The sum is over for this device: its root and shares are deleted. */
export function onEnd(state, name) {
  return { state: { ...state, sums: new Map([...state.sums].filter(([known]) => known !== name)) }, out: null };
}

export function sumOf(state, name) {
  if (!state.sums.has(name)) throw bad(`no sum ${name.slice(0, 16)} is open here`);
  return state.sums.get(name);
}
