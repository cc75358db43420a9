// The view: shows the client's events and the samples in the page's elements.

import { isShortcut, thumbnail } from "./data/images.js";
import { labelsInWords, nameOfClass } from "./data/samples.js";
import { sizeOf } from "./protocol/tensors.js";

const ENOUGH = 25; // samples: every fifth is held out, and 20 are about as good at finding the center as 100 (RESULTS.md)
const AFTER_TRAINING = ["export", "serve"];
export const OFFLINE = "Cannot reach the coordinator. Your samples are safe on this phone, and you can add more. Retrying…";
const FIND = "Training is over. Find the center that fits your samples.";
const FOUND = "Training is over."; // and the newest centers were tried
const FULL = "This phone has no room left for this page: it takes no more samples and cannot train. What is here is safe. Free some room: it then goes on by itself.";
const NAMESAKE = "the connection ends again and again: the network may be weak, or the same link open in another browser or on another phone. Of these close one, or ask for a link of its own";
const TURNED_AWAY = "the broker does not let this phone in; ask for a new link";
const OTHER_KEY = "Load this page again: its keys may be older than the coordinator's. If this stays, ask the operator.";
const SENT = { delta: "the change of the model", stats: "what was measured on your samples", masked: "a part of a masked sum" };
const SENDING = "Sending";
const UNSENT = "This phone's part is kept here, and sent when the coordinator answers again.";
const TAKEN = "Sent, and taken.";
const REFUSED = { // where the words for the coordinator's log tell a phone's owner nothing
  unreachable: "the network broke off, or is too slow.",
  internal: "this page failed. If this stays, load it again.",
};
const ANSWERED = { ok: TAKEN, dup: TAKEN, late: "The round was over before this phone's part was there." };

/** What a device that has no task waits for, from the coordinator's `state`. */
function waitingFor({ doing, here, needed, round, of, newcomers }) {
  const joins = { "next-round": " A new device takes part from the next round.", "next-run": " A new device takes part from the next run." };
  return {
    compile: "The coordinator prepares the training.",
    gather: `Waiting: ${here} of ${needed} devices.`,
    train: `The federation is in round ${round} of ${of}.${joins[newcomers] ?? ""}`,
    export: "Training is over. The coordinator prepares the centers.",
    serve: FIND,
  }[doing];
}

/** The page's parts by their ids. `guard` runs an action and shows what went wrong; `drawable` says which inputs are pictures. */
export class View {
  constructor(page) {
    this.page = page;
    this.done = 0;
    this.samples = 0;
    this.linked = false;
    this.newest = null; // the hash of the catalog of centers that the coordinator offers; null for none yet
    this.home = null; // what the last visit found
    this.names = []; // of the classes that samples have, as people call them
    this.searching = false;
    this.named = false; // whether the federation is known
    this.ended = ""; // why the page takes no further part
    this.over = null; // whether training is, as the coordinator said last; null before it said
    this.role = { participates: false, paused: true };
    this.guard = (action) => action();
    this.drawable = () => true;
    for (const tab of page.querySelectorAll("[data-tab]")) {
      tab.addEventListener("click", () => this.showTab(tab.dataset.tab));
      tab.addEventListener("keydown", (event) => this.moveTab(tab, event));
    }
  }

  part(id) {
    return this.page.getElementById(id);
  }

  on(id, action) {
    this.part(id).addEventListener("click", () => this.guard(action));
  }

  onFiles(id, action) {
    const input = this.part(id);
    input.addEventListener("change", () => {
      const files = [...input.files];
      input.value = "";
      if (files.length) this.guard(() => action(files));
    });
  }

  showError(text) {
    const words = text || this.ended;
    this.part("trouble").textContent = words;
    this.part("trouble").hidden = !words;
  }

  /** What was wrong is no longer; what else is wrong stays. */
  clearError(text) {
    if (this.part("trouble").textContent === text) this.showError("");
  }

  /** The page takes no further part: the reason stays, and nothing says that more is to come. */
  end(why) {
    this.showProgress("Nothing is trained in this page.");
    this.ended = why;
    this.showError(why);
    this.showOffline("");
    this.part("waiting").hidden = true;
    if (!this.named) this.part("where").textContent = "";
    this.showLink("stopped", false);
  }

  /** Whether there is no room to train; what else is wrong stays. */
  showFull(full) {
    if (full) this.showError(FULL);
    else this.clearError(FULL);
  }

