// The kinds of control messages: a table of fields per kind, and the rules that tie fields together (PROTOCOL.md, section 7).

import { MAX_BITMAP_BYTES, MAX_BLOCK_BYTES, BLOCK_BYTES_STEP, isCount, KIND_LIMITS } from "./blocks.js";
import { fromBase64 } from "./bytes.js";
import { Malformed, shown } from "./errors.js";
import {
  boolean, integer, listOf, manifest, mapOf, matching, named, number, oneOf, optional, orNull, record, required, text,
  withField, wordOr,
} from "./validators.js";
import { checkName } from "./topics.js";

export const CODECS = ["f32", "f16", "i8"];
export const MAX_DETAIL_CHARS = 200;
export const MAX_GET_BLOCKS = 16;
export const MAX_CENTERS = 1_024;
export const MAX_MODELS = 16;
const MAX_STEPS = 1_000_000;
const MAX_LABEL_TOTALS = 512; // numbers in one probe, of all candidates
const WANTS = ["loss", "votes", "posterior", "grad", "confusion", "errors", "positions", "labels", "inputs", "answers"];
const ASKED_ALONE = ["grad", "labels"];
export const ERR_CODES = [
  "bad_json", "too_big", "bad_version", "bad_kind", "bad_field", "not_member", "not_yours",
  "unknown_blob", "bad_range", "closed", "busy", "rate", "internal",
];
export const ACK_STATUSES = [
  "ok", "dup", "late", "superseded", "bad_hash", "bad_schema", "bad_codec", "not_finite", "rejected", "retry", "too_big",
];
export const NACK_CODES = [
  "bad_version", "bad_kind", "bad_field", "bad_json", "internal", "too_big", "bad_hash", "bad_schema", "bad_codec",
  "not_finite", "bad_task", "old_epoch", "bad_signature", "bad_program", "no_engine", "no_own_model",
  "no_posterior", "no_data", "no_space", "unavailable", "unreachable", "deadline",
];

const bitmap = (value) => fromBase64(value, MAX_BITMAP_BYTES) && value;
const run = (value) => checkName("run", value);
const sha256 = (value) => checkName("sha256", value);
const blockSize = (value, name) => {
  if (!isCount(value, BLOCK_BYTES_STEP, MAX_BLOCK_BYTES) || value % BLOCK_BYTES_STEP) {
    throw new Malformed("bad_field", `${name} is ${shown(value)}; expected a multiple of ${BLOCK_BYTES_STEP} up to ${MAX_BLOCK_BYTES}`);
  }
  return value;
};
const blockRuns = (value, name) => {
  const runs = listOf(listOf(integer(0, 65_535), 2, 2), 1, MAX_GET_BLOCKS)(value, name);
  const count = runs.reduce((sum, [, n]) => sum + n, 0);
  if (runs.some(([first, n]) => n < 1 || first + n > 65_536) || count > MAX_GET_BLOCKS) {
    throw new Malformed("bad_field", `${name}: runs [first, count] of at most ${MAX_GET_BLOCKS} blocks in all`);
  }
  return runs;
};

const IDENT = matching("[A-Za-z0-9-]{1,36}");
const U32 = integer(0, 2 ** 32 - 1);
const COUNT = integer(0);
const WINDOW = integer(1, 16);
const CENTER = integer(0, MAX_CENTERS - 1);
const SAMPLES = integer(1, 2 ** 31);
const METRICS = mapOf(matching("[A-Za-z0-9_./-]{1,64}"), number(-Infinity), 16);
const ENGINE = matching("[a-z0-9-]{1,16}");
const RUNTIME = matching("[A-Za-z0-9_.+ -]{1,64}");
const REFUSED = record(required({ engine: ENGINE, runtime: RUNTIME, difference: number() }));
const CAPS = record({
  ...required({ engine: ENGINE, n: integer(0, 2 ** 31) }),
  ...optional({ ram: COUNT, disk: COUNT, codecs: listOf(matching("[A-Za-z0-9_.-]{1,32}"), 0, 16), window: WINDOW }),
  ...optional({ runtime: RUNTIME, refused: listOf(REFUSED, 0, 8) }),
});
const KEY = required({ run, round: U32, exchange: U32 });
const MODEL = manifest("model");
const SLOT = matching("[a-z0-9-]{1,32}");
const CANDIDATE = withField("own", record({ ...required({ own: SLOT }), ...optional({ init: MODEL }) }), MODEL);

