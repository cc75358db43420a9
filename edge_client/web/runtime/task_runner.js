// Computation of one task: check the program, train or evaluate, and encode the result for the upload. Works on blobs that
// are fetched already; client.js stores and sends the result.

import { openEngine } from "../engines/onnx.js";
import { FAR, runGolden } from "../engines/golden_run.js";
import { Learner } from "../training/learner.js";
import { decodeVector, encodeVector, encodeWithFeedback, encodeStats } from "../protocol/codecs.js";
import { Malformed } from "../protocol/errors.js";
import { readProgram } from "../protocol/program.js";
import { verifyManifest } from "../protocol/signing.js";
import { decodePoints, readSummedFit, SumScale } from "../protocol/summed_task.js";
import { containerFunctions, taskManifests } from "../protocol/task.js";
import { runFit, runProbe } from "../training/fit_probe.js";
import { addWords, evaluationWords } from "../training/summed.js";

export const ENGINE = "onnx";
const GOLDEN = "golden/";

/** Opens programs and runs tasks. `blobs.read(sha256)` gives fetched bytes, hashed again; an opened engine is used again. */
export class TaskRunner {
  constructor({ ort, blobs, federation, keys }) {
    Object.assign(this, { ort, blobs, federation, keys });
    this.opened = { program: null, sha256: null, engines: new Map() };
  }

  /** Before a byte is fetched: one of the pinned keys signed each of these. */
  async checkSignature(...manifests) {
    for (const manifest of manifests) await verifyManifest(manifest, this.keys, this.federation);
  }

  /** The fetched program of a manifest. */
  async program(manifest) {
    if (this.opened.sha256 !== manifest.sha256) {
      const program = await readProgram(await this.blobs.read(manifest.sha256));
      for (const engine of this.opened.engines.values()) await engine.close();
      this.opened = { program, sha256: manifest.sha256, engines: new Map() };
    }
    return this.opened.program;
  }

  /** Before it is fetched: the signed program vouches for this file for our engine. */
  checkContainer(program, name, manifest) {
    const file = program.containers[ENGINE]?.[name];
    if (!file) throw new Malformed("no_engine", `the program has no ${name} for ${ENGINE}`);
    if (file.sha256 !== manifest.sha256 || file.size !== manifest.size) {
      throw new Malformed("bad_program", `container ${manifest.sha256.slice(0, 16)} is not the one that the program lists`);
    }
  }

  /** What to fetch beside the containers: the file of the frozen tensors, for a program that has one. */
  frozen(program, block) {
    const file = program.containers[ENGINE]?.frozen;
    return file ? [{ ...file, block, kind: "frozen" }] : [];
  }

  /** A learner over fetched containers, {function: manifest}; opened once. */
  async learner(program, containers) {
    const name = Object.values(containers).map(({ sha256 }) => sha256).sort().join();
    if (!this.opened.engines.has(name)) {
      const files = {};
      for (const [each, { sha256 }] of Object.entries(containers)) files[each] = await this.blobs.read(sha256);
      for (const { sha256 } of this.frozen(program)) files.frozen = await this.blobs.read(sha256);
      this.opened.engines.set(name, await openEngine(this.ort, program, files));
    }
    return new Learner(this.opened.engines.get(name));
  }

  /** The runtime's name and version. */
  get runtime() {
    return `onnxruntime-web ${this.ort.env?.versions?.web ?? "of unknown version"}`;
  }

  /**
   * How far this runtime is from the program's golden run, 0 for a program without one; computed once for each program and
   * version, and kept in `store` unless it failed. The step's file is here already.
   */
  async goldenDifference(manifest, store) {
    const program = await this.program(manifest);
    const golden = program.golden[ENGINE];
    if (!golden) return 0;
    const name = `${GOLDEN}${manifest.sha256}/${this.runtime}`;
    const kept = await store.get(name);
    if (kept < FAR) return kept; // earlier versions stored failures
    const { engine } = await this.learner(program, { step: program.containers[ENGINE].step });
    const difference = await runGolden(engine, golden);
    if (difference === FAR) return difference; // maybe for want of memory: the next task tries again
    await store.write({ [name]: difference }, (await store.names(GOLDEN)).filter((other) => other !== name));
    return difference;
  }

  /** A fetched model or linear term [schema.size]; centroids in float64. */
  async vector(manifest, schema) {
    const data = await this.blobs.read(manifest.sha256);
    return manifest.kind === "points" ? decodePoints(data) : decodeVector(data, schema, { kind: manifest.kind });
  }

