// A device's stored state: the last result until it is acknowledged, own models, a probe's responsibilities, the residual of
// compression, the keys of masked sums and what was trained for them. Values that belong together are written in one transaction,
// before the result is announced; what could not be written has not happened. Only what `note` saves counts without it.

import { sha256 } from "../protocol/bytes.js";
import { Malformed } from "../protocol/errors.js";
import { readState, writeState } from "../protocol/secure/device_state.js";
import { NoRoom } from "./store.js";

const NAME = "state";
const U32 = 2 ** 32;
const OWN = "own/";
const RESIDUAL = "residual/";
const UPDATE = "update";
export const POSTERIOR = "posterior";
const SIZES = "sizes";
const SUMS = "sums";
const CHOICE = "choice";
const TRAINED = "trained";
const MAX_SLOTS = 64; // of a run, a model in each; and residuals
const TAKEN = ["ok", "dup"]; // answers that say that the coordinator has stored an update

/** Which task: unique on one device. */
export const keyOf = ({ run, round, exchange }) => ({ run, round, exchange });
export const sameKey = (a, b) => a.run === b.run && a.round === b.round && a.exchange === b.exchange;
/** Whether `a` came before `b` in the same run. */
export const isBefore = (a, b) => a.run === b.run && (a.round < b.round || (a.round === b.round && a.exchange < b.exchange));

/** Opened by `State.open`. `result` is what `rdy` says about the last finished task, and its acknowledgement once it came. */
export class State {
  /** `trusted` are the ids of the keys whose records count: an epoch that another one signed counts no more. */
  static async open(store, federation, cid, trusted) {
    const state = new State();
    state.store = store;
    state.written = Promise.resolve(); // the last write
    state.full = false; // whether it found no room
    state.sums = readState(await store.get(SUMS), federation, cid);
    const kept = (await store.get(NAME)) ?? {};
    state.epochKey = kept.epochKey ?? ""; // which key signed the epoch; "": an earlier version did not note it
    const foreign = state.epochKey && !trusted.includes(state.epochKey); // before a federation that began anew
    state.epoch = foreign ? 0 : kept.signedEpoch ?? 0; // the highest of a signed record
    state.birth = kept.birth ?? 0;
    state.result = kept.result ?? null;
    state.done = kept.done ?? 0; // fits, for people
    state.loss = kept.loss; // of the last one
    state.sent = kept.sent ?? 0; // bytes of answered updates
    return state;
  }

  /** The number of the next connection. */
  async nextBirth() {
    await this.note(() => ({ birth: (this.birth + 1) % U32 }));
    return this.birth;
  }

  /** Note the epoch of a coordinator's record that `key` signed; false when a later one has spoken already. */
  async seeEpoch(epoch, key) {
    if (epoch > this.epoch || (epoch === this.epoch && key !== this.epochKey)) await this.note(() => ({ epoch, epochKey: key }));
    return epoch === this.epoch;
  }

  /** The models [size] that this device keeps, by slot. */
  async ownModels(run, schema) {
    const found = new Map();
    for (const name of await this.store.names(`${OWN}${run}/`)) {
      const { schema: hash, vector } = await this.store.get(name);
      if (hash === schema.sha256) found.set(name.split("/")[2], vector);
    }
    return found;
  }

  /** What earlier updates lost to compression, halved for each round that the device sat out. */
  async residual({ run, round }, center, schema) {
    const found = await this.store.get(residualName(run, center, schema));
    if (!found) return undefined;
    const share = 0.5 ** Math.max(0, round - found.round - 1);
    return found.vector.map((value) => value * share);
  }

  /** The responsibilities [M][n] that this round's probe left, if there was one. */
  async posterior({ run, round }) {
    const found = await this.store.get(POSTERIOR);
    return found && found.run === run && found.round === round ? found.rows : undefined;
  }

  /** How many samples {train, test} there were in this round's first task: later ones wait, as a probe evaluates what a fit leaves out. */
  async sizes({ run, round }) {
    const found = await this.store.get(SIZES);
    return found && found.run === run && found.round === round ? found.sizes : undefined;
  }

  /** The weights [K] in the centers that this device chose last in this run. */
  async choice({ run }) {
    const found = await this.store.get(CHOICE);
    return found && found.run === run ? found.weights : undefined;
  }

  /** What this device trained for sums in this round and slot: {models, weights, order}. */
  async trained({ run, round }, slot = "main") {
    const found = await this.store.get(TRAINED);
    return found && found.run === run && found.round === round && found.slot === slot ? found.mine : undefined;
  }

  /** The bytes of the result's update, hashed again; undefined if they are damaged. */
  async readUpdate() {
    const data = await this.store.get(UPDATE);
    return data && this.result && (await sha256(data)) === this.result.update.sha256 ? data : undefined;
  }

