// The panels Export and New device, and the page of one device.

import { notice } from "./control.js";
import { fetchBlob, fetchJson, Refused } from "./remote.js";
import { byId, bytes, centerColour, el, onCenter, percent, percentOnAxis } from "./dom.js";
import { lines } from "./charts.js";
import { runNamed, state } from "./state.js";

async function download(path) {
  let file;
  try {
    file = await fetchBlob(`api/files/${path.split("/").map(encodeURIComponent).join("/")}`);
  } catch (wrong) {
    notice(`Not downloaded: ${wrong instanceof Refused ? wrong.message : "the coordinator does not answer"}.`);
    return;
  }
  if (state.alive) notice("");
  const url = URL.createObjectURL(file);
  el("a", { href: url, download: path.split("/").at(-1) }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

const short = (path) => path.replace(/[0-9a-f]{40,64}/, (hash) => `${hash.slice(0, 8)}…`);

export async function showFiles() {
  const { files } = await fetchJson("api/files");
  if (!files.length) { byId("export").replaceChildren(el("p", { class: "empty" }, "The centers' files appear here when the runs are done.")); return; } // also after a coordinator that had ended
  const rank = ({ path }) => (path.startsWith("centers/") ? 0 : path.startsWith("program/") ? 2 : 1); // the centers first
  const rows = files.toSorted((a, b) => rank(a) - rank(b)).map(({ path, size }) => el("tr", {}, el("td", { title: path }, short(path)), el("td", { class: "number" }, bytes(size)),
    el("td", { class: "number" }, el("button", { type: "button", class: "small", "aria-label": `Download ${path}`, onclick: () => download(path) }, "Download"))));
  const table = el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "File"), el("th", { scope: "col", class: "number" }, "Size"), el("th", { scope: "col", class: "number" }, "Download"))), el("tbody", {}, ...rows));
  byId("export").replaceChildren(
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-labelledby": "h-export" }, table),
    el("p", { class: "note" }, "The bundle in the run's folder: every center as files that run without us, each checked against torch. Serve it with fedcenters-export serve."));
}

export async function showJoin() {
  const { config, command, local, note, phone } = await fetchJson("api/join");
  if (!config) return;
  const copy = el("button", { type: "button", class: "small", onclick: async () => { await navigator.clipboard.writeText(config); copy.textContent = "Copied"; } }, "Copy");
  const words = el("div", {},
    el("p", {}, "A device that never trained asks which center suits it best, or hears that none does. Its samples stay with it. client.toml:"),
    note ? el("p", { class: "note" }, note) : null,
    el("pre", { tabindex: "0" }, config), navigator.clipboard && copy, // over http:// a browser lends no clipboard
    el("pre", { tabindex: "0" }, `$ ${command}`),
    local ? el("p", { class: "note" }, "This address is that of this machine itself; a device elsewhere needs one that it can reach (docs/security.md).") : null);
  const scan = phone && el("div", {}, el("img", { class: "qr", alt: `QR code of ${phone.url}`, src: `data:image/svg+xml;base64,${btoa(unescape(encodeURIComponent(phone.svg)))}` }),
    el("p", { class: "note" }, el("a", { href: phone.url }, "Open on a phone")));
  byId("join").replaceChildren(el("div", { class: "join" }, words, scan));
}

const typed = (...commands) => el("pre", { tabindex: "0" }, commands.map((command) => `$ ${command}`).join("\n"));

// What to type when the coordinator has ended: its downloads and its broker's answers have ended with it. FOLDER stands for its folder.
export function showEnded() {
  if (!state.facts.bundle) {
    byId("export").replaceChildren(el("p", { class: "empty" }, "The coordinator has ended before it wrote a bundle. Start it again; it goes on where it was."));
    byId("join").replaceChildren(el("p", { class: "empty" }, "The coordinator has ended and answers no device. Start it again."));
    return;
  }
  byId("export").replaceChildren(
    el("p", {}, "The coordinator has ended, so nothing can be downloaded here. The bundle lies in the folder bundle of the coordinator's folder (folder in its configuration, here FOLDER):"),
    typed("fedcenters-export verify FOLDER/bundle", "fedcenters-export serve FOLDER/bundle --host 0.0.0.0 --port 8081 --name HOST"));
  byId("join").replaceChildren(
    el("p", {}, "The coordinator has ended and answers no device. Serve the bundle with the command under Export; a new device with samples in the folder data then asks that server (HOST). signing.pub is the coordinator's, of its signing-folder or its folder:"),
    typed("fedcenters-edge nearest --federation http://HOST:8081 --signing-key signing.pub --data data"));
}

