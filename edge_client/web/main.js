// Entry point of the page: connects the client, the samples and the view, and handles the user's input.

import { Client } from "./runtime/client.js";
import { awaitModel, findJoin, forgetEarlier, hasMoved, loadIdentity, OldPage, otherModel, PAGE_STORE } from "./join.js";
import { ScreenLock } from "./screen_lock.js";
import { OFFLINE, View } from "./view.js";
import { fromPhoto, isPicture, Pad } from "./data/images.js";
import { threadCount } from "./engines/onnx.js";
import { canVerify } from "./protocol/signing.js";
import { largestOf, rangeWarning, readCsv, Samples } from "./data/samples.js";
import { Store } from "./runtime/store.js";
import { openCenter, rankClasses } from "./nearest.js";

const VENDORED = new URL(document.querySelector("meta[name=third-party]").content, document.baseURI).href;
const SIMD = [0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98, 11]; // a module with one vector
const FACTS = new URL("join.json", document.baseURI).href;
const view = new View(document);

async function main() {
  addEventListener("hashchange", () => location.hash && location.reload()); // a link that was followed in this tab loads nothing by itself
  if (!globalThis.crypto?.subtle || !globalThis.indexedDB) {
    throw new Error("this page needs https:// (or http://localhost): elsewhere a browser lends neither its checksums nor its storage");
  }
  if (!(await canVerify())) {
    throw new Error("this browser cannot check Ed25519 signatures; Chrome 137, Firefox 129, Safari 17 and newer can");
  }
  if (!globalThis.WebAssembly?.validate(new Uint8Array(SIMD))) {
    throw new Error("this browser lends no WebAssembly with SIMD, which training needs. A strict protection, as an iPhone's Lockdown Mode, may have switched it off for this page; else take a newer browser");
  }
  const kept = await Store.open(PAGE_STORE);
  const { join, confirmed, offline } = await findJoin(FACTS, kept);
  if (offline) view.showOffline(OFFLINE);
  const device = await alone("fedcenters/identity", () => loadIdentity(join, location, kept));
  if (location.hash) history.replaceState(null, "", location.pathname + location.search);
  if (device === null) throw new Error(`a link of this phone's own is needed to join ${join.federation}: open the one that this phone was given, or ask its operator for one`);
  view.showIdentity(join.federation, device.id);
  await requireSingleTab(`${join.federation}/${device.id}`);
  const [ort, mqtt] = await Promise.all([loadRuntime(), import(`${VENDORED}mqtt.esm.js`)]);
  const store = await openStore(join.federation, device.id);
  navigator.storage?.persist?.().catch(() => {}); // not awaited: Firefox asks its user, who may leave the question open
  const awake = new ScreenLock({ page: document, request: () => navigator.wakeLock?.request("screen"), show: (on) => view.showAwake(on) });
  const samples = new Samples(store);
  if (device.before) await reportErrors(() => takeOver(samples, join, device, kept));
  const client = await Client.open({
    join, device, store, ort, mqtt: mqtt.default ?? mqtt, local: () => samples.local(), trains: () => samples.trains(),
    tell: (event) => {
      awake.on(event);
      view.tell(event);
      const failed = (wrong) => (wrong instanceof OldPage ? loadAgain(client) : view.showError(wrong.message));
      if (event.unreached) hasMoved(FACTS, join, kept).then((moved) => moved && loadAgain(client), failed);
      if (event.restarted && model !== null) otherModel(FACTS, kept, model).then((told) => told && view.showError(told), failed);
    },
  });
  samples.changed = async () => {
    view.showRange("");
    view.showSamples(await samples.overview(), model);
    await client.announceSamples();
  };
  let model = join.model ?? (offline ? await store.get("model") : null) ?? null; // a coordinator that prepares a model may prepare another
  view.showRounds(client.state);
  view.showRole(client);
  connectControls(client, samples, () => model);
  const modelKnown = (async () => {
    model ??= await awaitModel(FACTS, kept);
    view.showEntry(model);
    view.showSamples(await samples.overview(), model);
    await store.write({ model }).catch((wrong) => console.warn("the model is not kept for offline starts:", wrong.message)); // a full disk
    await showCenter(client);
  })();
  if (!offline) keepForLater();
  document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && client.transport.hurry());
  for (const change of ["online", "offline"]) addEventListener(change, () => client.transport.hurry());
  try {
    await Promise.race([confirmed.then(() => client.run()), modelKnown.then(() => new Promise(() => {})), store.gone]);
  } catch (wrong) {
    if (offline || !(wrong instanceof OldPage)) throw wrong;
    loadAgain(client); // it waited for its model
  } finally {
    client.stop();
    awake.on({ what: "ended" });
  }
}

/**
 * The coordinator was upgraded, and an old page does not train for it; or it has another broker, and a page may dial only the one that
 * it came with. A task is dropped: it comes again to the page that is loaded. A drawing that was begun is added or wiped first.
 */
function loadAgain(client) {
  client.stop();
  const pad = view.part("pad");
  if ("blank" in pad.dataset) location.reload();
  else view.end("the coordinator was upgraded or moved: this page loads itself again once your drawing is added or wiped");
  new MutationObserver(() => location.reload()).observe(pad, { attributeFilter: ["data-blank"] });
}