  /** Keep a finished task whole; then it may be announced. */
  async storeResult(result, outcome, center) {
    const { key } = result;
    const put = { [UPDATE]: outcome.data };
    const gone = [];
    if (outcome.sizes) put[SIZES] = { run: key.run, round: key.round, sizes: outcome.sizes };
    if (outcome.posterior) put[POSTERIOR] = { run: key.run, round: key.round, rows: outcome.posterior };
    if (outcome.own) {
      const [slot, vector] = outcome.own;
      const slots = new Set(await this.store.names(`${OWN}${key.run}/`)).add(`${OWN}${key.run}/${slot}`);
      if (slots.size > MAX_SLOTS) throw new Malformed("bad_task", `a run has ${MAX_SLOTS} slots at most`);
      put[`${OWN}${key.run}/${slot}`] = { schema: outcome.schema.sha256, vector };
      gone.push(...(await this.store.names(OWN)).filter((name) => !name.startsWith(`${OWN}${key.run}/`)));
    }
    let residual = null;
    if (outcome.residual) {
      residual = residualName(key.run, center, outcome.schema);
      put.pending = { vector: outcome.residual, round: key.round };
    }
    const { sums = this.sums, choice, trained } = outcome.progress ?? {};
    if (sums !== this.sums) put[SUMS] = writeState(sums);
    if (choice) put[CHOICE] = { run: key.run, weights: choice };
    if (trained) put[TRAINED] = { run: key.run, round: key.round, slot: trained[0], mine: trained[1] };
    const epoch = Math.min(result.epoch, this.epoch); // of a task, which is not signed, at most that of a signed record
    const stored = { ...result, epoch, attempt: 0, residual, status: null };
    const loss = result.metrics?.loss ?? this.loss;
    await this.save(() => ({ result: stored, sums, done: this.done + (outcome.own ? 1 : 0), loss }), put, gone);
  }

  /** Whether the residual of the next update depends on an answer that has not come. */
  get owesAnswer() {
    return Boolean(this.result?.residual) && this.result.status === null;
  }

  /** Whether the coordinator has stored the result's update, of which no bytes are left here then. */
  get isTaken() {
    return TAKEN.includes(this.result?.status);
  }

  /** Never announce the last result again, whether there is room to note that or not. */
  async forgetResult() {
    await this.note(() => ({ result: null }));
  }

  /**
   * The coordinator has answered: commit the residual if it took the update, else keep the one of before. An update that
   * was refused may be announced again, to a later try of its exchange, and be taken then. `sent`: bytes that went out for it.
   */
  async commitAcknowledgement(status, { sent = 0 } = {}) {
    const { result } = this;
    if (!result || [status, ...TAKEN].includes(result.status)) return;
    const put = {};
    const gone = TAKEN.includes(status) ? [UPDATE, "pending"] : [];
    if (TAKEN.includes(status) && result.residual) {
      put[result.residual] = await this.store.get("pending");
      const others = (await this.store.names(RESIDUAL)).filter((name) => name !== result.residual);
      const ofThisRun = others.filter((name) => name.split("/")[1] === result.key.run);
      gone.push(...others.filter((name) => !ofThisRun.includes(name)));
      if (ofThisRun.length >= MAX_SLOTS) gone.push(await this.oldest(ofThisRun));
    }
    await this.save(() => ({ result: { ...result, status }, sent: this.sent + sent }), put, gone);
  }

  /** The residual of the earliest round among these names. */
  async oldest(names) {
    let found = [Infinity, ""];
    for (const name of names) {
      const { round } = await this.store.get(name);
      if (round < found[0]) found = [round, name];
    }
    return found[1];
  }

  /** Save numbers that count also where there is no room for them: the next `save` that finds room stores them, too. */
  async note(changes) {
    try {
      await this.save(changes);
    } catch (wrong) {
      if (!this.full) throw wrong;
      Object.assign(this, changes());
    }
  }

  /** Write, one after the other; then this state has the changes. */
  async save(changes, put = {}, gone = []) {
    const write = async () => {
      const changed = changes();
      const { epoch, epochKey, birth, result, done, loss, sent } = { ...this, ...changed };
      const kept = { ...put, [NAME]: { signedEpoch: epoch, epochKey, birth, result, done, loss, sent } };
      await this.store.write(kept, gone).catch((wrong) => {
        this.full = wrong instanceof NoRoom;
        throw wrong;
      });
      this.full = false;
      Object.assign(this, changed);
    };
    this.written = this.written.then(write, write);
    await this.written;
  }
}

function residualName(run, center, schema) {
  return `${RESIDUAL}${run}/${center ?? "-"}/${schema.sha256}`;
}