  showIdentity(federation, id) {
    this.named = true;
    this.part("where").textContent = `federation ${federation}`;
    this.part("waiting").textContent = "Waiting for the coordinator, which prepares the model…";
    this.part("name").textContent = id;
  }

  /** What happens in the client. */
  tell(event) {
    const say = {
      connected: () => {
        this.showLink("connected", true);
        this.showOffline("");
        this.clearError(TURNED_AWAY);
      },
      steady: () => this.clearError(NAMESAKE),
      lost: () => {
        this.newest = null; // what there is comes again with the next connection
        this.showLink("offline", false);
        this.showOffline(event.refused ? "" : OFFLINE);
        this.showUnsent();
        if (event.refused) this.showError(TURNED_AWAY);
        if (event.namesake) this.showError(NAMESAKE);
        else this.clearError(NAMESAKE);
      },
      coordinator: () => {
        this.showLink(event.online ? "connected" : "coordinator away", event.online);
        this.showOffline(event.online ? "" : "The coordinator is away. Your samples are safe on this phone. Training goes on when it is back.");
        if (event.online && event.state) this.showProgress(waitingFor(event.state));
        if (!event.online) this.showUnsent();
        if (event.online) this.over = AFTER_TRAINING.includes(event.state?.doing);
        this.showButtons();
        this.showAge();
      },
      "unknown-key": () => this.showOffline(`The coordinator's record is not signed by a key that this page trusts. ${OTHER_KEY}`),
      catalog: () => {
        this.newest = event.sha256;
        this.showButtons();
        this.showAge();
      },
      task: () => this.showProgress(
        { fit: `Round ${event.round}: getting ready`, sum: `Round ${event.round}: exchanging keys with other devices` }[event.job]
          ?? "Comparing models on your samples",
        0,
      ),
      fetching: () => this.showProgress(`Fetching ${event.kind}, ${bytes(event.size)}`, event.done),
      training: () => {
        this.showProgress(`Round ${event.round}: training, step ${event.step + 1} of ${event.steps}`, event.step / event.steps);
        if (event.loss !== undefined) this.part("loss").textContent = lossInWords(event.loss, 3);
      },
      done: () => {
        this.showFull(false);
        if (event.job === "fit") this.done += 1;
        if (event.loss !== undefined) this.part("loss").textContent = lossInWords(event.loss, 3);
        this.part("rounds").textContent = this.done;
      },
      delivering: () => this.showProgress(`${SENDING} ${bytes(event.size)}`, event.done),
      answered: () => {
        this.showFull(false);
        this.part("sent").textContent = bytes(event.sent);
        this.showProgress(`${ANSWERED[event.status] ?? `Sent, and not used: the coordinator answered “${event.status}”.`} Waiting for what comes next.`, 1);
      },
      full: () => {
        this.showFull(true);
        if (event.round !== undefined) this.showProgress(`Round ${event.round} goes on without this phone, which has no room left.`);
      },
      refused: () => {
        const paused = event.code === "unavailable";
        const hint = event.code === "bad_signature" ? `. ${OTHER_KEY}` : "";
        this.showProgress(paused ? "Paused: the federation goes on without this phone." : `Could not take part: ${REFUSED[event.code] ?? event.detail}${hint}`);
      },
    }[event.what];
    say?.();
  }

  /** What was done before the page was opened. */
  showRounds({ result, done, loss, sent }) {
    this.done = done;
    this.part("rounds").textContent = done;
    if (loss !== undefined) this.part("loss").textContent = lossInWords(loss, 3);
    this.part("sent").textContent = bytes(sent);
    if (!result) return;
    const how = result.status === null ? "waits to be sent" : "was sent";
    const when = result.what === "stats" ? "" : `round ${result.key.round}, `; // those after the last round are of a round more
    this.showProgress(`Last time: ${when}${SENT[result.what]} ${how}.`, 1);
  }

  /** The model that samples are for: {input, target, loss}, `parts` where a sample is several arrays in one row, `classes` where they have names. */
  showEntry({ input, target, loss, parts, classes: names = [] }) {
    this.names = names;
    this.part("waiting").hidden = true;
    this.part("entry").hidden = false;
    const classes = loss === "cross-entropy" ? target.at(-1) : 0;
    for (let k = 0; k < classes; k += 1) this.part("labels").append(this.makeChoice(k)); // too many for one call, maybe
    this.part("labels").hidden = !classes;
    this.part("labels").classList.toggle("named", names.length > 0);
    this.part("shape").textContent = input.slice(-2).join(" × ");
    this.part("columns").textContent = `${sizeOf(input)} values${namesOf(parts)} and ${classes ? `a label from ${labelsInWords({ target, classes: names })}` : `${sizeOf(target)} to predict`}`;
    const pictures = this.drawable(input) && classes > 0;
    for (const tab of this.page.querySelectorAll('[data-tab="draw"], [data-tab="photos"]')) tab.hidden = !pictures;
    this.showTab(pictures ? "draw" : "table");
  }

