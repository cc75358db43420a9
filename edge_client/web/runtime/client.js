// A device's main loop in a page: announce, fetch, check, train, store and upload, and choose a center on request, until it
// is stopped. One loop waits for events and does the next piece of work: active_task.js has one task, uploader.js its result. `tell`
// receives the events for the view.

import { ActiveTask, TaskDropped } from "./active_task.js";
import { Uploader } from "./uploader.js";
import { Downloader, MAX_WINDOW } from "./downloader.js";
import { Inbox } from "./inbox.js";
import { DEFAULT_BLOCK_BYTES } from "../protocol/blocks.js";
import { Malformed } from "../protocol/errors.js";
import { parseJson } from "../protocol/json.js";
import { CODECS, NACK_CODES } from "../protocol/message_schemas.js";
import { MAX_MESSAGE_BYTES, readMessage, VERSION } from "../protocol/messages.js";
import { keyId, verifyRecord } from "../protocol/signing.js";
import { Topics } from "../protocol/topics.js";
import { Blobs, NoRoom } from "./store.js";
import { isBefore, keyOf, sameKey, State } from "./state.js";
import { Transport } from "../transport/mqtt.js";
import { nackFields, RETRY_MS } from "./train_conditions.js";
import { PAGE_VERSION } from "../join.js";
import { findCenter } from "../nearest.js";
import { DeviceSender } from "./sender.js";
import { ENGINE, TaskRunner } from "./task_runner.js";

/** One device. `join` is {federation, broker, keys}, `device` {id, username, password}; `local()` gives {train, test}, `trains()` how many samples train. */
export class Client {
  static async open({ join, device, store, ort, mqtt, local, trains, tell, now = () => performance.now(), random = Math.random }) {
    const client = new Client();
    Object.assign(client, { join, device, store, ort, local, trains, tell, now, random });
    client.topics = new Topics(join.federation);
    client.blobs = new Blobs(store);
    client.state = await State.open(store, join.federation, device.id, await Promise.all(join.keys.map(keyId)));
    client.participates = (await store.get("takes part")) === true;
    client.paused = !client.participates;
    client.sender = new DeviceSender(client.topics, device.id);
    client.transport = new Transport(mqtt, {
      url: join.broker,
      clientId: client.topics.clientId(device.id),
      username: device.username,
      password: device.password,
      filters: client.topics.deviceFilters(device.id),
      will: () => client.nextWill(),
      onEvent: (event) => client.inbox.push(event),
    });
    client.sender.transport = client.transport;
    const fetching = (event) => client.task !== null && tell(event); // the view shows a search for a center in its own words
    client.downloader = new Downloader(client.blobs, (manifest, at, mark) => client.sender.requestBlocks(manifest, at, mark), fetching);
    client.uploader = new Uploader({ state: client.state, sender: client.sender, transport: client.transport, now, tell });
    client.taskRunner = new TaskRunner({ ort, blobs: client.blobs, federation: join.federation, keys: join.keys });
    return client;
  }

  constructor() {
    this.inbox = new Inbox();
    this.task = null;
    this.centerRequest = null; // a visit that the person asked for
    this.pointer = null; // the last `cat`
    this.answer = null; // the last answer to a `near`
    this.error = null; // the last `err`
    this.boot = null;
    this.link = null; // the coordinator's process and connection that this device is known to
    this.announceAt = Infinity;
    this.block = DEFAULT_BLOCK_BYTES;
    this.paused = true; // until its owner says that it takes part
    this.participates = false;
    this.federation = {}; // what the coordinator does, as its last record says
    this.late = null; // the state {run, round} of a training that had begun when this phone came; null: it came before
    this.stopping = false;
    this.failure = null;
    this.connected = false;
    this.refused = []; // this runtime, where it fails the golden run of the program at hand
  }

