// A device's life in a page: announce, fetch, check, train, keep, deliver, and choose a center when asked to; until it is
// stopped. One loop waits for events and then does the next piece of work; every answer is kept before its first message
// leaves, so a tab that is closed at any line repeats at most the training. Draws nothing: `tell` is told what happens.

import { Delivery } from "./uploader.js";
import { Downloads, WINDOW_MAX } from "./downloader.js";
import { tooFar } from "../engines/golden_run.js";
import { breath, Inbox } from "./inbox.js";
import { BLOCK_DEFAULT, manifestOf } from "../protocol/blocks.js";
import { Malformed } from "../protocol/errors.js";
import { parse } from "../protocol/json.js";
import { CODECS, DETAIL_MAX, NACK_CODES } from "../protocol/message_schemas.js";
import { LIMIT_BYTES, read, VERSION } from "../protocol/messages.js";
import { functionsOf, manifestsOf, slotsOf, withoutSpares } from "../protocol/task.js";
import { Topics } from "../protocol/topics.js";
import { Blobs } from "./store.js";
import { isBefore, keyOf, sameKey, State } from "./state.js";
import { Transport } from "../transport/mqtt.js";
import { nackOf, RETRY_MS } from "./train_conditions.js";
import { visit } from "../nearest.js";
import { Voice } from "./sender.js";
import { ENGINE, Workshop } from "./task_runner.js";

const SOFTWARE = "fedcenters-web";

class Dropped extends Error {} // the task under way is not wanted any more

/** One device. `join` is {federation, broker, keys}, `device` {id, username, password}; `local()` gives {train, test}. */
export class Client {
  static async open({ join, device, store, ort, mqtt, local, tell, now = () => performance.now() }) {
    const client = new Client();
    Object.assign(client, { join, device, store, ort, local, tell, now });
    client.topics = new Topics(join.federation);
    client.blobs = new Blobs(store);
    client.state = await State.open(store);
    client.takesPart = (await store.get("takes part")) === true;
    client.paused = !client.takesPart;
    client.voice = new Voice(client.topics, device.id);
    client.transport = new Transport(mqtt, {
      url: join.broker,
      clientId: client.topics.clientId(device.id),
      username: device.username,
      password: device.password,
      filters: client.topics.deviceFilters(device.id),
      will: () => client.will(),
      onEvent: (event) => client.inbox.push(event),
    });
    client.voice.transport = client.transport;
    const fetching = (event) => client.task !== null && tell(event); // a visit has words of its own
    client.downloads = new Downloads(client.blobs, (manifest, at) => client.voice.get(manifest, at), fetching);
    client.delivery = new Delivery({ state: client.state, voice: client.voice, transport: client.transport, now, tell });
    client.workshop = new Workshop({ ort, blobs: client.blobs, federation: join.federation, keys: join.keys });
    return client;
  }

  constructor() {
    this.inbox = new Inbox();
    this.task = null;
    this.wish = null; // a visit that the person asked for
    this.pointer = null; // the last `cat`
    this.answer = null; // the last answer to a `near`
    this.boot = null;
    this.block = BLOCK_DEFAULT;
    this.paused = true; // until its owner says that it takes part
    this.takesPart = false;
    this.stopping = false;
    this.failure = null;
    this.connected = false;
    this.refused = []; // this runtime, where it fails the golden run of the program at hand
  }

  /** Live until `stop`. Throws what makes going on useless. */
  async live() {
    await this.transport.connect();
    try {
      while (!this.stopping) {
        await this.take(await this.inbox.next(this.patience()));
        if (this.task !== null) await this.work(this.task);
        else if (this.wish !== null) await this.fulfil(this.wish);
        else await this.delivery.step();
      }
    } finally {
      await this.transport.close(this.topics.state(this.device.id), this.voice.record("off", this.state.birth));
    }
    if (this.failure !== null) throw this.failure;
  }

  /** End `live` soon. */
  stop() {
    this.stopping = true;
    this.inbox.wake();
  }

  /** Train for the federation from now on, and after the tab was closed. */
  async takePart() {
    await this.store.write({ "takes part": true });
    this.takesPart = true;
    this.pause(false);
    await this.samplesChanged();
  }

  /** Do nothing for the federation until it is taken back. */
  pause(paused) {
    this.paused = paused;
    this.inbox.wake();
  }

  /** The samples have changed: say so, since who has none is asked for nothing. */
  async samplesChanged() {
    if (this.connected) await this.sayHere();
  }

  /** Which center suits this device? -> what nearest.js found. */
  nearest() {
    if (this.wish === null) {
      this.wish = {};
      this.wish.done = new Promise((resolve, reject) => Object.assign(this.wish, { resolve, reject }));
      this.inbox.wake();
    }
    return this.wish.done;
  }

  // -- events

  patience() {
    return this.task !== null || this.wish !== null || this.stopping ? 0 : this.delivery.wait();
  }

