// One connection after another: when the next one is dialled, and what ends the dialling.

import assert from "node:assert/strict";
import { EventEmitter } from "node:events";
import { test } from "node:test";

import { Transport } from "../../edge_client/web/transport/mqtt.js";

const turn = () => new Promise(setImmediate);

/** A broker that accepts no client; `dialled` are its connections. */
function closedBroker() {
  const dialled = [];
  const connect = () => {
    const link = Object.assign(new EventEmitter(), { connected: false, end() {} });
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
