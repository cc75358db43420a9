// The device's own samples: in this browser's storage, and nowhere else. A sample is {x: Float32Array [input], label} or
// {x, target: Float32Array}. Every fifth one is held out: it tests and is never trained on. Numbers in, numbers out; pictures
// and files become samples in images.js.

import { sizeOf } from "../protocol/tensors.js";
import { POSTERIOR } from "../runtime/state.js";

const PREFIX = "sample/";
const HELD_OUT = 5;
const ALIKE = 4; // times: samples of one model whose largest values are further apart are told of
const TOLD_NAMES = 12; // of classes, in a sentence
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/;
const WHOLE_MAX = 2 ** 24; // whole numbers up to here are exact in float32
const NOTHING = /^(n\/?a|nan|null|none|\?|-)$/i; // a missing value: a first line with one names no columns
const DECIMAL_COMMA = /^[+-]?\d*,\d+$/;
export const MAX_SAMPLES = 20_000;

/** The samples in one store; `changed` is called after each change. */
export class Samples {
  constructor(store, changed = () => {}) {
    this.store = store;
    this.changed = changed;
    this.writing = Promise.resolve(); // the last change: a new sample's name follows from the names before it
  }

  /** Run a change of the store after all changes that were asked for before it; `stored` is called once it is there. */
  async inTurn(change, stored = () => {}) {
    const done = this.writing.then(change);
    this.writing = done.catch(() => {}); // the caller has the error
    await done;
    stored();
    await this.changed();
  }

  async count() {
    return (await this.store.names(PREFIX)).length;
  }

  /** Add samples; RangeError for too many, or for one that is not finite. `stored` is called when they are on the disk. */
  async add(samples, stored) {
    if (samples.some(({ x, target }) => !x.every(Number.isFinite) || (target && !target.every(Number.isFinite)))) {
      throw new RangeError("a value is beyond what a model computes with (3.4e38): nothing was added. Look at the values and at what they are divided by");
    }
    await this.inTurn(async () => {
      const names = await this.store.names(PREFIX);
      if (names.length && samples.length && formOf(await this.store.get(names.at(-1))) !== formOf(samples[0])) {
        throw new RangeError("the samples that are here are of another model; remove them all, then add these");
      }
      if (names.length + samples.length > MAX_SAMPLES) throw new RangeError(`at most ${MAX_SAMPLES} samples are kept, and ${names.length} are here: nothing was added. Remove some, or add fewer`);
      const first = names.length ? Number(names.at(-1).slice(PREFIX.length)) + 1 : 0;
      const named = samples.map((sample, i) => [PREFIX + String(first + i).padStart(9, "0"), sample]);
      await this.store.write(Object.fromEntries(named));
    }, stored);
  }

  /** Forget the last sample, the `last` ones, or all of them, and how a probe weighs them; `stored` is called when they are gone. */
  async remove({ all = false, last = 1 } = {}, stored) {
    await this.inTurn(async () => {
      const names = await this.store.names(PREFIX);
      await this.store.write({}, [...(all ? names : names.slice(-last)), POSTERIOR]);
    }, stored);
  }

  /** Take over all samples of another store. They are in both for a moment, and in none at no time. */
  async takeFrom(other) {
    await this.add(await other.store.values(PREFIX));
    await other.remove({ all: true });
  }

  /** The largest value of any sample, without its sign; 0 for no samples. */
  async largest() {
    return largestOf(await this.store.values(PREFIX));
  }

  /** {label: how many}, and the last few samples. */
  async overview() {
    const samples = await this.store.values(PREFIX);
    const labels = new Map();
    for (const { label } of samples) if (label !== undefined) labels.set(label, (labels.get(label) ?? 0) + 1);
    return { n: samples.length, labels, last: samples.slice(-12).reverse() };
  }

  /** How many samples train, by their names alone: each connection asks. */
  async trains() {
    const n = await this.count();
    return n - Math.floor(n / HELD_OUT);
  }

  /** {train, test}, as learner.js reads them. */
  async local() {
    const samples = await this.store.values(PREFIX);
    const held = (i) => i % HELD_OUT === HELD_OUT - 1;
    return { train: concatenate(samples.filter((_, i) => !held(i))), test: concatenate(samples.filter((_, i) => held(i))) };
  }
}

/** The largest value of these samples, without its sign. */
export function largestOf(samples) {
  return samples.reduce((most, { x }) => x.reduce((found, value) => Math.max(found, Math.abs(value)), most), 0);
}

/**
 * What to tell of new samples, divided by `scale`, whose largest value is `added`, where those of the others go up to `others`
 * and the two are not alike; else "". `whose` says who the others are.
 */