  async take(event) {
    if (event === undefined) return;
    if (event.kind === "message") {
      await this.onMessage(event);
    } else if (event.kind === "connected") {
      this.connected = true;
      this.tell({ what: "connected" });
      await this.sayHere();
      this.downloads.linkLost();
      this.delivery.linkUp();
    } else {
      this.connected = false;
      this.delivery.linkLost();
      this.tell({ what: "lost", refused: event.refused });
    }
  }

  async onMessage({ topic, payload }) {
    let route;
    let message;
    try {
      route = this.topics.parse(topic);
      if (route.kind === "b") {
        await this.downloads.onBlock(route.label, route.index, payload);
        return;
      }
      if (!["t", "coord", "cat"].includes(route.kind) || !payload.length) return;
      message = await read(payload, route.kind);
    } catch (wrong) {
      this.onUnreadable(payload, wrong);
      return;
    }
    if (await this.state.seeEpoch(message.epoch)) {
      await this.obey(message);
    } else if (route.kind === "t") {
      const detail = `epoch ${message.epoch}; ${this.state.epoch} was seen before`;
      this.voice.say("nack", { re: message.id, code: "old_epoch", detail });
    }
  }

  /** A message that breaks a rule is answered if it can be named, so that nobody waits for its task. */
  onUnreadable(payload, wrong) {
    console.warn("cannot read a message:", wrong.message);
    if (!(wrong instanceof Malformed) || !NACK_CODES.includes(wrong.code)) return;
    try {
      const { id } = parse(payload, LIMIT_BYTES);
      this.voice.say("nack", { re: id, code: wrong.code, detail: wrong.detail.slice(0, DETAIL_MAX) });
    } catch {
      // no id to answer to
    }
  }

  async obey(message) {
    switch (message.k) {
      case "coord":
        return this.onCoord(message);
      case "cat":
        this.pointer = message;
        return this.tell({ what: "catalog" });
      case "task":
        return this.onTask(message);
      case "go":
        return this.delivery.onGo(message);
      case "ack":
        return this.delivery.onAck(message);
      case "near":
        this.answer = message;
        return undefined;
      case "stop":
        return this.onStop(message);
      case "rebirth":
        this.downloads.linkLost(); // it does not know us, so it dropped what we asked
        return this.sayHere();
      default:
        return this.onError(message);
    }
  }

  onCoord(message) {
    if (!message.proto.includes(VERSION)) this.fail(`this coordinator speaks version ${message.proto} of the protocol`);
    this.block = Math.min(BLOCK_DEFAULT, message.block);
    if (this.boot !== null && this.boot !== message.boot) this.delivery.coordinatorRestarted(message.spread_ms);
    this.boot = message.boot;
    this.tell({ what: "coordinator", online: message.online });
  }

  /** Begin a new task; one that is done is announced again, one that is running or older is not begun again. */
  onTask(message) {
    const key = keyOf(message);
    const { result } = this.state;
    if (result && sameKey(result.key, key)) this.delivery.announce();
    else if (result && isBefore(key, result.key)) return;
    else if (this.task !== null && sameKey(this.task.key, key)) this.task.message = message;
    else {
      this.task = { key, message, until: this.now() + message.left_ms };
      this.delivery.cease(); // whatever came before is late now
    }
  }

  async onStop(message) {
    const key = keyOf(message);
    if (this.task !== null && sameKey(this.task.key, key)) this.task = null;
    if (this.state.result && sameKey(this.state.result.key, key)) {
      this.delivery.cease();
      await this.state.acknowledged("late");
      this.tell({ what: "rest", owes: false });
    }
  }

  async onError(message) {
    console.warn(`the coordinator answers ${message.code} ${message.detail ?? ""}`);
    if (message.code === "not_member") this.fail("this device is not a member here; ask for a new link");
    if (message.code === "bad_version") this.fail("the coordinator speaks another version of the protocol");
    this.downloads.onError(message.re, message.code, this.now() + (message.retry_ms ?? RETRY_MS));
    await this.delivery.onError(message);
  }

  fail(why) {
    this.failure = new Error(why);
    this.stopping = true;
  }

  // -- one task

  async work(task) {
    try {
      const { outcome, seconds } = await this.carryOut(task);
      await this.keep(task, outcome, seconds);
      this.delivery.announce();
    } catch (wrong) {
      if (!(wrong instanceof Dropped)) this.refuse(task, wrong);
    } finally {
      this.downloads.clear();
      if (this.task === task) this.task = null;
      this.tell({ what: "rest", owes: this.delivery.againAt !== null });
    }
  }