  /** Live until `stop`. Throws what makes going on useless. */
  async run() {
    await this.transport.connect();
    try {
      while (!this.stopping) {
        await this.handleWithRoom(await this.inbox.next(this.waitMs()));
        if (this.stopping) break; // what came may be why: nothing more is sent
        if (this.task !== null) await this.work(this.task);
        else if (this.centerRequest !== null) await this.answerCenterRequest(this.centerRequest);
        else await this.uploader.step();
      }
    } finally {
      await this.transport.close(this.topics.state(this.device.id), this.sender.presenceMessage("off", this.state.birth));
    }
    if (this.failure !== null) throw this.failure;
  }

  /** End `live` soon. */
  stop() {
    this.stopping = true;
    this.inbox.wake();
  }

  /** Train for the federation from now on, and after the tab was closed. */
  async participate() {
    await this.store.write({ "takes part": true });
    this.participates = true;
    this.late = ["next-round", "next-run"].includes(this.federation.newcomers) ? this.federation : null;
    this.pause(false);
    await this.announceSamples();
  }

  /** Take no tasks while `paused`. */
  pause(paused) {
    this.paused = paused;
    this.tell({ what: paused ? "paused" : "resumed", works: this.task !== null });
    this.inbox.wake();
  }

  /** Publish the new number of samples: a device without samples gets no tasks. */
  async announceSamples() {
    if (this.connected) await this.announcePresence();
  }

  /** Which center suits this device? -> what nearest.js found. */
  nearest() {
    if (this.centerRequest === null) {
      this.centerRequest = {};
      this.centerRequest.done = new Promise((resolve, reject) => Object.assign(this.centerRequest, { resolve, reject }));
      this.inbox.wake();
    }
    return this.centerRequest.done;
  }

  // -- events

  waitMs() {
    if (this.task !== null || this.centerRequest !== null || this.stopping) return 0;
    return Math.min(this.uploader.waitMs(), Math.max(0, this.announceAt - this.now()));
  }

  async handle(event) {
    if (event !== undefined) await this.take(event);
    if (this.stopping || this.now() < this.announceAt) return;
    this.announceAt = Infinity;
    await this.announceSamples();
  }

  /** Without room an answer of the coordinator is not stored: the result stays owed, and is announced again. */
  async handleWithRoom(event) {
    try {
      await this.handle(event);
    } catch (wrong) {
      if (!(wrong instanceof NoRoom)) throw wrong;
      this.tell({ what: "full" });
    }
  }

  async take(event) {
    if (event.kind === "message") {
      await this.onMessage(event);
    } else if (event.kind === "connected") {
      this.connected = true;
      this.tell({ what: "connected" });
      await this.announcePresence();
      this.downloader.linkLost();
      await this.uploader.linkUp();
    } else if (event.kind === "steady") {
      this.tell({ what: "steady" });
    } else if (event.kind === "failed") {
      this.fail(event.error); // also in the midst of a task, which would answer for it as its own error
    } else {
      this.connected = false;
      this.uploader.linkLost();
      this.pointer = null; // the broker repeats it with the next connection, if there still is one
      this.tell({ what: "lost", unreached: event.unreached, refused: event.refused, namesake: event.namesake, works: this.task !== null });
    }
  }

  async onMessage({ topic, payload, retained }) {
    let route;
    let message;
    try {
      route = this.topics.parse(topic);
      if (route.kind === "b") {
        await this.downloader.onBlock(route.label, route.index, payload);
        return;
      }
      if (route.kind === "cat" && !payload.length) { // deleted: what it named cannot be fetched any more
        this.pointer = null;
        this.tell({ what: "catalog", sha256: null });
        return;
      }
      if (!["t", "coord", "cat"].includes(route.kind) || !payload.length) return;
      message = await readMessage(payload, route.kind);
    } catch (wrong) {
      if (wrong instanceof NoRoom) throw wrong;
      this.refuseUnreadable(payload, wrong);
      return;
    }
    if (await this.isCurrent(message)) {
      if (message.k === "coord") this.noteLink(message, retained);
      await this.dispatch(message);
    } else if (route.kind === "t") {
      const detail = `epoch ${message.epoch}; ${this.state.epoch} was seen before`;
      this.sender.send("nack", { re: message.id, code: "old_epoch", detail });
    }
  }

