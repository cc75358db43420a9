// program.json: what a training program is, which containers hold it, in which order they take their inputs
// (PROTOCOL.md, section 8). It is signed, so the hashes in it vouch for the containers.

import { isCount, KIND_LIMITS } from "./blocks.js";
import { Malformed, shown } from "./errors.js";
import { parseJson, plain } from "./json.js";
import { schemaOf } from "./schema.js";
import { MAX_HEADER_BYTES } from "./tensors.js";
import {
  integer, listOf, mapOf, matching, number, oneOf, optional, orNull, record, required, text, wordOr,
} from "./validators.js";

export const MAX_PROGRAM_BYTES = 1 << 20;
const MAX_CONTAINER_BYTES = 256 << 20;
const MAX_ENTRIES = 32_768; // of any list or map; the file's own limit is lower still
const MAX_DIMS = 8;
const MAX_STEPS = 16; // of a golden run
const DIGEST = 8;
const MAX_TOLERANCE = 0.1;
const LEAST = Number.MIN_VALUE; // above zero

const TEXT = (value, name) => text(512)(value || null, name); // not empty
const COUNT = integer(1);
const SEED = integer(0);
const DIMS = listOf(COUNT, 0, MAX_DIMS);
const FUNCTION = oneOf("step", "evaluate", "infer");
const FILE = oneOf("step", "evaluate", "infer", "frozen");
const PORT = row(TEXT, oneOf("float32", "float64", "int32", "int64"), listOf(wordOr("batch", COUNT), 0, MAX_ENTRIES));
const PORTS = listOf(PORT, 0, MAX_ENTRIES);
const NUMBERS = (low, high) => listOf(number(-Infinity), low, high);
const GOLDEN = record(required({
  seed: SEED, batch: integer(1, 65_536), lr: number(LEAST), pull: number(LEAST), tokens: integer(0, 2 ** 24),
  losses: NUMBERS(1, MAX_STEPS), weights: NUMBERS(DIGEST, DIGEST), buffers: NUMBERS(0, DIGEST), tolerance: number(LEAST, MAX_TOLERANCE),
}));
const ORIGIN = record(required({ model: TEXT, args: jsonArguments, seed: SEED }));
const PROGRAM = record({
  ...required({
    model: TEXT,
    loss: oneOf("cross-entropy", "squared-error"),
    optimizer: oneOf("sgd"),
    schema: listOf(row(TEXT, oneOf("p", "b"), DIMS), 0, MAX_ENTRIES),
    classifier: listOf(TEXT, 0, MAX_ENTRIES),
    input: DIMS,
    target: DIMS,
    dtype: oneOf("float32", "float64"),
    functions: mapOf(FUNCTION, record(required({ inputs: PORTS, outputs: PORTS })), MAX_ENTRIES),
    containers: mapOf(TEXT, mapOf(FILE, record(required({ sha256: matching("[0-9a-f]{64}"), size: COUNT })), MAX_ENTRIES), MAX_ENTRIES),
    batch: mapOf(TEXT, wordOr("any", COUNT), MAX_ENTRIES),
    opset: COUNT,
    versions: mapOf(TEXT, TEXT, MAX_ENTRIES),
    parity: mapOf(TEXT, number(-Infinity), MAX_ENTRIES),
    origin: orNull(ORIGIN),
  }),
  ...optional({
    golden: orNull(mapOf(TEXT, GOLDEN, MAX_ENTRIES)),
    frozen: orNull(listOf(row(TEXT, DIMS), 0, MAX_ENTRIES)),
  }),
});

/** The bytes of program.json -> {model, loss, schema, input, target, dtype, functions, containers, batch, golden, frozen, classes}. */
export async function readProgram(data) {
  let found;
  try {
    const raw = parseJson(data, MAX_PROGRAM_BYTES);
    record({})(raw, "program.json");
    if (!isCount(raw.v, 1, 1)) throw new Malformed("bad_version", `program.json version ${shown(raw.v)}`);
    found = await checked(plain(PROGRAM(raw, "program.json")));
  } catch (wrong) {
    if (wrong.code === "bad_version") throw wrong;
    throw new Malformed("bad_program", `program.json: ${wrong.message}`);
  }
  for (const [name, { size }] of Object.values(found.containers).flatMap(Object.entries)) {
    if (name !== "frozen" && size > MAX_CONTAINER_BYTES) throw new Malformed("too_big", `a container of ${size} bytes, at most ${MAX_CONTAINER_BYTES}`);
  }
  return found;
}

async function checked(program) {
  const { loss, target, classifier, functions, containers, batch } = program;
  if (!target.length || (loss === "cross-entropy" && target.length !== 1)) throw new RangeError(`target [${target}]`);
  const schema = await schemaOf(program.schema);
  const named = (role) => schema.tensors.filter((tensor) => tensor.role === role).map(({ name }) => name);
  if (classifier.some((name) => !named("p").includes(name))) throw new RangeError("classifier names no parameters");
  const golden = program.golden ?? Object.create(null); // absent in the programs of older compilers
  for (const [engine, run] of Object.entries(golden)) {
    if (!containers[engine]?.step || !functions.step) throw new RangeError(`a golden run for ${shown(engine)}, which has no step`);
    if (batch[engine] !== "any" && batch[engine] !== run.batch) throw new RangeError("a golden run of another batch");
    if (run.buffers.length !== (named("b").length ? DIGEST : 0)) throw new RangeError("a golden run of other buffers");
  }
  for (const ports of Object.values(functions)) for (const side of ["inputs", "outputs"]) ports[side] = ports[side].map(portOf);
  const frozen = program.frozen ? await schemaOf(program.frozen.map(([name, shape]) => [name, "p", shape])) : null;
  const files = Object.values(containers).flatMap(({ frozen: file }) => file ?? []);
  if (files.some(({ sha256, size }) => !frozen || sha256 !== files[0].sha256 || size > maxFrozenBytes(frozen))) {
    throw new RangeError("frozen tensors need one file, as large as they are, and a list of what it holds");
  }
  return { ...program, schema, frozen, golden, classes: target.at(-1) };
}

/** The most bytes of their file: a float32 has 4, a single float16 with its scale 6; a header has at most 1 MiB. */
const maxFrozenBytes = (schema) => Math.min(KIND_LIMITS.frozen, 6 * schema.size + MAX_HEADER_BYTES + 8);

const portOf = ([name, dtype, shape]) => ({ name, dtype, shape });

/** A list with one checker for each item. */
function row(...checks) {
  return (value, name) => {
    const items = listOf((item) => item, checks.length, checks.length)(value, name);
    return checks.map((check, i) => check(items[i], `${name}[${i}]`));
  };
}

function jsonArguments(value, name) {
  if (value === null || typeof plain(value) !== "object") throw new RangeError(`${name} is neither an object nor a list`);
  return value;
}