const STATE = record({
  ...required({ doing: oneOf("compile", "gather", "train", "export", "serve"), newcomers: oneOf("now", "next-round", "next-run", "no") }),
  ...optional({ here: COUNT, needed: COUNT, run, name: text(64), round: U32, of: U32 }),
});

export const COMMON = required({ id: IDENT, t: COUNT });
export const EPOCH = required({ epoch: COUNT });

const ANSWER_KINDS = ["delta", "stats", "masked"];
const SUM_STAGES = ["prekeys", "shares", "add", "show", "tell", "keep"];
const SCALE = record({
  ...required({ bits: integer(16, 32), devices: integer(1, 100_000), clip: number(Number.MIN_VALUE) }),
  ...optional({ noise: number(0, 1e6) }),
});
const PLACE = integer(0, MAX_MODELS - 1); // of a center
const ADDED = { // `sum` of a sum's work, by the work's job
  fit: {
    ...required({
      part: oneOf("choose", "add", "count", "points"), choose: oneOf("only", "given", "loss", "nearest", "shares", "posterior"),
      centers: listOf(MODEL, 1, MAX_MODELS), open: listOf(PLACE, 1, MAX_MODELS), share: number(0, 1), scale: SCALE,
    }),
    ...optional({
      group: PLACE, compare: listOf(listOf(COUNT, 2, 2), 1, 64), points: manifest("points"),
      points_open: listOf(integer(0, 1), 1, MAX_MODELS ** 2), dealt: boolean, hysteresis: number(), sigma: number(), refresh: boolean,
      repeats: integer(1, MAX_STEPS), move: number(),
    }),
  },
  probe: required({ served: oneOf("asked", "center", "mixture"), usual: PLACE, scale: SCALE }),
};
/** What a device computes for a sum: the fields of a fit or a probe, `job`, and `sum`. */
const work = (value, name) => {
  const job = value !== null && typeof value === "object" ? value.job : undefined;
  if (!["fit", "probe"].includes(job)) throw new Malformed("bad_field", `${name} is ${shown(value)}; expected an object with job fit or probe`);
  return record({ ...JOBS[job], ...required({ job: oneOf(job) }), ...optional({ sum: record(ADDED[job]) }) })(value, name);
};
const DECAY = { weight_decay: number(), clip_norm: number() };
const BETA = number(0, 0.999999);
const ADAM = { beta1: BETA, beta2: BETA, eps: number(1e-16, 1), ...DECAY };
const OPTIMISER = named({ sgd: { momentum: number(0, 1), nesterov: boolean, ...DECAY }, adam: ADAM, adamw: ADAM });
const JOBS = {
  fit: {
    ...required({
      start: wordOr("own", MODEL), lr: number(), mu: number(),
      steps: integer(1, MAX_STEPS), batch: integer(1, 65_536), seed: COUNT,
    }),
    ...optional({ // momentum of the step's own SGD, or an optimiser: see fitContradiction
      momentum: number(), optimiser: OPTIMISER, init: MODEL, anchor: wordOr("start", MODEL), linear: manifest("linear"), rows: matching("ones|posterior:(?:0|[1-9][0-9]?)|all-but:[1-9][0-9]{0,8}"),
      slot: SLOT, upload: boolean, buffers: oneOf("sent", "own"),
    }),
  },
  probe: {
    ...required({
      models: listOf(CANDIDATE, 0, MAX_MODELS), want: listOf(oneOf(...WANTS), 1, WANTS.length),
      batch: integer(1, 65_536), seed: COUNT,
    }),
    ...optional({
      prior: listOf(number(), 1, MAX_MODELS), split: oneOf("train", "test"), limit: SAMPLES,
      buffers: oneOf("sent", "own", "batch"), step: manifest("container"),
      label_totals: listOf(orNull(listOf(number(), 1, MAX_LABEL_TOTALS)), 1, MAX_MODELS), least: boolean,
    }),
  },
  sum: {
    ...required({ stage: oneOf(...SUM_STAGES) }),
    ...optional({ after: COUNT, message: manifest("sum"), work, step: manifest("container") }),
  },
};
const RELEASE = record({
  ...required({ version: matching("[0-9]{1,6}(\\.[0-9]{1,6}){0,3}"), file: manifest("release") }),
  ...optional({ key: matching("[0-9a-f]{16}"), sig: matching("[0-9a-f]{128}") }),
});
const REPLY = record(
  required({ codec: oneOf(...CODECS), base: oneOf("start", "anchor", "zero"), max_size: integer(1, KIND_LIMITS.delta) }),
);