  /** Whether no later coordinator is known. Only the epoch of a signed record is stored. */
  async isCurrent(message) {
    if (message.k !== "coord") return message.epoch >= this.state.epoch;
    try {
      const { keys, federation } = this.taskRunner;
      await verifyRecord(message, keys, federation, this.state.epoch);
    } catch (wrong) {
      console.warn("ignored a coordinator's record:", wrong.message);
      if (wrong.code === "bad_signature") this.tell({ what: "unknown-key" });
      return false;
    }
    return this.state.seeEpoch(message.epoch, message.key);
  }

  /** A message that breaks a rule is answered if it can be named, so that the coordinator does not wait for its task. */
  refuseUnreadable(payload, wrong) {
    console.warn("cannot read a message:", wrong.message);
    if (!(wrong instanceof Malformed) || !NACK_CODES.includes(wrong.code)) return;
    try {
      const { id } = parseJson(payload, MAX_MESSAGE_BYTES);
      const { code, detail } = nackFields(wrong);
      this.sender.send("nack", { re: id, code, detail });
    } catch {
      // no id to answer to
    }
  }

  async dispatch(message) {
    switch (message.k) {
      case "coord":
        return this.onCoord(message);
      case "cat":
        this.pointer = message;
        return this.tell({ what: "catalog", sha256: message.catalog.sha256 });
      case "task":
        return this.onTask(message);
      case "go":
        return this.uploader.onGo(message);
      case "ack":
        return this.uploader.onAck(message);
      case "near":
        this.answer = message;
        return undefined;
      case "stop":
        return this.onStop(message);
      case "rebirth":
        this.downloader.linkLost(); // the coordinator does not know this device and dropped its requests
        return this.announcePresence();
      default:
        return this.onError(message);
    }
  }

  /** Announce this device to a connection of the coordinator that is newer than the device's own. */
  noteLink({ boot, link = 0, online, spread_ms }, retained) {
    const now = `${boot} ${link}`;
    if (!retained && online && now !== this.link) this.announceAt = this.now() + this.random() * spread_ms;
    this.link = now;
  }

  onCoord(message) {
    if (!message.proto.includes(VERSION)) this.fail(`this coordinator speaks version ${message.proto} of the protocol; load this page again`);
    this.block = Math.min(DEFAULT_BLOCK_BYTES, message.block);
    const restarted = this.boot !== null && this.boot !== message.boot;
    if (restarted) this.uploader.coordinatorRestarted(message.spread_ms);
    if (restarted) this.downloader.linkLost();
    this.boot = message.boot;
    const { state } = message;
    const takesPart = this.task !== null || (state?.run !== undefined && this.state.result?.key.run === state.run);
    this.federation = state ?? this.federation;
    this.tell({ what: "coordinator", online: message.online, restarted, state: takesPart || !state ? undefined : { ...state, newcomers: this.newcomers(state) } });
  }

  /** When a new device takes part, where that is this phone's own case: not where it came before the training, or its turn has come. */
  newcomers({ newcomers, run, round }) {
    if (!this.participates) return newcomers;
    const waits = this.late !== null && this.late.run === run && (newcomers === "next-run" || this.late.round === round);
    return waits ? newcomers : undefined;
  }

  /** Begin a new task; one that is done is announced again, one that is running or older is not begun again. */
  async onTask(message) {
    const key = keyOf(message);
    const until = this.now() + message.left_ms;
    const { result } = this.state;
    const restored = message.epoch > (result?.epoch ?? 0); // from a backup, where it asks for what is over
    if (result && sameKey(result.key, key) && !(restored && this.state.isTaken)) await this.uploader.announce();
    else if (result && isBefore(key, result.key) && !restored) return;
    else if (this.task !== null && sameKey(this.task.key, key)) {
      const { id, epoch } = message; // its content stays, as that is what was checked; maybe there is more time
      Object.assign(this.task, { message: { ...this.task.message, id, epoch }, until });
      if (this.state.owesAnswer) await this.uploader.announce(); // the coordinator's connection is new; it may have missed that
    } else {
      this.task = new ActiveTask(this, key, message, until);
      if (!this.state.owesAnswer) this.uploader.cancel(); // whatever came before is late now
    }
  }

