// program.json: what a training program is, which containers hold it, in which order they take their inputs
// (PROTOCOL.md, section 8). It is signed, so the hashes in it vouch for the containers.

import { isCount } from "./blocks.js";
import { Malformed, shown } from "./errors.js";
import { parseJson, plain, Real } from "./json.js";
import { schemaOf } from "./schema.js";

export const MAX_PROGRAM_BYTES = 1 << 20;
const MAX_CONTAINER_BYTES = 256 << 20;
const FUNCTIONS = ["step", "evaluate", "infer"];
const DTYPES = ["float32", "float64", "int32", "int64"];
const MAX_PORTS = 32_768;
const MAX_DIMS = 8;
const MAX_STEPS = 16; // of a golden run
const DIGEST = 8;
const MAX_TOLERANCE = 0.1;

/** The bytes of program.json -> {model, loss, schema, input, target, dtype, functions, containers, batch, golden}. */
export async function readProgram(data) {
  let raw;
  try {
    raw = parseJson(data, MAX_PROGRAM_BYTES);
  } catch (wrong) {
    throw new Malformed("bad_program", `program.json: ${wrong.message}`);
  }
  if (!isObject(raw)) throw new Malformed("bad_program", "program.json is no object");
  if (!isCount(raw.v, 1, 1)) throw new Malformed("bad_version", `program.json version ${shown(raw.v)}`);
  try {
    return await checked(raw);
  } catch (wrong) {
    if (wrong instanceof Malformed) throw wrong;
    throw new Malformed("bad_program", `program.json: ${wrong.message}`);
  }
}

async function checked(raw) {
  const loss = oneOf(raw.loss, ["cross-entropy", "squared-error"]);
  const target = dims(raw.target);
  if (!target.length || (loss === "cross-entropy" && target.length !== 1)) throw new RangeError(`target [${target}]`);
  const rows = list(raw.schema).map(([name, role, shape]) => [text(name), oneOf(role, ["p", "b"]), dims(shape)]);
  const schema = await schemaOf(rows);
  const classifier = list(raw.classifier).map(text);
  const params = rows.filter(([, role]) => role === "p").map(([name]) => name);
  if (classifier.some((name) => !params.includes(name))) throw new RangeError("classifier names no parameters");
  oneOf(raw.optimizer, ["sgd"]);
  count(raw.opset);
  object(raw.versions, text);
  object(raw.parity, (value) => {
    if (typeof value !== "number" && !(value instanceof Real)) throw new RangeError("parity is no number");
    return Number(value);
  });
  checkOrigin(raw.origin);
  const found = {
    model: text(raw.model), loss, target, schema, classifier, rows,
    input: dims(raw.input),
    dtype: oneOf(raw.dtype, ["float32", "float64"]),
    functions: object(raw.functions, (f) => ({ inputs: ports(f.inputs), outputs: ports(f.outputs) }), FUNCTIONS),
    containers: object(raw.containers, (files) => object(files, container, FUNCTIONS)),
    batch: object(raw.batch, (value) => (value === "any" ? value : count(value))),
    classes: target.at(-1),
  };
  return { ...found, golden: goldenRuns(found, raw.golden ?? null) };
}

/** Per engine: the run that checks a runtime; absent in the programs of older compilers. */
function goldenRuns({ rows, functions, containers, batch }, raw) {
  if (raw === null) return Object.create(null);
  const buffers = rows.some(([, role]) => role === "b") ? DIGEST : 0;
  const runs = object(raw, (run) => goldenRun(run, buffers));
  for (const [engine, run] of Object.entries(runs)) {
    if (!containers[engine]?.step || !functions.step) throw new RangeError(`a golden run for ${shown(engine)}, which has no step`);
    if (batch[engine] !== "any" && batch[engine] !== run.batch) throw new RangeError("a golden run of another batch");
  }
  return runs;
}

function goldenRun(run, buffers) {
  const numbers = (values) => {
    if (!Array.isArray(values) || values.length > MAX_STEPS) throw new RangeError("expected a short list of numbers");
    return values.map(number);
  };
  const positive = (value, most) => {
    const found = number(value);
    if (!(found > 0 && found <= most)) throw new RangeError(`expected a number above 0, at most ${most}`);
    return found;
  };
  const within = (value, low, high) => {
    if (!isCount(value, low, high)) throw new RangeError(`expected an integer from ${low} to ${high}`);
    return value;
  };
  const found = {
    seed: within(run.seed, 0, Number.MAX_SAFE_INTEGER),
    batch: within(run.batch, 1, 65_536),
    lr: positive(run.lr, Number.MAX_VALUE),
    pull: positive(run.pull, Number.MAX_VALUE),
    tokens: within(run.tokens, 0, 2 ** 24),
    losses: numbers(run.losses),
    weights: numbers(run.weights),
    buffers: numbers(run.buffers),
    tolerance: positive(run.tolerance, MAX_TOLERANCE),
  };
  if (!found.losses.length || found.weights.length !== DIGEST || found.buffers.length !== buffers) throw new RangeError("golden");
  return found;
}

function number(value) {
  if ((typeof value !== "number" && !(value instanceof Real)) || !Number.isFinite(Number(value))) {
    throw new RangeError(`expected a finite number, got ${shown(value)}`);
  }
  return Number(value);
}

function container(file) {
  if (typeof file.sha256 !== "string" || !/^[0-9a-f]{64}$/.test(file.sha256)) throw new RangeError("no sha256");
  const size = count(file.size);
  if (size > MAX_CONTAINER_BYTES) throw new Malformed("too_big", `a container of ${size} bytes, at most ${MAX_CONTAINER_BYTES}`);
  return { sha256: file.sha256, size };
}

function checkOrigin(origin) {
  if (origin === null) return;
  const { model, args, seed } = plain(origin);
  text(model);
  if (args === null || typeof args !== "object" || !isCount(seed, 0, Number.MAX_SAFE_INTEGER)) throw new RangeError("origin");
}

function isObject(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value) && !(value instanceof Real);
}

function object(value, item, names) {
  if (!isObject(value)) throw new RangeError(`expected an object, got ${shown(value)}`);
  const found = Object.create(null);
  for (const [name, each] of Object.entries(value)) found[names ? oneOf(name, names) : text(name)] = item(each);
  return found;
}

function list(value) {
  if (!Array.isArray(value)) throw new RangeError(`expected a list, got ${shown(value)}`);
  return value;
}

function text(value) {
  if (typeof value !== "string" || !value || value.length > 512) throw new RangeError(`expected a short text, got ${shown(value)}`);
  return value;
}

function oneOf(value, allowed) {
  if (!allowed.includes(value)) throw new RangeError(`${shown(value)} is none of ${allowed}`);
  return value;
}

function count(value) {
  if (!isCount(value, 1, Number.MAX_SAFE_INTEGER)) throw new RangeError(`expected a positive integer, got ${shown(value)}`);
  return value;
}

function dims(values) {
  if (!Array.isArray(values) || values.length > MAX_DIMS) throw new RangeError(`expected a shape, got ${shown(values)}`);
  return values.map(count);
}

function ports(rows) {
  if (!Array.isArray(rows) || rows.length > MAX_PORTS) throw new RangeError("expected a list of ports");
  return rows.map(([name, dtype, shape]) => ({
    name: text(name), dtype: oneOf(dtype, DTYPES), shape: list(shape).map((d) => (d === "batch" ? d : count(d))),
  }));
}