  /** Fetch in the order of trust: the signed program, what it vouches for, the vectors; then train. */
  async carryOut(task) {
    if (this.paused) throw new Malformed("unavailable", "paused by its owner");
    const { message, key } = task;
    this.tell({ what: "task", job: message.job, round: key.round, run: key.run });
    await this.workshop.checkSignatures(message.program);
    await this.fetch([message.program], () => this.checkWanted(task));
    const program = await this.workshop.program(message.program);
    const functions = functionsOf(message);
    for (const [field, name] of Object.entries(functions)) this.workshop.checkContainer(program, name, message[field]);
    const own = await this.state.own(key.run, program.schema);
    const asked = withoutSpares(message, new Set(slotsOf(message).filter((slot) => own.has(slot))));
    const vectors = manifestsOf(asked);
    await this.workshop.checkSignatures(...vectors); // a crafted model could make its update give away the samples
    const containers = Object.keys(functions).map((field) => message[field]);
    await this.makeRoom([message.program, ...containers, ...vectors], program);
    await this.vet(task, message.program, program);
    await this.fetch([...containers, ...vectors], () => this.checkWanted(task));
    const began = this.now();
    const outcome = await this.workshop.run(asked, {
      local: await this.local(program),
      own,
      residual: await this.state.residual(key, message.center, program.schema),
      posterior: await this.state.posterior(key),
      between: (k, steps, losses) => this.glance(task, k, steps, losses),
    });
    return { outcome, seconds: (this.now() - began) / 1000 };
  }

  /** No task with a runtime that fails the program's golden run. */
  async vet(task, manifest, program) {
    const golden = program.golden[ENGINE];
    if (golden) {
      const step = { ...program.containers[ENGINE].step, block: manifest.block, kind: "container" };
      await this.fetch([step], () => this.checkWanted(task));
    }
    const off = await this.workshop.vetted(manifest, this.store);
    const { runtime } = this.workshop;
    const refused = golden && off > golden.tolerance ? [{ engine: ENGINE, runtime, difference: off }] : [];
    const changed = refused.length !== this.refused.length;
    this.refused = refused;
    if (changed) await this.sayHere();
    if (refused.length) throw tooFar(runtime, off, golden);
  }

  /** Take events until the blobs are here; `check` throws when they are not wanted any more. */
  async fetch(manifests, check) {
    await this.downloads.start(manifests);
    for (;;) {
      const wait = await this.downloads.step(this.now());
      if (wait === null) return;
      await this.take(await this.inbox.next(Math.max(1, Math.min(wait, 1000))));
      check();
    }
  }

  /** Between two steps: let the page breathe, take in what came, and stay here while it is paused. */
  async glance(task, k, steps, losses) {
    if (k !== undefined) this.tell({ what: "training", step: k, steps, loss: losses.at(-1), round: task.key.round });
    await breath();
    do {
      const waits = this.paused && !this.stopping;
      for (let event = await this.inbox.next(waits ? 1000 : 0); event !== undefined; event = await this.inbox.next(0)) await this.take(event);
      this.checkWanted(task);
    } while (this.paused);
  }

  checkWanted(task) {
    if (this.task !== task || this.stopping) throw new Dropped();
    if (this.now() >= task.until) throw new Malformed("deadline", "the time was over before the task was done");
  }

  /** Durably, before anybody hears of it. */
  async keep(task, outcome, seconds) {
    const update = await manifestOf(outcome.data, outcome.what, { block: this.block, inline: true });
    const { n, what, metrics } = outcome;
    await this.state.finish({ key: task.key, n, what, update, seconds, metrics }, outcome, task.message.center);
    this.tell({ what: "done", job: task.message.job, round: task.key.round, loss: metrics.loss, size: update.size });
  }

  refuse(task, wrong) {
    const { code, detail, retry } = nackOf(wrong);
    console.warn(`cannot do the task: ${code}: ${detail}`);
    this.voice.say("nack", { re: task.message.id, ...task.key, code, detail, retry_ms: retry });
    this.tell({ what: "refused", code, detail });
  }

  /** Forget cached blobs that neither this task nor the center that was taken home needs. */
  async makeRoom(manifests, program) {
    const home = await this.store.get("home");
    const wanted = new Set(manifests.map(({ sha256 }) => sha256));
    for (const file of Object.values(program.containers[ENGINE] ?? {})) wanted.add(file.sha256);
    if (home?.sha256) wanted.add(home.sha256);
    await this.blobs.keepOnly(wanted);
  }

  // -- a visit

  async fulfil(wish) {
    try {
      wish.resolve(await visit(this));
    } catch (wrong) {
      wish.reject(wrong);
    } finally {
      this.downloads.clear();
      this.wish = null;
    }
  }

  // -- what we say about ourselves

  async sayHere() {
    const { train } = await this.local(null);
    const disk = (await globalThis.navigator?.storage?.estimate?.())?.quota;
    const caps = { engine: ENGINE, n: this.takesPart ? train.n : 0, codecs: CODECS, window: WINDOW_MAX, disk: disk && Math.floor(disk) };
    if (caps.disk === undefined) delete caps.disk;
    caps.runtime = this.workshop.runtime;
    if (this.refused.length) caps.refused = this.refused;
    this.voice.presence("on", this.state.birth, { sw: SOFTWARE, caps });
  }

  /** Each connection is a birth, and its will carries the same number. */
  async will() {
    const birth = await this.state.nextBirth();
    return { topic: this.topics.state(this.device.id), payload: this.voice.record("lost", birth) };
  }
}