// The device in the page's address; undefined where that names none.
export function shownDevice() {
  try {
    return decodeURIComponent(/^#device\/(.+)$/.exec(location.hash)[1]);
  } catch {
    return undefined;
  }
}

// -> the link back; null when another device is shown by now
export async function showDevice(id) {
  const node = byId("device");
  const about = await fetchJson(`api/device/${encodeURIComponent(id)}`);
  if (shownDevice() !== id) return null;
  const back = el("a", { href: "#" }, "← Overview");
  const parts = [back, el("div", { class: "device-head" }, el("h1", {}, about.id), el("span", { class: "pill" }, about.state), el("span", { class: "quiet" }, `${about.samples} training samples, ${about.engine || "engine unknown"}${about.fetched === null ? "" : `, fetched center ${about.fetched}`}`))];
  const cards = [], later = [];
  for (const [run, rounds] of Object.entries(about.runs)) {
    const at = rounds.at(-1)?.center ?? null;
    const map = about.maps[run], each = runNamed(run)?.updates == null ? "round" : "record"; // a record of updates
    const chart = el("div", { class: "plot chart low" });
    cards.push(el("section", { class: "card half", "aria-label": `Accuracy in ${run}` }, el("div", { class: "head" }, el("h2", {}, `${run}: accuracy on its held-out samples`)), chart));
    later.push(() => lines(chart, { series: [{ name: "accuracy", short: "", colour: centerColour(at ?? 0), values: rounds.map((r) => [r.round, r.accuracy]) }], unit: each, label: `Accuracy of ${about.id} in ${run}`, format: percent, axis: percentOnAxis, to: 1, empty: "Not tested yet." }));
    const strip = rounds.slice(-60).map((r) => el("span", { css: { background: centerColour(r.center), color: onCenter(r.center) }, title: `${each} ${r.round}` }, r.center === null ? "–" : String(r.center)));
    const farthest = Math.max(...(map?.distance ?? [0]), 1e-12);
    const bars = (map?.distance ?? []).flatMap((d, k) => [el("span", {}, el("span", { class: "key dot", css: { background: centerColour(k) } }), `center ${k}`),
      el("div", { class: "track" }, el("div", { css: { width: `${(100 * d) / farthest}%`, background: centerColour(k) } })), el("span", { class: "number", "data-value": d }, d.toFixed(4))]);
    cards.push(el("section", { class: "card half", "aria-label": `Centers in ${run}` }, el("div", { class: "head" }, el("h2", {}, `${run}: its center, ${each} by ${each}`)), el("div", { class: "strip" }, ...strip),
      el("div", { class: "head", css: { "margin-top": "16px" } }, el("h2", {}, "Distance to every center"), el("span", { class: "quiet" }, map ? `${each} ${map.round}` : "")),
      bars.length ? el("div", { class: "bars" }, ...bars) : el("p", { class: "quiet" }, `It sent no model in the newest ${each} that has a map.`)));
  }
  if (about.refused.length) cards.push(el("section", { class: "card full" }, el("div", { class: "head" }, el("h2", {}, "Answers that did not count")),
    el("ul", { class: "events" }, ...about.refused.toReversed().map((r) => el("li", {}, `${r.run} ${runNamed(r.run)?.updates == null ? "round" : "record"} ${r.round}: ${r.reason}`)))));
  node.replaceChildren(...parts, el("div", { class: "grid" }, ...cards));
  later.forEach((draw) => draw());
  return back;
}