  async onStop(message) {
    const key = keyOf(message);
    const { task, state: { result } } = this;
    const works = task !== null && sameKey(task.key, key);
    const ours = result !== null && sameKey(result.key, key);
    if (works) this.task = null;
    if (ours) {
      this.uploader.cancel();
      await this.state.commitAcknowledgement("late");
    }
    if (this.task !== null) return; // the page tells of that one
    if (ours) this.tell({ what: "rest", owes: false });
    if (works || (ours && result.status === null)) this.tell({ what: "answered", status: "late", sent: this.state.sent });
  }

  async onError(message) {
    console.warn(`the coordinator answers ${message.code} ${message.detail ?? ""}`);
    this.error = message;
    if (message.code === "not_member") this.fail("this device is not a member here; ask for a new link");
    if (message.code === "bad_version") this.fail("the coordinator speaks another version of the protocol; load this page again");
    this.downloader.onError(message.re, message.code, this.now() + (message.retry_ms ?? RETRY_MS));
    await this.uploader.onError(message);
  }

  fail(why) {
    this.failure = why instanceof Error ? why : new Error(why);
    this.stopping = true;
  }

  // -- one task

  async work(task) {
    try {
      await this.deliverLast(task);
      const { outcome, seconds } = await task.execute();
      await task.store(outcome, seconds);
      await this.uploader.announce();
      if (this.state.result === null) throw new Malformed("internal", "the result cannot be announced");
    } catch (wrong) {
      if (!(wrong instanceof TaskDropped)) task.refuse(wrong);
    } finally {
      this.downloader.clear();
      if (this.task === task) this.task = null;
      this.tell({ what: "rest", owes: this.uploader.againAt !== null });
    }
  }

  /** Learn first whether the last update was taken: it decides which residual the next one adds. */
  async deliverLast(task) {
    if (this.state.owesAnswer) await this.uploader.announce();
    while (this.state.owesAnswer) {
      await this.uploader.step();
      await this.handle(await this.inbox.next(Math.min(this.uploader.waitMs(), 1000)));
      task.checkWanted();
    }
  }

  /** Take events until the blobs are here; `check` throws when they are not wanted any more. */
  async fetch(manifests, check) {
    await this.downloader.start(manifests);
    for (;;) {
      const wait = await this.downloader.step(this.now());
      if (wait === null) return;
      await this.handle(await this.inbox.next(Math.max(1, Math.min(wait, 1000))));
      check();
    }
  }

  // -- a visit

  async answerCenterRequest(centerRequest) {
    try {
      centerRequest.resolve(await findCenter(this));
    } catch (wrong) {
      centerRequest.reject(wrong);
    } finally {
      this.downloader.clear();
      this.centerRequest = null;
    }
  }

  // -- what we say about ourselves

  async announcePresence() {
    const disk = (await globalThis.navigator?.storage?.estimate?.().catch(() => undefined))?.quota; // a browser need not tell
    const caps = { engine: ENGINE, n: this.participates ? await this.trains() : 0, codecs: CODECS, window: MAX_WINDOW, disk: disk && Math.floor(disk) };
    if (caps.disk === undefined) delete caps.disk;
    caps.runtime = this.taskRunner.runtime;
    if (this.refused.length) caps.refused = this.refused;
    this.sender.sendPresence("on", this.state.birth, { sw: `fedcenters-web ${PAGE_VERSION}`, caps });
  }

  /** Each connection is a birth, and its will carries the same number. */
  async nextWill() {
    const birth = await this.state.nextBirth();
    if (this.state.full) this.tell({ what: "full" });
    return { topic: this.topics.state(this.device.id), payload: this.sender.presenceMessage("lost", birth) };
  }
}