export function rangeWarning({ added, others, scale, whose }) {
  if (!(added > 0 && others > 0) || Math.max(added / others, others / added) <= ALIKE) return "";
  const short = (value) => String(Number(value.toPrecision(3)));
  return `These values go up to ${short(added)}, those of ${whose} up to ${short(others)}. A model needs both alike: if they mean the same, ` +
    `remove these and load the file again with “Divide values by” ${short((scale * added) / others)}.`;
}

/** What people call class `k`: its name, or its number where it has none. */
export const nameOfClass = (names, k) => names?.[k]?.trim() || String(k);

/** Which labels a table may have, for people. */
export function labelsInWords({ target, classes = [] }) {
  const isolated = (name) => (RIGHT_TO_LEFT.test(name) ? `\u2068${name}\u2069` : name); // else the next number stands before it
  const named = classes.flatMap((name, k) => (name.trim() ? [`${k} is ${isolated(name)}`] : []));
  const told = named.slice(0, TOLD_NAMES).join(", ") + (named.length > TOLD_NAMES ? ", …" : "");
  return `0 to ${target.at(-1) - 1}${labelsByName(classes).size ? ", or a name" : ""}${told && `: ${told}`}`;
}

/** name -> class, of the names that are no numbers and that one class has alone. */
function labelsByName(classes) {
  const found = new Map();
  const trimmed = classes.map((name) => name.trim());
  trimmed.forEach((name, k) => {
    if (Number.isNaN(Number(name)) && trimmed.indexOf(name) === trimmed.lastIndexOf(name)) found.set(name, k);
  });
  return found;
}

/** Samples of one model have one form. */
const formOf = ({ x, target }) => `${x.length} ${target?.length}`;

/** What stands between the cells of a line of so many; a decimal comma is no separator where semicolons or tabs are. */
function separatorOf(line, columns) {
  return ["\t", ";", ","].find((each) => line.split(each).length === columns) ?? ["\t", ";"].find((each) => line.includes(each)) ?? ",";
}

function concatenate(samples) {
  const flat = (rows) => {
    const out = new Float32Array(rows.reduce((sum, row) => sum + row.length, 0));
    let at = 0;
    for (const row of rows) {
      out.set(row, at);
      at += row.length;
    }
    return out;
  };
  const x = flat(samples.map((sample) => sample.x));
  if (samples.some(({ target }) => target)) return { n: samples.length, x, targets: flat(samples.map(({ target }) => target)) };
  return { n: samples.length, x, labels: Int32Array.from(samples, ({ label }) => label) };
}

/**
 * The text of a CSV file -> samples. One sample a line; commas, semicolons or tabs between the cells, the same in the whole
 * file. A first line of words names the columns, one of them `label`; without it the label is the last column. A label is a
 * class's number, or its name in `classes`. Values are divided by `scale`, but not those of an array of whole numbers (`parts`,
 * where a sample is several arrays in one row). RangeError names the line.
 */
