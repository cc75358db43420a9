// The page: puts the client, the samples and what a person does together. Decides nothing about the protocol.

import { Client } from "./runtime/client.js";
import { readJoin, whoAmI } from "./join.js";
import { Face } from "./view.js";
import { fromPhoto, isPicture, Pad } from "./data/images.js";
import { canVerify } from "./protocol/signing.js";
import { readCsv, Samples } from "./data/samples.js";
import { Store } from "./runtime/store.js";
import { homeOf, ranked } from "./nearest.js";

const AGAIN_MS = 2_000;
const THREADS_MAX = 4;
const THIRD = new URL("third/", import.meta.url).href;
const face = new Face(document);

async function main() {
  if (!globalThis.crypto?.subtle || !globalThis.indexedDB) {
    throw new Error("this page needs https:// (or http://localhost): elsewhere a browser lends neither its checksums nor its storage");
  }
  if (!(await canVerify())) {
    throw new Error("this browser cannot check Ed25519 signatures; Chrome 137, Firefox 129, Safari 17 and newer can");
  }
  const join = await readJoin("join.json");
  const device = whoAmI(join, location);
  if (location.hash) history.replaceState(null, "", location.pathname + location.search);
  if (device === null) throw new Error(`a link of this phone's own is needed to join ${join.federation}: ask whoever runs it`);
  face.joined(join.federation, device.id);
  await alone(`${join.federation}/${device.id}`);
  const [ort, mqtt] = await Promise.all([openRuntime(), import(`${THIRD}mqtt.esm.js`)]);
  const store = await Store.open(`fedcenters/${join.federation}/${device.id}`);
  await navigator.storage?.persist?.(); // a browser short of space asks before it forgets this page
  const awake = new Awake();
  const samples = new Samples(store);
  const client = await Client.open({
    join, device, store, ort, mqtt: mqtt.default ?? mqtt, local: () => samples.local(),
    tell: (event) => {
      awake.on(event);
      face.tell(event);
    },
  });
  samples.changed = async () => {
    face.samples(await samples.overview(), model);
    await client.samplesChanged();
  };
  let model = join.model ?? (await store.get("model")) ?? null;
  face.rounds(client.state);
  face.role(client);
  wire(client, samples, () => model);
  const told = (async () => {
    while (model === null) {
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
      model = (await readJoin("join.json").catch(() => ({ model: null }))).model;
    }
    await store.write({ model });
    face.modelled(model);
    face.samples(await samples.overview(), model);
    await showHome(client);
  })();
  await Promise.race([client.live(), told.then(() => new Promise(() => {}))]);
}

/** Buttons and files. */
function wire(client, samples, model) {
  const pad = new Pad(face.part("pad"));
  const guessing = new Pad(face.part("try"), () => guard(() => guess(client, guessing, model())));
  face.on("wipe", () => pad.clear());
  face.on("wipe-try", () => {
    guessing.clear();
    face.guess(null);
  });
  face.on("keep", async () => {
    const x = pad.read(model().input);
    if (x === null) throw new Error("draw something first");
    await samples.add([{ x, label: face.label() }]);
    pad.clear();
  });
  face.onFiles("photos", async (files) => {
    const label = face.label();
    const invert = face.part("invert").checked;
    const added = [];
    for (const file of files) added.push({ x: await fromPhoto(file, model().input, { invert }), label });
    await samples.add(added);
  });
  face.onFiles("table", async ([file]) => samples.add(readCsv(await file.text(), model(), Number(face.part("scale").value))));
  face.on("undo", () => samples.remove());
  face.on("empty", async () => {
    if (confirm(`Remove all ${await samples.count()} samples from this browser?`)) await samples.remove({ all: true });
  });
  face.on("pause", async () => {
    if (client.takesPart) {
      client.pause(!client.paused);
    } else {
      if (!(await samples.count())) throw new Error("add some samples first");
      await client.takePart();
    }
    face.role(client);
  });
  face.on("nearest", async () => {
    face.searching(true);
    try {
      await client.nearest();
      await showHome(client);
    } finally {
      face.searching(false);
    }
  });
}

let home = null;

async function showHome(client) {
  home = await homeOf(client);
  if (home !== null) face.home(home);
}

async function guess(client, pad, model) {
  const x = pad.read(model.input);
  face.guess(x === null || !home?.classify ? null : await ranked(home.classify, x));
}

/** One tab at a time: two would share one name at the broker and throw each other out. */
async function alone(name) {
  if (!navigator.locks) return;
  await new Promise((resolve, reject) => {
    navigator.locks.request(`fedcenters/${name}`, { ifAvailable: true }, (lock) => {
      if (lock === null) {
        reject(new Error("this phone takes part already, in another tab; close one of the two"));
        return undefined;
      }
      resolve();
      return new Promise(() => {});
    });
  });
}

/** ONNX Runtime Web: one thread, more where the page is isolated and the phone has cores to spare. */
async function openRuntime() {
  const ort = await import(`${THIRD}ort.wasm.min.mjs`);
  const asked = Number(new URLSearchParams(location.search).get("threads"));
  const spare = Math.min(THREADS_MAX, Math.max(1, Math.floor((navigator.hardwareConcurrency ?? 1) / 2)));
  ort.env.wasm.numThreads = globalThis.crossOriginIsolated ? asked || spare : 1;
  ort.env.wasm.wasmPaths = THIRD;
  return ort;
}

/** Keeps the screen on while there is work: a phone that sleeps stops the page. */
class Awake {
  constructor() {
    this.lock = null;
    this.wanted = false;
    document.addEventListener("visibilitychange", () => this.renew());
  }

  on({ what, owes }) {
    if (what === "task") this.wanted = true;
    else if (what === "answered" || what === "refused" || (what === "rest" && !owes)) this.wanted = false;
    else return;
    this.renew();
  }

  async renew() {
    try {
      if (this.wanted && this.lock === null && document.visibilityState === "visible") {
        this.lock = (await navigator.wakeLock?.request("screen")) ?? null;
        this.lock?.addEventListener("release", () => {
          this.lock = null;
          face.awake(false);
        });
      } else if (!this.wanted && this.lock !== null) {
        await this.lock.release();
      }
    } catch {
      this.lock = null; // a phone low on power may say no
    }
    face.awake(this.lock !== null);
  }
}

async function guard(action) {
  try {
    face.trouble("");
    await action();
  } catch (wrong) {
    face.trouble(wrong.detail ?? wrong.message);
  }
}

face.guard = guard;
face.drawable = isPicture;
main().catch((wrong) => {
  console.warn(wrong);
  face.trouble(wrong.message);
  face.tell({ what: "ended" });
});
