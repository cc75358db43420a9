// Files and drawings as samples.

import assert from "node:assert/strict";
import { test } from "node:test";

import { fromInk, fromPixels, labelsInWords, largestOf, rangeWarning, readCsv, Samples, MAX_SAMPLES } from "../../edge_client/web/data/samples.js";
import { MemoryStore } from "../support/memory_store.mjs";

const PLANE = { input: [2], target: [3], loss: "cross-entropy" };

test("a table with a head names its label column, one without has it last", () => {
  const named = readCsv("label;a;b\n2;4;8\r\n0;0;16\n", PLANE, 16);
  assert.deepEqual(named.map(({ label, x }) => [label, ...x]), [[2, 0.25, 0.5], [0, 0, 1]]);
  assert.deepEqual(readCsv("1,2,0\n", PLANE).map(({ label, x }) => [label, ...x]), [[0, 1, 2]]);
  assert.deepEqual(readCsv("a,b,label\n1,2,0\n", PLANE).map(({ label, x }) => [label, ...x]), [[0, 1, 2]]);
});

test("quotes, large letters and the line ends of old files do not change which column is the label", () => {
  const read = (text) => readCsv(text, PLANE).map(({ label, x }) => [label, ...x]);
  assert.deepEqual(read('"label","a","b"\n"2","4","8"\n0,0,1\n'), [[2, 4, 8], [0, 0, 1]]); // as R writes it; the last column could be a label, too
  assert.deepEqual(read("Label;a;b\r1;0;2\r"), [[1, 0, 2]]);
});

test("numbers to predict are read as they are", () => {
  const [{ x, target }] = readCsv("1,2,0.5,-1", { input: [2], target: [2], loss: "squared-error" });
  assert.deepEqual([[...x], [...target]], [[1, 2], [0.5, -1]]);
});

test("of several arrays in one row only the floating point numbers are divided, and a wrong kind is refused by the array's name", () => {
  const several = { ...PLANE, input: [4], parts: [["age", "float", [], 0], ["seen", "bool", [1], 2], ["words", "int", [2], 11]] };
  assert.deepEqual(readCsv("8,1,7,-3,2\n", several, 4).map(({ label, x }) => [label, ...x]), [[2, 2, 1, 7, -3]]);
  const wrong = [["1,2,3,4,0\n", /line 1 has 2 in seen, which takes 0 or 1/], ["1,1,3,4,0\n1,0,3,4.5,0\n", /line 2 has 4.5 in words, which takes whole/], ["1,1,3,16777217,0\n", /16777217 in words/]];
  for (const [text, words] of wrong) assert.throws(() => readCsv(text, several), words);
});

test("a table that does not fit is refused with the number of the line", () => {
  const wrong = [["", /empty/], ["a,b,label\n", /no samples/], ["1,2\n", /line 1 has 2 columns/], ["a,b,label\n1,2,0\n1,x,0\n", /line 3/], ["1,2,3\n", /label 3/], ["1,2,0.5\n", /label 0.5/], ["1,2,-1", /label -1/]];
  for (const [text, words] of wrong) assert.throws(() => readCsv(text, PLANE), words);
  assert.throws(() => readCsv("1,2,0", PLANE, 0), /above 0, with a decimal point/);
});

test("ink is cut out, centered and counted in squares", () => {
  const side = 256;
  const ink = new Float32Array(side * side);
  for (let y = 100; y < 164; y += 1) for (let x = 20; x < 52; x += 1) ink[y * side + x] = 1; // 64 high, 32 wide
  const plane = fromInk(ink, side, [8, 8]);
  for (let y = 0; y < 8; y += 1) assert.deepEqual([...plane.subarray(8 * y, 8 * y + 8)], [0, 0, 1, 1, 1, 1, 0, 0]);
  const large = fromInk(ink, side, [28, 28]);
  assert.equal(large.subarray(0, 28 * 4).every((value) => value === 0), true); // a margin of four
  assert.ok(large[14 * 28 + 14] === 1);
  assert.equal(fromInk(new Float32Array(side * side), side, [8, 8]), null);
});

test("pixels become brightness or colours, turned over on demand", () => {
  const rgba = Uint8ClampedArray.of(255, 0, 0, 255, 255, 255, 255, 255);
  assert.deepEqual([...fromPixels(rgba, [1, 1, 2])].map((value) => value.toFixed(3)), ["0.299", "1.000"]);
  assert.deepEqual([...fromPixels(rgba, [3, 1, 2])], [1, 1, 0, 1, 0, 1]);
  assert.deepEqual([...fromPixels(rgba, [3, 1, 2], { invert: true })], [0, 0, 1, 0, 1, 0]);
});

test("a first line with a missing value is no header, and is refused as every other", () => {
  for (const first of ["1,,0", "1,NA,0", "nan,2,0", "?,2,0"]) assert.throws(() => readCsv(`${first}\n1,2,0\n`, PLANE), /line 1 holds something that is no number/);
  assert.equal(readCsv(",b,label\n1,2,0\n", PLANE).length, 1);
});

