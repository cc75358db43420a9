// One connection after another: when the next one is dialled, and what ends the dialling.

import assert from "node:assert/strict";
import { EventEmitter } from "node:events";
import { mock, test } from "node:test";

import { Transport } from "../../edge_client/web/transport/mqtt.js";

const turn = () => new Promise(setImmediate);

/** A broker that accepts no client by itself; `dialled` are its connections. */
function closedBroker() {
  const dialled = [];
  const connect = () => {
    const link = Object.assign(new EventEmitter(), { connected: false, pings: 0, end() {}, subscribe() {}, sendPing: () => { link.pings += 1; } });
    dialled.push(link);
    return link;
  };
  return { dialled, connect };
}

function transportTo(mqtt, { will = async () => ({ topic: "t", payload: new Uint8Array() }), onEvent = () => {} } = {}) {
  return new Transport(mqtt, { url: "ws://b", clientId: "c", filters: [], will, onEvent, random: () => 1 });
}

test("a phone whose owner is back at the page dials at once, and not twice", async () => {
  const mqtt = closedBroker();
  const transport = transportTo(mqtt);
  await transport.connect();
  transport.hurry(); // it is dialling
  await turn();
  assert.equal(mqtt.dialled.length, 1);
  mqtt.dialled[0].emit("close");
  transport.hurry();
  transport.hurry();
  await turn();
  assert.equal(mqtt.dialled.length, 2);
  mqtt.dialled[1].emit("close");
  await transport.close();
  transport.hurry();
  await turn();
  assert.equal(mqtt.dialled.length, 2);
});

test("a link that was lost without a word while the phone slept is given up soon after its owner is back, one that answers stands", async () => {
  mock.timers.enable({ apis: ["setInterval", "setTimeout"] });
  try {
    const mqtt = closedBroker();
    const transport = transportTo(mqtt);
    await transport.connect();
    const [link] = mqtt.dialled;
    let ended = 0;
    Object.assign(link, { connected: true, end: () => { ended += 1; } });
    link.emit("connect");
    const before = link.listenerCount("close");
    transport.hurry();
    link.emit("packetreceive", { cmd: "pingresp" });
    assert.deepEqual([link.listenerCount("close"), link.listenerCount("packetreceive")], [before, 0]); // a page is looked at often
    mock.timers.tick(10_000);
    assert.deepEqual([link.pings, ended], [1, 0]);
    transport.hurry();
    mock.timers.tick(10_000);
    assert.deepEqual([link.pings, ended], [2, 1]);
    await transport.close();
  } finally {
    mock.timers.reset();
  }
});

test("to a broker that acknowledges nothing no more is sent than is kept in memory", async () => {
  const mqtt = closedBroker();
  const transport = transportTo(mqtt);
  await transport.connect();
  const [link] = mqtt.dialled;
  const kept = [];
  Object.assign(link, { connected: true, publish: (topic, payload, options, done) => kept.push(done) });
  for (let i = 0; i < 2_000; i += 1) transport.publish("t", new Uint8Array());
  assert.equal(kept.length, 1_025);
  kept.shift()();
  transport.publish("t", new Uint8Array());
  assert.equal(kept.length, 1_025);
  await transport.close();
});

test("a phone that cannot store the number of its next connection does not go on silently", async () => {
  const mqtt = closedBroker();
  const events = [];
  let births = 0;
  const will = async () => {
    births += 1;
    if (births > 1) throw new Error("nothing is stored any more");
    return { topic: "t", payload: new Uint8Array() };
  };
  const transport = transportTo(mqtt, { will, onEvent: (event) => events.push(event) });
  await transport.connect();
  mqtt.dialled[0].emit("close");
  transport.hurry();
  await turn();
  assert.deepEqual(events.map(({ kind, error }) => [kind, error?.message]), [["lost", undefined], ["failed", "nothing is stored any more"]]);
  assert.equal(mqtt.dialled.length, 1);
});

test("a connection is never silent for thirty seconds, and one that is lost pings no more", async () => {
  mock.timers.enable({ apis: ["setInterval", "setTimeout"] });
  try {
    const mqtt = closedBroker();
    const transport = transportTo(mqtt);
    await transport.connect();
    const [link] = mqtt.dialled;
    link.emit("connect");
    for (let minute = 0; minute < 5; minute += 1) {
      const before = link.pings;
      mock.timers.tick(29_000);
      assert.ok(link.pings > before);
    }
    link.emit("close");
    const last = link.pings;
    mock.timers.tick(60_000);
    assert.equal(link.pings, last);
    await transport.close();
  } finally {
    mock.timers.reset();
  }
});

test("two browsers with one link, which end each other's connections, are suspected after three; a network that is away is not", async () => {
  mock.timers.enable({ apis: ["setInterval", "setTimeout", "Date"] });
  try {
    const mqtt = closedBroker();
    const events = [];
    const transport = transportTo(mqtt, { onEvent: ({ kind, namesake }) => events.push(namesake ?? kind) });
    const end = async (stood) => {
      if (stood) mqtt.dialled.at(-1).emit("connect");
      mock.timers.tick(stood ? 5_000 : 0);
      mqtt.dialled.at(-1).emit("close");
      mock.timers.tick(200_000);
      for (let i = 0; i < 5; i += 1) await Promise.resolve();
    };
    await transport.connect();
    for (const stood of [true, true, false, true, true, true, true, false]) await end(stood);
    assert.deepEqual(events, [false, false, false, false, false, true, true, false]);
    for (const stood of [true, true, true]) await end(stood);
    mqtt.dialled.at(-1).emit("connect");
    mock.timers.tick(60_000);
    assert.deepEqual(events.slice(8), [false, false, true, "steady"]); // once: the warning is over
    await transport.close();
  } finally {
    mock.timers.reset();
  }
});

test("a proxy that cuts each connection after thirty seconds does not make the phone wait longer and longer", async () => {
  mock.timers.enable({ apis: ["setInterval", "setTimeout", "Date"] });
  try {
    const mqtt = closedBroker();
    const transport = transportTo(mqtt);
    await transport.connect();
    for (let cut = 1; cut <= 6; cut += 1) {
      mqtt.dialled.at(-1).emit("connect");
      mock.timers.tick(30_000);
      mqtt.dialled.at(-1).emit("close");
      mock.timers.tick(1_000);
      for (let i = 0; i < 5; i += 1) await Promise.resolve();
      assert.equal(mqtt.dialled.length, 1 + cut);
    }
    await transport.close();
  } finally {
    mock.timers.reset();
  }
});