  makeChoice(k) {
    const [label, input, text] = ["label", "input", "span"].map((name) => this.page.createElement(name));
    Object.assign(input, { type: "radio", name: "label", value: k, checked: k === 0 });
    text.textContent = nameOfClass(this.names, k);
    label.append(input, text);
    return label;
  }

  /** The chosen class. */
  chosenLabel() {
    return Number(this.page.querySelector('input[name="label"]:checked').value);
  }

  showSamples({ n, labels, last }, model) {
    const kinds = labels.size ? ` in ${labels.size} class${labels.size > 1 ? "es" : ""}` : "";
    this.part("count").textContent = n ? `${n}${kinds}` : "none yet";
    this.part("undoing").hidden = !n;
    this.part("enough").textContent = n < ENOUGH ? `${n} sample${n === 1 ? "" : "s"}; about ${ENOUGH} are enough to find your center. Every fifth is kept to test it.`
      : "Enough to find your center. More samples make the training better.";
    this.samples = n;
    this.showButtons();
    this.part("strip").replaceChildren(...(model && this.drawable(model.input) ? last : []).map(({ x, label }) => {
      const [figure, caption] = ["figure", "figcaption"].map((name) => this.page.createElement(name));
      caption.textContent = label === undefined ? "" : nameOfClass(this.names, label);
      figure.append(thumbnail(x, model.input), caption);
      return figure;
    }));
  }

  /** A warning about the range of the last table's values, or "" for none. */
  showRange(words) {
    this.part("range-words").textContent = words;
    this.part("range").hidden = !words;
  }