test("what is no number is named with its column, and a class that has a name with the numbers that labels are", () => {
  assert.throws(() => readCsv("1,2,0\n1,x,0\n", PLANE), /^RangeError: line 2 holds something that is no number: “x” in column 2$/);
  assert.throws(() => readCsv("1,2,0\n1,-1e39,0\n", PLANE), /^RangeError: line 2 holds something that is no number: “-1e39” in column 2; float32 ends at 3.4e38$/);
  assert.throws(() => readCsv("1,2,0\n1,2,Walking\n", PLANE), /“Walking” in column 3, the label; labels are 0 to 2$/);
});

test("a label may be a class's name, also in a file without a head; numbers stay numbers, and what names no single class is refused with the names", () => {
  const read = (text, classes) => readCsv(text, { ...PLANE, classes }).map(({ label, x }) => [label, ...x]);
  const moves = ["walking", "none", " sitting "];
  assert.deepEqual(read("1,2,walking\n3,4,none\n5,6,2\n", moves), [[0, 1, 2], [1, 3, 4], [2, 5, 6]]);
  assert.deepEqual(read('label;a;b\n"sitting";4;8\n', moves), [[2, 4, 8]]);
  assert.deepEqual(read("1,2,1\n", ["1", "2", "3"]), [[1, 1, 2]]); // a number is a class's number, whatever classes are called
  assert.throws(() => read("1,2,0\n1,2,Walking\n", moves), /^RangeError: line 2 holds something that is no label: “Walking” in column 3, the label; labels are 0 to 2, or a name: 0 is walking, 1 is none, 2 is {2}sitting $/);
  assert.throws(() => read("1,2,3\n", moves), /label 3; labels are 0 to 2, or a name: 0 is walking/);
  assert.throws(() => read("1,2,0\n1,2,up\n", ["up", "up", "down"]), /no label: “up”/);
  assert.throws(() => read("1,2,0\nwalking,2,0\n", moves), /no number: “walking” in column 1$/);
  assert.throws(() => readCsv("1,2,0\n1,2,walking\n", { ...PLANE, target: [1], loss: "squared-error", classes: moves }), /no number/);
});

test("which labels there are is told with the names, of many classes the first ones", () => {
  assert.equal(labelsInWords({ target: [3] }), "0 to 2");
  assert.equal(labelsInWords({ target: [3], classes: ["a", "", "c"] }), "0 to 2, or a name: 0 is a, 2 is c");
  assert.equal(labelsInWords({ target: [2], classes: ["3", "5"] }), "0 to 1: 0 is 3, 1 is 5");
  assert.equal(labelsInWords({ target: [2], classes: ["\u05d0", "\u05d1"] }), "0 to 1, or a name: 0 is \u2068\u05d0\u2069, 1 is \u2068\u05d1\u2069"); // else read as "1, \u05d0 is"
  assert.match(labelsInWords({ target: [20], classes: Array.from({ length: 20 }, (_, k) => `n${k}`) }), /, 11 is n11, …$/);
});

test("how many samples train is known without reading one", async () => {
  const store = new MemoryStore();
  const samples = new Samples(store);
  const found = [];
  for (let i = 0; i < 11; i += 1) {
    await samples.add([{ x: Float32Array.of(i), label: 0 }]);
    found.push([await samples.trains(), (await samples.local()).train.n]);
  }
  assert.deepEqual(found.map(([told]) => told), found.map(([, read]) => read));
  store.values = store.get = () => assert.fail("a sample was read");
  assert.equal(await samples.trains(), 9);
});

test("every fifth sample is held out, the last one can be removed, and there is a limit", async () => {
  const store = new MemoryStore();
  let changes = 0;
  const samples = new Samples(store, () => { changes += 1; });
  await samples.add(Array.from({ length: 11 }, (_, i) => ({ x: Float32Array.of(i), label: i % 3 })));
  const { train, test: held } = await samples.local();
  assert.deepEqual([[...held.x], [...held.labels], train.n], [[4, 9], [1, 0], 9]);
  await samples.remove();
  await samples.add([{ x: Float32Array.of(99), label: 0 }]);
  assert.equal((await samples.local()).train.x.at(-1), 99);
  assert.equal(await samples.count(), 11);
  await assert.rejects(samples.add([{ x: Float32Array.of(Number.NaN), label: 0 }]), RangeError);
  await assert.rejects(samples.add(new Array(MAX_SAMPLES).fill({ x: Float32Array.of(0), label: 0 })), /nothing was added. Remove some, or add fewer/);
  await samples.remove({ all: true });
  assert.equal(await samples.count(), 0);
  assert.equal(changes, 4);
});

