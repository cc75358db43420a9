// The page's words about a center, on a page of plain objects.

import assert from "node:assert/strict";
import { test } from "node:test";

import { View } from "../../edge_client/web/view.js";

function plainPage() {
  const parts = {};
  const make = () => ({ classList: { toggle() {} }, append() {}, replaceChildren() {}, setAttribute() {} });
  return { parts, querySelectorAll: () => [], createElement: make, getElementById: (id) => (parts[id] ??= make()) };
}

const HOME = { center: 1, losses: [2.0, 0.5], accuracy: 0.75, n: 4, heldOut: true, classify: null };

test("a fit that is not known is told with the reason, and a known one without", () => {
  const page = plainPage();
  const view = new View(page);
  view.showCenter(HOME);
  assert.match(page.parts.center.textContent, /not known: this run taught nothing to tell it by \(a coordinator with teach-newcomers/);
  view.showCenter({ ...HOME, fit: "well" });
  assert.equal(page.parts.center.textContent, "Center 1 is nearest. It fits well. It is right for 3 of 4 held-out samples.");
  view.showCenter({ ...HOME, fit: "well", heldOut: false }); // so few samples that none is held out
  assert.match(page.parts.center.textContent, /right for 3 of 4 samples\.$/);
});

test("no bar is full where no center fits, and what to look at is told", () => {
  const page = plainPage();
  const view = new View(page);
  const shares = [];
  view.makeBar = (_, share) => shares.push(share);
  view.showCenter({ ...HOME, center: null, fit: "none" });
  assert.deepEqual(shares, [0, 0]);
  assert.match(page.parts.center.textContent, /^No center fits your samples\. Look at their labels and their scale/);
  view.showCenter(HOME);
  assert.equal(shares.at(-1), 1);
});

test("what was sent last is told of a page that is opened again, statistics without a round", () => {
  const page = plainPage();
  const view = new View(page);
  const told = (what) => {
    view.showRounds({ result: { what, status: "ok", key: { round: 9 } }, done: 8, sent: 0 });
    return page.parts.doing.textContent;
  };
  assert.equal(told("stats"), "Last time: what was measured on your samples was sent.");
  assert.equal(told("delta"), "Last time: round 9, the change of the model was sent.");
});

test("the answer to what was sent is told in words: taken, too late, or not used and why", () => {
  const page = plainPage();
  const view = new View(page);
  const told = (status) => {
    view.tell({ what: "answered", status, sent: 9 });
    return page.parts.doing.textContent;
  };
  assert.equal(told("dup"), "Sent, and taken. Waiting for what comes next.");
  assert.equal(told("late"), "The round was over before this phone's part was there. Waiting for what comes next.");
  assert.equal(told("rejected"), "Sent, and not used: the coordinator answered “rejected”. Waiting for what comes next.");
});

for (const gone of [{ what: "lost" }, { what: "coordinator", online: false }]) {
  test(`what is under way to the coordinator is told to be kept, and other work goes on being told, after ${JSON.stringify(gone)}`, () => {
    const page = plainPage();
    const view = new View(page);
    view.tell({ what: "delivering", size: 9, done: 0.5 });
    view.tell(gone);
    assert.deepEqual([page.parts.doing.textContent, page.parts.progress.hidden], ["This phone's part is kept here, and sent when the coordinator answers again.", true]);
    view.tell({ what: "training", step: 1, steps: 4, round: 2 });
    view.tell(gone);
    assert.equal(page.parts.doing.textContent, "Round 2: training, step 2 of 4");
  });
}

test("a bar is shown only for work with a known share", () => {
  const page = plainPage();
  const view = new View(page);
  view.tell({ what: "fetching", kind: "model", size: 10, done: 0.5 });
  assert.deepEqual([page.parts.progress.hidden, page.parts.progress.value], [false, 0.5]);
  view.tell({ what: "coordinator", online: true, state: { doing: "serve" } });
  assert.equal(page.parts.progress.hidden, true);
});

test("a table's columns are told by array where a sample is several", () => {
  const page = plainPage();
  const view = new View(page);
  page.getElementById("labels").querySelector = () => null;
  view.drawable = () => false;
  const several = { input: [9], target: [3], loss: "cross-entropy", parts: [["age", "float", [], 0], ["seen", "bool", [2], 2], ["words", "int", [2, 3], 11]] };
  view.showEntry(several);
  assert.equal(page.parts.columns.textContent, "9 values (1 of age; 2 of seen: 0 or 1, not divided; 6 of words: whole numbers, not divided) and a label from 0 to 2");
  view.showEntry({ ...several, parts: undefined });
  assert.equal(page.parts.columns.textContent, "9 values and a label from 0 to 2");
});

test("a classifier may have more classes than a call takes arguments", () => {
  const page = plainPage();
  const view = new View(page);
  let choices = 0;
  page.getElementById("labels").append = (...nodes) => { choices += nodes.length; };
  page.getElementById("labels").querySelector = () => null;
  view.drawable = () => false;
  view.showEntry({ input: [4], target: [200_000], loss: "cross-entropy" });
  assert.equal(choices, 200_000);
});

test("labels are told by the names of their classes, as text: the choices, the table's columns, the center's answer", () => {
  const page = plainPage();
  const view = new View(page);
  const made = [];
  page.createElement = (name) => (made.push({ name, classList: { toggle() {} }, append() {}, setAttribute() {} }), made.at(-1));
  const texts = (name) => made.filter((each) => each.name === name && each.textContent !== undefined).map(({ textContent }) => textContent);
  page.getElementById("labels").querySelector = () => null;
  view.drawable = () => false;
  view.showEntry({ input: [4], target: [3], loss: "cross-entropy", classes: ["walking", "<b>up</b>"] });
  assert.deepEqual(texts("span"), ["walking", "<b>up</b>", "2"]);
  assert.equal(page.parts.columns.textContent, "4 values and a label from 0 to 2, or a name: 0 is walking, 1 is <b>up</b>");
  made.length = 0;
  view.showCenter({ ...HOME, names: ["", "running"] });
  made.length = 0;
  view.showGuess([{ label: 1, share: 0.75 }, { label: 0, share: 0.25 }]);
  assert.equal(page.parts.guess.textContent, "It looks like “running”.");
  assert.deepEqual(texts("span"), ["running", "75 %", "0", "25 %"]);
  view.showGuess([{ label: 0, share: 1 }]);
  assert.equal(page.parts.guess.textContent, "It looks like a 0.");
});

test("once the newest centers were tried nothing asks to find one, until there are newer ones", () => {
  const page = plainPage();
  const view = new View(page);
  const says = () => page.parts.doing.textContent;
  view.tell({ what: "coordinator", online: true, state: { doing: "serve" } });
  view.tell({ what: "catalog", sha256: "new" });
  assert.equal(says(), "Training is over. Find the center that fits your samples.");
  view.showCenter({ ...HOME, catalog: "new" });
  assert.equal(says(), "Training is over.");
  view.tell({ what: "coordinator", online: true, state: { doing: "serve" } });
  assert.equal(says(), "Training is over.");
  view.tell({ what: "catalog", sha256: "newer" });
  assert.equal(says(), "Training is over. Find the center that fits your samples.");
});

test("rounds, loss and bytes of before are shown again", () => {
  const page = plainPage();
  new View(page).showRounds({ result: null, done: 5, loss: 0.0123, sent: 35_300 });
  assert.deepEqual(["rounds", "loss", "sent"].map((id) => page.parts[id].textContent), [5, "0.012", "35.3 kB"]);
});

test("a page that has ended says why, whatever is pressed, and promises nothing", () => {
  const page = plainPage();
  const view = new View(page);
  view.showOffline("Your samples are safe. Retrying…");
  view.tell({ what: "delivering", size: 9, done: 0.5 });
  view.end("another tab has this phone");
  view.showError("pressed in vain");
  view.tell({ what: "refused", code: "internal", detail: "" }); // what was under way fails a moment later
  view.showError("");
  view.showRole({ participates: true, paused: true });
  assert.equal(page.parts.trouble.textContent, "another tab has this phone");
  assert.deepEqual([page.parts.offline.hidden, page.parts.waiting.hidden, page.parts.pause.disabled], [true, true, true]);
  assert.deepEqual([page.parts.link.textContent, page.parts.where.textContent, page.parts.why.textContent], ["stopped", "", ""]);
  assert.deepEqual([page.parts.doing.textContent, page.parts.progress.hidden], ["Nothing is trained in this page.", true]);
});

test("a broker that lets the phone in again takes its own warning back, and no other one", () => {
  const page = plainPage();
  const view = new View(page);
  view.tell({ what: "lost", refused: true });
  assert.match(page.parts.trouble.textContent, /does not let this phone in/);
  view.tell({ what: "connected" });
  assert.equal(page.parts.trouble.hidden, true);
  view.showError("draw something first");
  view.tell({ what: "connected" });
  assert.equal(page.parts.trouble.textContent, "draw something first");
});

test("a phone whose link is open elsewhere, too, says so until a connection stands, or is lost in another way", () => {
  const page = plainPage();
  const view = new View(page);
  view.tell({ what: "lost", namesake: true });
  view.tell({ what: "connected" });
  assert.match(page.parts.trouble.textContent, /same link open in another browser/);
  view.tell({ what: "lost", namesake: false });
  assert.equal(page.parts.trouble.hidden, true);
  view.tell({ what: "lost", namesake: true });
  view.tell({ what: "steady" });
  assert.equal(page.parts.trouble.hidden, true);
});

test("a key that the page does not know is told with what to do, until a record of a known one comes", () => {
  const page = plainPage();
  const view = new View(page);
  view.tell({ what: "unknown-key" });
  assert.match(page.parts.offline.textContent, /not signed by a key that this page trusts\. Load this page again/);
  view.tell({ what: "coordinator", online: true });
  assert.equal(page.parts.offline.hidden, true);
  view.tell({ what: "refused", code: "bad_signature", detail: "model 12 was not signed by its key" });
  assert.match(page.parts.doing.textContent, /by its key\. Load this page again/);
});

test("a center of an earlier training is told to be one, with what to do, until it was looked for again", () => {
  const page = plainPage();
  const view = new View(page);
  view.showCenter({ ...HOME, catalog: "old" });
  assert.equal(page.parts.earlier.hidden, true); // not connected: there is nothing to compare it with
  view.tell({ what: "coordinator", online: true, state: { doing: "serve" } });
  assert.equal(page.parts.earlier.hidden, true); // what it offers comes in a moment
  view.tell({ what: "catalog", sha256: "old" });
  assert.equal(page.parts.earlier.hidden, true);
  view.tell({ what: "catalog", sha256: "new" });
  assert.equal(page.parts.earlier.textContent, "This is from an earlier training. Press “Find my center” to find yours among the newest.");
  assert.equal(page.parts.earlier.hidden, false);
  view.showCenter({ ...HOME, catalog: "new" });
  assert.equal(page.parts.earlier.hidden, true);
});

test("a center that is older than a training that goes on is told to be so", () => {
  const page = plainPage();
  const view = new View(page);
  view.showCenter({ ...HOME, catalog: "old" });
  view.tell({ what: "coordinator", online: true, state: { doing: "train", round: 1, of: 5 } });
  assert.equal(page.parts.earlier.textContent, "This is from an earlier training. The training that goes on has no centers yet.");
});

test("only a center that classifies what can be drawn may be tried by drawing", () => {
  const page = plainPage();
  const view = new View(page);
  view.drawable = (input) => input.length === 3;
  const shown = (home) => {
    view.showCenter({ ...HOME, classify: () => {}, ...home });
    return !page.parts.trying.hidden;
  };
  assert.equal(shown({ input: [1, 8, 8] }), true);
  assert.equal(shown({ input: [9] }), false); // a row of a table
  assert.equal(shown({ input: [1, 8, 8], accuracy: undefined }), false); // numbers, and no classes
  assert.equal(shown({ input: [1, 8, 8], classify: null }), false); // its file cannot be opened
});

test("a screen reader hears that a work begins and ends, and not each of its steps", () => {
  const page = plainPage();
  const view = new View(page);
  const live = [];
  page.getElementById("doing").setAttribute = (_, how) => live.push(how);
  for (const step of [0, 1, 2]) view.tell({ what: "training", step, steps: 3, round: 1 });
  view.tell({ what: "answered", status: "ok", sent: 1 });
  assert.deepEqual(live, ["polite", "off", "off", "polite"]);
});

test("a center without a loss has an empty bar, and the others theirs: a meter takes no NaN", () => {
  const page = plainPage();
  const make = page.createElement;
  const shares = [];
  page.createElement = (name) => Object.defineProperty(make(), "value", { set: (share) => name === "meter" && shares.push(share) });
  new View(page).showCenter({ ...HOME, losses: [NaN, 0.5, 2] });
  assert.deepEqual(shares.slice(0, 2), [0, 1]);
  assert.ok(shares[2] > 0 && shares[2] < 1);
});

test("no center can be looked for while the coordinator offers none: after it took them back, and on a new connection", () => {
  const page = plainPage();
  const view = new View(page);
  view.samples = 1;
  const can = (...events) => {
    for (const event of events) view.tell(event);
    return !page.parts.nearest.disabled;
  };
  const [connected, offered] = [{ what: "connected" }, { what: "catalog", sha256: "new" }];
  assert.equal(can(connected, { what: "coordinator", online: true, state: { doing: "serve" } }), false);
  assert.equal(can(offered), true);
  assert.equal(can({ what: "catalog", sha256: null }), false);
  assert.equal(can(offered), true);
  assert.equal(can({ what: "lost" }, connected), false);
  view.showCenter({ ...HOME, catalog: "new" });
  assert.equal(can({ what: "coordinator", online: true, state: { doing: "train", round: 3, of: 9 } }), false);
  assert.match(page.parts.earlier.textContent, /The training that goes on has no centers yet/);
});

test("one search for a center goes on at a time, and the button says that it does", () => {
  const page = plainPage();
  const view = new View(page);
  view.samples = 1;
  for (const event of [{ what: "connected" }, { what: "catalog", sha256: "new" }]) view.tell(event);
  const button = () => [page.parts.nearest.disabled, page.parts.nearest.textContent];
  view.showSearching(true);
  assert.deepEqual(button(), [true, "Trying every center…"]);
  view.showSearching(false);
  assert.deepEqual(button(), [false, "Find my center"]);
});

test("the losses of a training that diverged fit into their place", () => {
  const page = plainPage();
  const view = new View(page);
  const bars = [];
  view.makeBar = (_name, _share, value) => bars.push(value);
  view.showCenter({ ...HOME, losses: [1.5e12, 0.5, NaN] });
  assert.deepEqual(bars, ["1.5e+12", "0.50", "NaN"]);
  view.tell({ what: "training", step: 0, steps: 2, round: 1, loss: 123456789 });
  assert.equal(page.parts.loss.textContent, "1.2e+8");
});