export const MESSAGE_TABLES = {
  coord: {
    ...required({
      boot: matching("[0-9a-f]{16}"), online: boolean, proto: listOf(integer(1, 255), 1, 16), spread_ms: COUNT,
      block: blockSize, window: WINDOW, src: listOf(matching("bcast|mqtt|https://[!-~]{1,256}"), 0, 8),
    }),
    ...optional({ release: RELEASE, state: STATE, link: COUNT, key: matching("[0-9a-f]{16}"), sig: matching("[0-9a-f]{128}") }),
  },
  cat: required({ ver: COUNT, catalog: manifest("catalog") }),
  st: { ...required({ s: oneOf("on", "off", "sleep", "lost"), bd: U32 }), ...optional({ sw: text(64), caps: CAPS }) },
  task: {
    ...KEY,
    ...required({
      left_ms: COUNT, job: oneOf("fit", "probe", "sum"), program: manifest("program"), container: manifest("container"),
      schema: sha256, reply: REPLY,
    }),
    ...optional({ center: CENTER }),
  },
  stop: { ...KEY, ...optional({ why: text(MAX_DETAIL_CHARS) }) },
  rebirth: {},
  get: { ...required({ sha256, block: blockSize, at: blockRuns }), ...optional({ mark: integer(0, 65_535) }) },
  rdy: {
    ...KEY,
    ...required({ attempt: U32, n: SAMPLES, what: oneOf(...ANSWER_KINDS), update: manifest(...ANSWER_KINDS), seconds: number() }),
    ...optional({ metrics: METRICS }),
  },
  go: { ...required({ re: IDENT, sha256, shard: integer(0, 65_535), window: WINDOW }), ...optional({ have: bitmap }) },
  ack: {
    ...KEY,
    ...required({ attempt: U32, sha256, status: oneOf(...ACK_STATUSES) }),
    ...optional({ retry_ms: COUNT, detail: text(MAX_DETAIL_CHARS) }),
  },
  err: { ...required({ code: oneOf(...ERR_CODES) }), ...optional({ re: IDENT, detail: text(MAX_DETAIL_CHARS), retry_ms: COUNT }) },
  nack: {
    ...required({ re: IDENT, code: oneOf(...NACK_CODES) }),
    ...optional({ run, round: U32, exchange: U32, detail: text(MAX_DETAIL_CHARS), retry_ms: COUNT }),
  },
  near: {
    ...required({ how: oneOf("sketch", "loss", "round") }),
    ...optional({ sketch: manifest("sketch"), stats: manifest("stats"), n: SAMPLES, centers: listOf(CENTER, 1, MAX_MODELS) }),
  },
  "near-answer": {
    ...required({ re: IDENT, center: orNull(CENTER) }),
    ...optional({
      distance: orNull(number(-Infinity)),
      fit: oneOf("well", "badly", "none"),
      alternatives: listOf(record(required({ center: CENTER, distance: number(-Infinity) })), 0, 8),
    }),
  },
  served: required({ center: CENTER, sha256, n: SAMPLES, metrics: METRICS }),
};

/** Which kinds belong on which topic. */
export const ROUTES = {
  coord: ["coord"],
  cat: ["cat"],
  st: ["st"],
  rq: ["get", "rdy", "near", "nack", "served"],
  t: ["task", "go", "ack", "near", "stop", "rebirth", "err"],
};
export const KINDS = [...new Set(Object.values(ROUTES).flat())];
const DOWN = [...ROUTES.t, "coord", "cat"].filter((kind) => kind !== "near");

/** `near` is the one kind that travels both ways: an answer has `re`. */
export function isDownlink(kind, message, route) {
  if (kind !== "near") return DOWN.includes(kind);
  return route === undefined ? Object.hasOwn(message, "re") : route === "t";
}