export function readCsv(text, { input, target, loss, parts = [], classes = [] }, scale = 1) {
  if (text.includes("\0")) throw new RangeError("the file is no UTF-8 text: save it as CSV in UTF-8");
  const lines = text.split(/\r\n?|\n/).map((line, i) => [line, i + 1]).filter(([line]) => line.trim());
  if (!lines.length) throw new RangeError("the file is empty");
  if (!(scale > 0)) throw new RangeError("“Divide values by” takes a number above 0, with a decimal point, as 2.5");
  const width = sizeOf(input);
  const outputs = loss === "squared-error" ? sizeOf(target) : 1;
  const separator = separatorOf((lines[1] ?? lines[0])[0], width + outputs);
  const cells = (line) => line.split(separator).map((cell) => cell.trim().replace(/^"(.*)"$/, "$1").trim());
  const head = cells(lines[0][0]);
  const byName = loss === "squared-error" ? new Map() : labelsByName(classes);
  const isLabel = (cell, at) => at === width && byName.has(cell); // of a line without a head
  const named = head.some((cell, at) => cell !== "" && Number.isNaN(Number(cell)) && !NOTHING.test(cell) && !DECIMAL_COMMA.test(cell) && !isLabel(cell, at));
  const columns = parts.flatMap(([name, kind, shape]) => new Array(sizeOf(shape)).fill({ name, kind }));
  const labelled = named ? head.findIndex((cell) => cell.toLowerCase() === "label") : -1;
  const place = labelled < 0 ? width : labelled;
  if (named && lines.length === 1) throw new RangeError("the file has a line of names and no samples");
  return lines.slice(named ? 1 : 0).map(([line, number]) => {
    const values = cells(line).map((cell, at) => (at === place && byName.has(cell) ? byName.get(cell) : cell === "" ? Number.NaN : Number(cell)));
    if (values.length !== width + outputs) {
      throw new RangeError(`line ${number} has ${values.length} columns; the model reads ${width} values and ${outputs} to predict`);
    }
    const wrong = values.findIndex((value) => !Number.isFinite(Math.fround(value)));
    if (wrong >= 0) {
      const cell = cells(line)[wrong];
      const tip = DECIMAL_COMMA.test(cell) ? "; numbers have decimal points" : Number.isFinite(values[wrong]) ? "; float32 ends at 3.4e38" : "";
      const where = `“${cell.slice(0, 40)}” in column ${wrong + 1}${tip}`;
      if (wrong !== place || loss === "squared-error") throw new RangeError(`line ${number} holds something that is no number: ${where}`);
      const what = byName.size ? "no label" : "no number";
      throw new RangeError(`line ${number} holds something that is ${what}: ${where}, the label; labels are ${labelsInWords({ target, classes })}`);
    }
    const row = [...values.slice(0, place), ...values.slice(place + outputs)];
    const x = Float32Array.from(row, (value, at) => {
      const { name, kind = "float" } = columns[at] ?? {};
      if (kind === "float") return value / scale;
      const right = Number.isInteger(value) && (kind === "bool" ? value === 0 || value === 1 : Math.abs(value) <= WHOLE_MAX);
      if (right) return value;
      throw new RangeError(`line ${number} has ${value} in ${name}, which takes ${kind === "bool" ? "0 or 1" : "whole numbers"}`);
    });
    if (loss === "squared-error") return { x, target: Float32Array.from(values.slice(place, place + outputs)) };
    const label = values[place];
    if (!Number.isInteger(label) || label < 0 || label >= target.at(-1)) {
      throw new RangeError(`line ${number} has the label ${label}; labels are ${labelsInWords({ target, classes })}`);
    }
    return { x, label };
  });
}

/**
 * Ink drawn on a square, 0 to 1 [side * side] -> a picture of the model's height and width, or null for a blank. What was
 * drawn is cut out, centered and made as large as the picture less a margin, then each point is the share of ink around it.
 * For 8 x 8 that is how scikit-learn's digits were made: bits on a raster of 32 x 32, counted in squares of 4 x 4.
 */
export function fromInk(ink, side, [height, width]) {
  const box = boxOf(ink, side);
  if (box === null) return null;
  const margin = height >= 16 ? Math.round(height / 7) : 0;
  const scale = Math.max(1e-9, Math.max((box.right - box.left) / (width - 2 * margin), (box.bottom - box.top) / (height - 2 * margin)));
  const [middleX, middleY] = [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
  const found = new Float32Array(height * width);
  const fine = 4;
  for (let y = 0; y < height * fine; y += 1) {
    for (let x = 0; x < width * fine; x += 1) {
      const fromX = Math.floor(middleX + ((x + 0.5) / fine - width / 2) * scale);
      const fromY = Math.floor(middleY + ((y + 0.5) / fine - height / 2) * scale);
      const inside = fromX >= 0 && fromX < side && fromY >= 0 && fromY < side;
      if (inside && ink[fromY * side + fromX] >= 0.5) found[Math.floor(y / fine) * width + Math.floor(x / fine)] += 1 / fine ** 2;
    }
  }
  return found;
}

function boxOf(ink, side) {
  const box = { left: side, right: 0, top: side, bottom: 0 };
  for (let y = 0; y < side; y += 1) {
    for (let x = 0; x < side; x += 1) {
      if (ink[y * side + x] < 0.5) continue;
      box.left = Math.min(box.left, x);
      box.right = Math.max(box.right, x + 1);
      box.top = Math.min(box.top, y);
      box.bottom = Math.max(box.bottom, y + 1);
    }
  }
  return box.right > box.left ? box : null;
}

/** RGBA bytes [height * width * 4] -> [channels * height * width], 0 to 1; one channel is brightness (ITU-R BT.601). */
export function fromPixels(rgba, [channels, height, width], { invert = false } = {}) {
  const size = height * width;
  const found = new Float32Array(channels * size);
  for (let i = 0; i < size; i += 1) {
    const [r, g, b] = [rgba[4 * i] / 255, rgba[4 * i + 1] / 255, rgba[4 * i + 2] / 255];
    const values = channels === 3 ? [r, g, b] : [0.299 * r + 0.587 * g + 0.114 * b];
    values.forEach((value, c) => {
      found[c * size + i] = invert ? 1 - value : value;
    });
  }
  return found;
}