test("samples of another model are not mixed with those that are there", async () => {
  const samples = new Samples(new MemoryStore());
  await samples.add([{ x: Float32Array.of(1, 2), label: 0 }]);
  for (const other of [{ x: Float32Array.of(1), label: 0 }, { x: Float32Array.of(1, 2), target: Float32Array.of(1) }]) {
    await assert.rejects(samples.add([other]), /another model; remove them all/);
  }
  assert.deepEqual([(await samples.local()).train.n, await samples.count()], [1, 1]);
  await samples.remove({ all: true });
  await samples.add([{ x: Float32Array.of(1, 2), target: Float32Array.of(1) }]);
  assert.equal((await samples.local()).train.targets.length, 1);
});

test("samples added at the same moment are all kept, in their order, also after one that is refused", async () => {
  const samples = new Samples(new MemoryStore());
  const one = (i) => [{ x: Float32Array.of(i), label: 0 }];
  const refused = samples.add(new Array(MAX_SAMPLES + 1).fill(one(0)[0]));
  const added = Array.from({ length: 4 }, (_, i) => samples.add(one(i)));
  const removed = samples.remove();
  await assert.rejects(refused, RangeError);
  await Promise.all([...added, removed, samples.add(one(9))]);
  assert.deepEqual([...(await samples.local()).train.x], [0, 1, 2, 9]);
});

test("values of another range than those that are there are told of, with the number to divide by, and alike ones are not", async () => {
  const samples = new Samples(new MemoryStore());
  await samples.add([{ x: Float32Array.of(0, -1), label: 0 }]);
  const others = await samples.largest();
  const pixels = readCsv("0,16,1\n8,4,2\n", PLANE);
  const about = (scale, added) => rangeWarning({ added, others, scale, whose: "your other samples" });
  assert.match(about(1, largestOf(pixels)), /go up to 16, those of your other samples up to 1\..* “Divide values by” 16\.$/);
  assert.match(about(255, 1 / 255), /“Divide values by” 1\.$/);
  assert.deepEqual([about(1, 4), about(1, 0.25), about(1, 0)], ["", "", ""]);
  assert.equal(rangeWarning({ added: 16, others: 0, scale: 1, whose: "drawings" }), "");
});

test("a removal tells when the samples are gone, and not where the store refused", async () => {
  const samples = new Samples(new MemoryStore(), () => told.push("changed"));
  const told = [];
  const gone = () => told.push("gone");
  await samples.add([{ x: Float32Array.of(1), label: 0 }]);
  const { write } = samples.store;
  samples.store.write = () => Promise.reject(new Error("the disk is busy"));
  await assert.rejects(samples.remove({}, gone), /busy/);
  samples.store.write = write;
  await samples.remove({}, gone);
  assert.deepEqual(told, ["changed", "gone", "changed"]);
});

test("the samples of a table can be removed together", async () => {
  const samples = new Samples(new MemoryStore());
  await samples.add([1, 2, 3, 4].map((value) => ({ x: Float32Array.of(value), label: 0 })));
  await samples.remove({ last: 3 });
  assert.deepEqual([await samples.count(), await samples.largest()], [1, 1]);
});

test("one separator stands in the whole file: a decimal comma separates nothing, and is told of", () => {
  for (const line of ["0,5;1;2", "0,5;1,5;2", "0,5\t1,5\t2"]) assert.throws(() => readCsv(`${line}\n${line}\n`, PLANE), /^RangeError: line 1 holds something that is no number: “0,5” in column 1; numbers have decimal points$/);
  const four = { ...PLANE, input: [4] };
  assert.throws(() => readCsv("0,5;0,7;1\n", four), /line 1 has 3 columns/); // and is no sample of 0, 5, 0 and 7
  assert.throws(() => readCsv("a;b;label\n0,5;0,7;1\n0,5;0,7;1\n", four), /line 2 has 3 columns/);
  const named = readCsv("a;b;label\n1;2;left, up\n", { ...PLANE, classes: ["right", "left, up", "down"] });
  assert.deepEqual(named.map(({ label, x }) => [label, ...x]), [[1, 1, 2]]);
  assert.deepEqual(readCsv("1\t2\t0\n3\t4\t1", PLANE).map(({ label, x }) => [label, ...x]), [[0, 1, 2], [1, 3, 4]]);
});

test("a line is named by its number in the file, blank lines included; a file that is no UTF-8 is told of", () => {
  assert.throws(() => readCsv("a,b,label\n\n1,2,0\n\n1,x,0\n", PLANE), /line 5/);
  assert.throws(() => readCsv("1\0,\x002\0,\x000\0", PLANE), /save it as CSV in UTF-8/);
});

test("samples that are removed take along how a probe weighs them: those that come next are others", async () => {
  const store = new MemoryStore();
  const samples = new Samples(store);
  await samples.add([{ x: Float32Array.of(1, 2), label: 0 }]);
  await store.write({ posterior: { run: "r1", round: 1, rows: [Float64Array.of(1)] } });
  await samples.add([{ x: Float32Array.of(3, 4), label: 1 }]);
  assert.notEqual(await store.get("posterior"), undefined);
  await samples.remove({ all: true });
  assert.equal(await store.get("posterior"), undefined);
});