  /** What a task computes with: a learner over its containers, its vectors by hash. */
  async prepare(task) {
    const program = await this.program(task.program);
    const { schema } = program;
    if (schema.sha256 !== task.schema) throw new Malformed("bad_schema", `the program's schema is ${schema.sha256}`);
    const containers = Object.fromEntries(Object.entries(containerFunctions(task)).map(([field, name]) => [name, task[field]]));
    const learner = await this.learner(program, containers);
    const vectors = new Map();
    for (const manifest of taskManifests(task)) {
      if (manifest.kind !== "sum") vectors.set(manifest.sha256, await this.vector(manifest, schema));
    }
    return { schema, learner, vectors };
  }

  /**
   * Carry out a task whose blobs are here. `own` are kept models by slot, `residual` what compression has cost so far,
   * `posterior` this round's responsibilities; `between` is awaited before each step.
   * -> {what, data, n, metrics, schema, own: [slot, vector], residual, posterior}
   */
  async run(task, { local, own, residual, posterior, between }) {
    const { schema, learner, vectors } = await this.prepare(task);
    const given = { vectors, between };
    let outcome;
    if (task.job === "probe") {
      outcome = statsResult(await runProbe(learner, task, local, { ...given, own }), schema);
    } else {
      const kept = own.get(task.slot ?? "main");
      const trained = await runFit(learner, task, local.train, { ...given, own: kept, posterior });
      outcome = updateResult(task, trained, schema, residual, local.train.n);
    }
    if (outcome.data.length > task.reply.max_size) {
      throw new Malformed("too_big", `an update of ${outcome.data.length} bytes, ${task.reply.max_size} allowed`);
    }
    return { schema, ...outcome };
  }

  /**
   * Carry out the work of a task of job "sum". `memory` is what the device keeps in this run: {trained, choice, own}.
   * -> {schema, words, scale, trained, choice, own}; a fit of which nothing is told has no words.
   */
  async addWords(task, { local, memory, between }) {
    const { schema, learner, vectors } = await this.prepare(task);
    const { work } = task;
    const given = { vectors, between };
    if (work.sum && work.job === "fit") {
      const summed = readSummedFit(work, vectors);
      return { schema, scale: summed.scale, ...(await addWords(learner, summed, local, memory, given)) };
    }
    if (work.sum) return { schema, scale: new SumScale(work.sum.scale), words: await evaluationWords(learner, work, local, memory, given) };
    if (work.job === "probe") throw new Malformed("bad_task", "a probe leaves nothing on the device");
    const slot = work.slot ?? "main";
    const { vector } = await runFit(learner, work, local.train, { ...given, own: memory.own.get(slot) });
    return { schema, own: [slot, vector] };
  }
}

function statsResult({ n, shares, ...reply }, schema) {
  return { what: "stats", data: encodeStats(reply, schema), n, metrics: {}, posterior: shares };
}

/** The difference to the base that the task names, in float32 so that both sides subtract the same numbers. */
function updateResult(task, { vector, loss, start, anchor }, schema, residual, n) {
  const kept = { n, metrics: { loss }, own: [task.slot ?? "main", vector] };
  if (task.upload === false) return { what: "stats", data: encodeStats({ loss: [loss] }, schema), ...kept };
  const { codec, base: named } = task.reply;
  const place = named === "anchor" && task.anchor === "start" ? "start" : named;
  const base = place === "zero" ? "zero" : task[place]?.sha256;
  if (base === undefined) throw new Malformed("bad_task", `the reply's base is ${named}, but no such model was sent`);
  const from = { zero: undefined, start, anchor }[place];
  const delta = from ? vector.map((value, i) => value - from[i]) : vector;
  if (codec !== "i8") return { what: "delta", data: encodeVector(delta, schema, { codec, kind: "delta", base }), ...kept };
  return { what: "delta", ...encodeWithFeedback(delta, residual, schema, { codec, base }), ...kept };
}

/** Forget cached blobs that neither these, the program nor the center that was taken home needs. */
export async function evictBlobs({ store, blobs }, manifests, program) {
  const home = await store.get("home");
  const wanted = new Set(manifests.map(({ sha256 }) => sha256));
  for (const file of Object.values(program.containers[ENGINE] ?? {})) wanted.add(file.sha256);
  if (home?.sha256) wanted.add(home.sha256);
  await blobs.keepOnly(wanted);
}