/** What a phone keeps in a federation, under its name there. */
const openStore = (federation, id) => Store.open(`fedcenters/${federation}/${id}`);

/** Another link gave this phone another name, and so a store of its own: its user says whether the samples of before are taken along. */
async function takeOver(samples, join, device, kept) {
  const earlier = new Samples(await openStore(join.federation, device.before));
  const n = await earlier.count();
  if (!n || (await samples.count())) return;
  const [some, them] = n === 1 ? ["1 sample", "it"] : [`${n} samples`, "them"];
  if (confirm(`This browser has ${some} of ${device.before}, as this phone was called before. Take ${them} over?`)) await samples.takeFrom(earlier);
  else await forgetEarlier(join, device, kept);
}

/** From the next start on the page opens without its coordinator. A browser that cannot keep it goes on as before. */
function keepForLater() {
  navigator.serviceWorker?.register("worker.js").catch((wrong) => console.warn("this page is not kept for offline starts:", wrong.message));
}

/** Buttons and files. */
function connectControls(client, samples, model) {
  const pad = new Pad(view.part("pad"));
  const guessing = new Pad(view.part("try"), () => reportErrors(() => guess(guessing)));
  view.on("wipe", () => pad.clear());
  view.on("wipe-try", () => {
    guessing.clear();
    view.showGuess(null);
  });
  view.on("keep", () => pad.keep(async (stored) => {
    const x = pad.read(model().input);
    if (x === null) throw new Error("draw something first");
    await samples.add([{ x, label: view.chosenLabel() }], stored);
  }));
  view.onFiles("photos", async (files) => {
    const label = view.chosenLabel();
    const invert = view.part("invert").checked;
    const added = [];
    for (const file of files) added.push({ x: await fromPhoto(file, model().input, { invert }), label });
    await samples.add(added);
  });
  let loaded = 0; // samples of the last table
  view.onFiles("table", async ([file]) => {
    const scale = Number(view.part("scale").value);
    const added = readCsv(await file.text(), model(), scale);
    const mine = await samples.largest();
    const others = mine || (isPicture(model().input) ? 1 : 0); // drawings and photos go from 0 to 1
    await samples.add(added);
    loaded = added.length;
    const whose = mine ? "your other samples" : "drawings";
    if (!model().parts) view.showRange(rangeWarning({ added: largestOf(added), others, scale, whose }));
  });
  view.on("unload", async () => {
    const last = loaded;
    if (!last) return; // pressed twice
    loaded = 0;
    let gone = false;
    try {
      await samples.remove({ last }, () => {
        gone = true;
      });
    } finally {
      if (!gone) loaded = last; // it can be pressed again
    }
  });
  view.on("undo", () => samples.remove());
  view.on("empty", async () => {
    if (confirm(`Remove all ${await samples.count()} samples from this browser?`)) await samples.remove({ all: true });
  });
  view.on("pause", async () => {
    if (client.participates) {
      client.pause(!client.paused);
    } else {
      await client.participate();
    }
    view.showRole(client);
  });
  view.on("nearest", async () => {
    view.showSearching(true);
    try {
      await client.nearest();
      await showCenter(client);
    } finally {
      view.showSearching(false);
    }
  });
}

let home = null;

async function showCenter(client) {
  const before = home;
  home = await openCenter(client);
  await before?.release?.();
  if (home !== null) view.showCenter(home);
}

/** Read what was drawn with the center at hand, whose model may be another one than the coordinator's by now. */
async function guess(pad) {
  const x = home?.classify ? pad.read(home.input) : null;
  view.showGuess(x === null ? null : await rankClasses(home.classify, x));
}

/** `work`, while no other tab does such: of two that open at once each would choose a name, and one name would be forgotten with its samples. */
function alone(lock, work) {
  return navigator.locks ? navigator.locks.request(lock, work) : work();
}

/** One tab at a time: two would share one name at the broker and throw each other out. A second one begins anew when it is alone. */
async function requireSingleTab(name) {
  if (!navigator.locks) return;
  const lock = `fedcenters/${name}`;
  await new Promise((resolve) => {
    navigator.locks.request(lock, { ifAvailable: true }, (held) => {
      if (held !== null) {
        resolve();
        return new Promise(() => {});
      }
      view.end("this phone takes part already, in another tab. Close that one, and this one goes on");
      navigator.locks.request(lock, () => location.reload());
      return undefined;
    });
  });
}

/** ONNX Runtime Web: one thread, more where the page is isolated and the phone has cores to spare. */
async function loadRuntime() {
  const ort = await import(`${VENDORED}ort.wasm.min.mjs`);
  ort.env.wasm.numThreads = globalThis.crossOriginIsolated ? threadCount(location.search, navigator.hardwareConcurrency) : 1;
  ort.env.wasm.wasmPaths = VENDORED;
  return ort;
}

async function reportErrors(action) {
  try {
    view.showError("");
    await action();
  } catch (wrong) {
    view.showError(wrong.detail ?? wrong.message);
    view.part("trouble").scrollIntoView({ block: "nearest" }); // what was pressed may be far below
  }
}

view.guard = reportErrors;
view.drawable = isPicture;
main().catch((wrong) => {
  console.warn(wrong);
  view.end(wrong.message);
});