  /** Arrow keys go from tab to tab, and round the end; the Tab key goes to the chosen one and then on. */
  moveTab(tab, event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || isShortcut(event)) return;
    event.preventDefault();
    const shown = [...this.page.querySelectorAll("[data-tab]")].filter(({ hidden }) => !hidden);
    const next = shown.at((shown.indexOf(tab) + step) % shown.length);
    this.showTab(next.dataset.tab);
    next.focus();
  }

  showTab(name) {
    for (const tab of this.page.querySelectorAll("[data-tab]")) {
      tab.setAttribute("aria-selected", String(tab.dataset.tab === name));
      tab.tabIndex = tab.dataset.tab === name ? 0 : -1;
    }
    for (const panel of this.page.querySelectorAll("[data-panel]")) panel.hidden = panel.dataset.panel !== name;
    this.part("labels").hidden = name === "table" || !this.part("labels").querySelector("input");
  }

  /** What is done now; without a share of it there is no bar. Its steps in between are not read out, only its begin and end. */
  showProgress(text, share = null) {
    if (this.ended) return; // what was under way ends, too
    this.part("doing").setAttribute("aria-live", share > 0 && share < 1 ? "off" : "polite");
    this.part("doing").textContent = text;
    this.part("progress").hidden = share === null;
    this.part("progress").value = share ?? 0;
  }

  showLink(text, on) {
    this.part("link").textContent = text;
    this.part("link").classList.toggle("on", on);
    this.linked = on;
    this.showButtons();
  }

  /** What was under way to the coordinator is not, for now. */
  showUnsent() {
    if (this.part("doing").textContent?.startsWith(SENDING)) this.showProgress(UNSENT);
  }

  showOffline(words) {
    this.part("offline").textContent = words;
    this.part("offline").hidden = !words;
  }

  /** The one button of the training. */
  showRole({ participates, paused }) {
    this.role = { participates, paused };
    this.showButtons();
    if (participates && paused) this.showProgress("Paused.", this.part("progress").hidden ? null : this.part("progress").value);
    else if (participates && this.part("progress").value === 0) this.showProgress("Waiting for the coordinator.");
  }

  /** Taking part and finding a center need samples and a connection; a phone that takes part may pause until training is over. */
  showButtons() {
    const { participates, paused } = this.role;
    const missing = this.ended || participates ? "" : !this.samples ? "Add samples first." : this.linked ? "" : "Waiting for a connection.";
    const button = this.part("pause");
    button.textContent = participates ? (paused ? "Go on" : "Pause") : "Take part";
    button.classList.toggle("main", paused);
    button.disabled = Boolean(this.ended || missing);
    button.hidden = participates && this.over; // there is nothing left to pause; one that takes part later waits for a next run
    const late = !this.ended && !participates && this.over ? "Training is over; taking part waits for a next run. Finding a center needs no part in it." : "";
    this.part("why").textContent = missing || late;
    this.part("nearest").disabled = this.searching || this.newest === null || !this.samples || !this.linked;
  }

  showAwake(on) {
    this.part("awake").textContent = on ? "The screen stays on meanwhile." : "";
  }

  showSearching(on) {
    this.searching = on;
    this.showButtons();
    this.part("nearest").textContent = on ? "Trying every center…" : "Find my center";
  }

  /** What a visit found: {center, losses, fit, accuracy, n, input, catalog, names}. */
  showCenter(home) {
    const { center, losses, accuracy, fit, n, heldOut, input, classify } = home;
    this.home = home;
    this.showAge();
    // The coordinator's answer says nothing of a fit where its run has learned no rule for it.
    const fits = fit ? `It fits ${fit}.` : "Whether it fits your samples is not known: this run taught nothing to tell it by (a coordinator with teach-newcomers and five devices or more does).";
    const right = accuracy === undefined ? "" : ` It is right for ${Math.round(accuracy * n)} of ${n} ${heldOut ? "held-out " : ""}samples.`;
    this.part("center").textContent =
      center === null ? "No center fits your samples. Look at their labels and their scale; else no device that trained has samples like these." : `Center ${center} is nearest. ${fits}${right}`;
    const share = (loss) => (center === null ? 0 : Math.exp(losses[center] - loss)); // how likely it makes a sample, beside the best center
    this.part("losses").replaceChildren(...losses.map((loss, k) => this.makeBar(`center ${k}`, share(loss), lossInWords(loss, 2), k === center)));
    this.part("losses-title").hidden = false;
    this.part("trying").hidden = !classify || accuracy === undefined || !this.drawable(input); // no classes, or nothing to draw
  }

  /** Whether the center that is shown is of an earlier training than the coordinator's centers, and whether theirs is still to be found. */
  showAge() {
    const now = this.newest === null ? "The training that goes on has no centers yet." : "Press “Find my center” to find yours among the newest.";
    const earlier = this.home !== null && this.home.catalog !== this.newest && (this.newest !== null || this.over === false);
    this.part("earlier").textContent = earlier ? `This is from an earlier training. ${now}` : "";
    this.part("earlier").hidden = !earlier;
    const found = this.home !== null && this.home.catalog === this.newest;
    if (this.newest !== null && this.part("doing").textContent === (found ? FIND : FOUND)) this.showProgress(found ? FOUND : FIND);
  }

  /** Probabilities of what was drawn, best first, or null. */
  showGuess(found) {
    const called = (label) => nameOfClass(this.home?.names, label);
    const likely = found && (called(found[0].label) === String(found[0].label) ? `a ${found[0].label}` : `“${called(found[0].label)}”`);
    this.part("guess").textContent = found === null ? "Draw something." : `It looks like ${likely}.`;
    const rows = (found ?? []).slice(0, 3).map(({ label, share }, i) => this.makeBar(called(label), share, `${(100 * share).toFixed(0)} %`, i === 0));
    this.part("shares").replaceChildren(...rows);
  }

  makeBar(name, share, value, best) {
    const [row, words, meter, number] = ["li", "span", "meter", "span"].map((each) => this.page.createElement(each));
    words.textContent = name;
    meter.value = share || 0; // a model may give NaN, and a meter takes none
    meter.setAttribute("aria-label", name);
    number.textContent = value;
    row.classList.toggle("best", best);
    row.append(words, meter, number);
    return row;
  }
}

const WHOLE = { int: ": whole numbers, not divided", bool: ": 0 or 1, not divided" };

/** Which values of a row belong to which array, for people. */
function namesOf(parts) {
  return parts ? ` (${parts.map(([name, kind, shape]) => `${sizeOf(shape)} of ${name}${WHOLE[kind] ?? ""}`).join("; ")})` : "";
}

/** A loss for people; that of a training that diverges may be of any size. */
const lossInWords = (loss, digits) => (Math.abs(loss) < 1e5 ? loss.toFixed(digits) : loss.toExponential(1));

/** A number of bytes for people. */
function bytes(n) {
  if (n < 1000) return `${n} B`;
  return n < 1e6 ? `${(n / 1000).toFixed(1)} kB` : `${(n / 1e6).toFixed(1)} MB`;
}
