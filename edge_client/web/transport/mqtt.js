// MQTT over WebSockets: one connection after another, each with a birth of its own in its will. What comes is handed to
// `onEvent` as {kind: "connected" | "steady" | "lost" | "message" | "failed", topic, payload, retained, error}: "steady" when a
// connection stands after others that soon ended, "failed" when it cannot dial again. The only file that knows MQTT.js.

const KEEPALIVE_S = 60;
const PING_MS = 25_000; // proxies cut a connection that says nothing for 60 s, a few after 30 s; MQTT.js pings after 60 s
const CONNECT_MS = 20_000;
const SILENT_MS = 10_000; // without an answer, when a person is back at the page: the link was lost while the phone slept
const MAX_BACKOFF_MS = 120_000;
const MANY_CUTS = 3; // a broker keeps one connection of a name: another client with it is suspected
const MAX_UNACKNOWLEDGED = 1_024; // messages: no more are sent to a broker that acknowledges none, as they fill the memory
const STEADY_MS = 20_000; // connected for so long: the next failure is a first one, also where a proxy cuts each connection after 30 s

/** Dials until it is closed. `will` is awaited before each connection: {topic, payload}. */
export class Transport {
  constructor(mqtt, { url, clientId, username, password, filters, will, onEvent, random = Math.random }) {
    Object.assign(this, { mqtt, url, filters, will, onEvent, random });
    this.identity = { clientId, username, password };
    this.client = null;
    this.failures = 0;
    this.cuts = 0; // connections in a row that stood and soon ended
    this.unacknowledged = 0;
    this.waiting = [];
    this.closed = false;
    this.timer = null;
  }

  async connect() {
    const { topic, payload } = await this.will();
    if (this.closed) return;
    const client = this.mqtt.connect(this.url, {
      ...this.identity,
      protocolVersion: 4,
      clean: true,
      keepalive: KEEPALIVE_S,
      connectTimeout: CONNECT_MS,
      reconnectPeriod: 0, // a new connection is a new birth, so we dial again ourselves
      queueQoSZero: false,
      resubscribe: false,
      timerVariant: "native",
      will: { topic, payload: text(payload), qos: 1, retain: true },
    });
    this.client = client;
    this.unacknowledged = 0;
    let since = null;
    let wrong = null;
    let pings;
    client.on("connect", () => {
      since = Date.now();
      pings = setInterval(() => {
        client.sendPing();
        if (this.cuts) this.onEvent({ kind: "steady" });
        this.cuts = 0;
      }, PING_MS);
      client.subscribe(this.filters, { qos: 1 }, (failure) => {
        if (failure) client.end(true);
        else this.onEvent({ kind: "connected" });
      });
    });
    client.on("message", (topic, data, { retain: retained }) => this.onEvent({ kind: "message", topic, payload: new Uint8Array(data), retained }));
    client.on("error", (error) => {
      wrong = error;
      client.end(true);
    });
    client.on("close", () => {
      clearInterval(pings);
      if (this.client !== client) return;
      this.client = null;
      this.release();
      const steady = since !== null && Date.now() - since > STEADY_MS;
      this.failures = steady ? 0 : this.failures + 1;
      this.cuts = steady || since === null ? 0 : this.cuts + 1;
      this.onEvent({ kind: "lost", unreached: since === null, refused: wrong?.code === 4 || wrong?.code === 5, namesake: this.cuts >= MANY_CUTS });
      client.end(true);
      if (!this.closed) this.timer = setTimeout(() => this.dialAgain(), this.random() * Math.min(MAX_BACKOFF_MS, 1000 * 2 ** this.failures));
    });
  }

  /** A person is back at the page, or a network: dial now what waits to be dialled, and look whether a link that stands still answers. */
  hurry() {
    if (this.timer !== null) this.dialAgain();
    else if (this.isUp) this.requireAnswer(this.client);
  }

  requireAnswer(client) {
    const events = ["packetreceive", "close"];
    const silent = setTimeout(() => client.end(true), SILENT_MS);
    const heard = () => {
      clearTimeout(silent);
      for (const event of events) client.removeListener(event, heard);
    };
    for (const event of events) client.on(event, heard);
    client.sendPing();
  }

  dialAgain() {
    clearTimeout(this.timer);
    this.timer = null;
    this.connect().catch((error) => this.onEvent({ kind: "failed", error }));
  }

  get isUp() {
    return this.client !== null && this.client.connected;
  }

  /** Send at least once; what is not acknowledged when the link breaks is dropped; the sender repeats it. */
  publish(topic, payload, { retain = false } = {}) {
    const { client } = this;
    if (!this.isUp || this.unacknowledged > MAX_UNACKNOWLEDGED) return;
    this.unacknowledged += 1;
    client.publish(topic, payload, { qos: 1, retain }, () => {
      if (this.client !== client) return;
      this.unacknowledged -= 1;
      this.release();
    });
  }

  /** Resolves once at most `limit` messages are unacknowledged, or the link is gone. */
  async drained(limit) {
    while (this.client !== null && this.unacknowledged > limit) await new Promise((resolve) => this.waiting.push(resolve));
  }

  /** Say goodbye with a last message, and dial no more. */
  async close(topic, payload) {
    this.closed = true;
    clearTimeout(this.timer);
    this.timer = null;
    const { client } = this;
    if (client === null) return;
    if (client.connected && topic) {
      await Promise.race([
        new Promise((resolve) => client.publish(topic, text(payload), { qos: 1, retain: true }, resolve)),
        new Promise((resolve) => setTimeout(resolve, 1000)),
      ]);
    }
    client.end(true);
  }

  release() {
    for (const resolve of this.waiting.splice(0)) resolve();
  }
}

const text = (payload) => new TextDecoder().decode(payload);