/** All fields of a message of this kind; a task's depend on its job, and `near` has two tables. */
export function tableOf(kind, message, down) {
  const job = kind === "task" && typeof message.job === "string" && Object.hasOwn(JOBS, message.job) ? JOBS[message.job] : {};
  return { ...COMMON, ...(down ? EPOCH : {}), ...MESSAGE_TABLES[kind === "near" && down ? "near-answer" : kind], ...job };
}

/** The rules that tie fields together. Contradictions inside a job are "bad_task", all others "bad_field". */
export function checkRules(kind, message) {
  if (kind === "st" && message.s === "on" && !message.caps) throw new Malformed("bad_field", "st on needs caps");
  if (kind === "rdy" && message.update.kind !== message.what) {
    throw new Malformed("bad_field", `rdy of ${message.what} carries a ${message.update.kind}`);
  }
  if (kind === "near" && message.how) {
    const needed = { sketch: "sketch", loss: "stats" }[message.how];
    if (needed && !message[needed]) throw new Malformed("bad_field", `near by ${message.how} needs ${needed}`);
  }
  const wrong = kind === "task" ? CONTRADICTIONS[message.job](message) : null;
  if (wrong) throw new Malformed("bad_task", wrong);
}

function probeContradiction(task) {
  const { prior, want, models, label_totals: totals } = task;
  const total = prior?.reduce((a, b) => a + b, 0);
  if (prior && (prior.length !== models.length || !(total > 0 && total < Infinity))) {
    return "prior needs one weight per model and a positive, finite sum";
  }
  if (new Set(want).size < want.length) return "want names the same statistic twice";
  const alone = ASKED_ALONE.some((name) => want.includes(name));
  if (alone && want.length > 1) return `each of ${ASKED_ALONE} is asked for alone`;
  if (!models.length && want[0] !== "labels") return "only labels are asked for without a model";
  if (task.least && (want.length > 1 || want[0] !== "loss")) return "least is asked of the losses alone";
  if (totals && totals.length !== models.length) return "label_totals needs one entry per model";
  if (totals && totals.reduce((sum, row) => sum + (row?.length ?? 0), 0) > MAX_LABEL_TOTALS) {
    return `label_totals holds more than ${MAX_LABEL_TOTALS} numbers`;
  }
  if (task.buffers === "batch" && !alone && !task.step) return "buffers of a batch need the step's file";
  return null;
}

function fitContradiction(task) {
  const { anchor, reply } = task; // the work of a sum has no reply
  if (task.mu > 0 && anchor === undefined) return "mu > 0 needs an anchor";
  if ((task.momentum === undefined) === (task.optimiser === undefined)) return "a fit has a momentum or an optimiser";
  if (task.optimiser?.nesterov && !(task.optimiser.momentum > 0)) return "nesterov needs a momentum above 0";
  if (task.start === "own" && (anchor === "start" || reply?.base === "start")) {
    return "the server does not hold the model that start: own names";
  }
  if (reply?.base === "anchor" && anchor === undefined) return "the reply's base is an anchor that is not there";
  return null;
}

function sumContradiction(task) {
  const { stage, work: asked } = task;
  for (const [field, stages] of [["message", ["shares", "add", "show"]], ["work", ["add", "tell", "keep"]]]) {
    if ((task[field] !== undefined) !== stages.includes(stage)) return `stage ${stage} has a ${field}, or lacks one`;
  }
  if (task.after !== undefined && stage !== "prekeys") return "numbers are asked of prekeys only";
  if (!asked) return null;
  if ((asked.sum !== undefined) !== (stage !== "keep")) return `the work of stage ${stage} has a sum, or lacks one`;
  return (asked.sum && addedContradiction(asked.sum, asked.models)) ?? CONTRADICTIONS[asked.job](asked);
}

function addedContradiction({ open = [], centers, part, choose, compare, points, points_open: openPoints, served, usual }, models) {
  if (served === "center" && usual >= models.length) return "usual is the number of no model";
  if (open.some((k, i) => k >= centers.length || (i && k <= open[i - 1]))) return "open names no rising numbers of centers";
  const means = ["count", "points"].includes(part);
  const needed = means || choose === "nearest";
  if ((needed && !compare) || compare?.some(([start, end]) => start >= end)) return "models are compared in columns, start before end";
  if (means && !(points && openPoints)) return "a part of k-means has no centroids";
  return null;
}

const CONTRADICTIONS = { fit: fitContradiction, probe: probeContradiction, sum: sumContradiction };
