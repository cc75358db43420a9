// Codecs: a flat vector to a tensor file and back, and the statistics of a probe (PROTOCOL.md, section 6). A flat vector is
// a Float32Array [schema.size]: parameters, then buffers. All arithmetic is float32's, so that both sides agree to the bit.

import { Malformed, shown } from "./errors.js";
import { packTensors, unpackTensors } from "./tensors.js";

const SCALE = "#s";
const LEAST_SCALE = 2 ** -126; // below: subnormal, which some processors flush to zero
const BOUND = 2 ** 127; // from here on, a rounded value times its scale could be infinite
const BITS = new Uint32Array(1);
const FLOAT = new Float32Array(BITS.buffer);

/** To the nearest integer, ties to even. */
export function rint(x) {
  const floor = Math.floor(x);
  const rest = x - floor;
  if (rest !== 0.5) return Math.round(x);
  return floor % 2 === 0 ? floor : floor + 1;
}

/** The bits of the half-precision number nearest to `x`, ties to even. */
export function toHalf(x) {
  FLOAT[0] = x;
  const sign = (BITS[0] >>> 16) & 0x8000;
  const size = Math.abs(FLOAT[0]);
  if (Number.isNaN(size)) return sign | 0x7e00;
  if (size >= 65_520) return sign | 0x7c00;
  if (size < 2 ** -14) return sign | rint(size * 2 ** 24); // subnormal; 1024 is the least normal number
  const exponent = (BITS[0] & 0x7fffffff) >>> 23;
  const mantissa = rint((size / 2 ** (exponent - 127) - 1) * 1024);
  return sign | (((exponent - 112) << 10) + mantissa);
}

/** Half-precision bits -> number. */
export function fromHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const mantissa = bits & 1023;
  if (exponent === 31) return mantissa ? Number.NaN : sign * Infinity;
  return sign * (exponent ? (1024 + mantissa) * 2 ** (exponent - 25) : mantissa * 2 ** -24);
}

const f32 = (name, shape, data) => ({ [name]: { dtype: "F32", shape, data } });

function f16(name, shape, data) {
  checkBound(name, data);
  const most = largest(data, 0, data.length);
  let exponent = most > 0 ? Math.floor(Math.log2(most)) + 1 : 0;
  while (most > 0 && most >= 2 ** exponent) exponent += 1;
  while (most > 0 && most < 2 ** (exponent - 1)) exponent -= 1;
  const scale = most > 0 && 2 ** exponent >= LEAST_SCALE ? 2 ** exponent : 0;
  const stored = Uint16Array.from(data, (value) => (scale ? toHalf(Math.fround(value / scale)) : 0));
  return { [name]: { dtype: "F16", shape, data: stored }, [name + SCALE]: { dtype: "F32", shape: [1], data: Float32Array.of(scale) } };
}

function i8(name, shape, data) {
  if (shape.length < 2) return f32(name, shape, data);
  checkBound(name, data);
  const [rows] = shape;
  const width = data.length / rows;
  const scales = new Float32Array(rows);
  const stored = new Int8Array(data.length);
  for (let row = 0; row < rows; row += 1) {
    const scale = Math.fround(largest(data, row * width, (row + 1) * width) / 127);
    if (scale < LEAST_SCALE) continue;
    scales[row] = scale;
    for (let i = row * width; i < (row + 1) * width; i += 1) {
      stored[i] = Math.max(-127, Math.min(127, rint(Math.fround(data[i] / scale))));
    }
  }
  return { [name]: { dtype: "I8", shape, data: stored }, [name + SCALE]: { dtype: "F32", shape: [rows], data: scales } };
}

const PACKERS = { f32, f16, i8 };

/** [schema.size] -> tensor file. A delta has a `base`. NaN and infinity: Malformed("not_finite"). */
export function encodeVector(flat, schema, { codec, kind, base }) {
  if (!Object.hasOwn(PACKERS, codec)) throw new Malformed("bad_codec", `unknown codec ${shown(codec)}`);
  checkFinite(flat);
  const stored = Object.create(null);
  for (const [name, tensor] of Object.entries(schema.split(flat))) {
    Object.assign(stored, PACKERS[codec](name, tensor.shape, tensor.data));
  }
  return packTensors(stored, { kind, codec, schema: schema.sha256, base });
}

/** Tensor file from anyone -> finite Float32Array [schema.size]. */
export function decodeVector(file, schema, { kind, codec, base }) {
  const { tensors, meta } = unpackTensors(file);
  if (meta.kind !== kind) throw new Malformed("bad_schema", `the file holds a ${meta.kind}, expected a ${kind}`);
  if ((codec !== undefined && meta.codec !== codec) || (base !== undefined && meta.base !== base)) {
    throw new Malformed("bad_codec", `codec ${meta.codec} on base ${meta.base}; expected ${codec} on ${base}`);
  }
  if (meta.schema !== schema.sha256) throw new Malformed("bad_schema", `the file's schema is ${meta.schema}`);
  checkForm(tensors, formOf(schema, meta.codec));
  const flat = new Float32Array(schema.size);
  for (const { name } of schema.tensors) {
    dequantize(name, tensors[name], tensors[name + SCALE], flat.subarray(...schema.spans[name]));
  }
  checkFinite(flat);
  return flat;
}

/** Q(delta + residual) as a file, and what it lost [schema.size]. */
export function encodeWithFeedback(delta, residual, schema, { codec, base }) {
  const wanted = residual ? delta.map((value, i) => value + residual[i]) : delta;
  const data = encodeVector(wanted, schema, { codec, kind: "delta", base });
  const sent = decodeVector(data, schema, { kind: "delta" });
  return { data, residual: wanted.map((value, i) => value - sent[i]) };
}

/** {loss, votes, posterior: numbers [M], inputs: numbers, answers: numbers [M][d], confusion: numbers [M][C][C], errors: numbers [M][3], grad: [n_params], labels: [C]} -> a file of kind "stats". */
export function encodeStats(reply, schema) {
  const stored = Object.create(null);
  const vector = (dtype, Type, values) => ({ dtype, shape: [values.length], data: Type.from(values) });
  for (const name of ["loss", "posterior", "labels", "inputs"]) if (reply[name]) stored[name] = vector("F64", Float64Array, reply[name]);
  if (reply.votes) stored.votes = vector("I64", BigInt64Array, reply.votes.map(BigInt));
  if (reply.confusion) {
    const shape = [reply.confusion.length, reply.confusion[0].length, reply.confusion[0].length];
    stored.confusion = { dtype: "I64", shape, data: BigInt64Array.from(reply.confusion.flat(2).map(BigInt)) };
  }
  for (const name of ["answers", "errors"]) if (reply[name]) {
    const shape = [reply[name].length, reply[name][0].length];
    stored[name] = { dtype: "F64", shape, data: Float64Array.from(reply[name].flat()) };
  }
  if (reply.grad) {
    for (const [name, tensor] of Object.entries(schema.split(reply.grad, true))) {
      stored[`grad/${name}`] = { dtype: "F32", ...tensor };
    }
  }
  for (const { dtype, data } of Object.values(stored)) if (dtype !== "I64") checkFinite(data);
  return packTensors(stored, { kind: "stats", codec: "f32", schema: schema.sha256 });
}

function largest(data, begin, end) {
  let most = 0;
  for (let i = begin; i < end; i += 1) most = Math.max(most, Math.abs(data[i]));
  return most;
}

function checkBound(name, data) {
  if (largest(data, 0, data.length) >= BOUND) {
    throw new Malformed("not_finite", `tensor ${shown(name)} has values of 2^127 and more; only f32 carries them`);
  }
}

function checkFinite(values) {
  for (let i = 0; i < values.length; i += 1) {
    if (!Number.isFinite(values[i])) throw new Malformed("not_finite", "values are NaN or infinite");
  }
}

function formOf(schema, codec) {
  const form = Object.create(null);
  for (const { name, shape } of schema.tensors) {
    if (codec === "f16") Object.assign(form, { [name]: ["F16", shape], [name + SCALE]: ["F32", [1]] });
    else if (codec === "i8" && shape.length > 1) Object.assign(form, { [name]: ["I8", shape], [name + SCALE]: ["F32", [shape[0]]] });
    else form[name] = ["F32", shape];
  }
  return form;
}

function checkForm(tensors, form) {
  const odd = [...Object.keys(tensors).filter((k) => !(k in form)), ...Object.keys(form).filter((k) => !(k in tensors))];
  if (odd.length) throw new Malformed("bad_schema", `${odd.length} tensors too many or missing, for example ${shown(odd[0])}`);
  for (const [name, [dtype, shape]] of Object.entries(form)) {
    const found = tensors[name];
    if (found.dtype !== dtype || found.shape.join() !== shape.join()) {
      throw new Malformed("bad_schema", `tensor ${shown(name)} is ${found.dtype} [${found.shape}], expected ${dtype} [${shape}]`);
    }
  }
}

function dequantize(name, stored, scale, into) {
  if (scale === undefined) {
    into.set(stored.data);
    return;
  }
  checkFinite(scale.data);
  if (scale.data.some((s) => s < 0) || (stored.dtype === "I8" && stored.data.includes(-128))) {
    throw new Malformed("bad_codec", `tensor ${shown(name)} has a negative scale or a -128; no encoder writes those`);
  }
  const half = stored.dtype === "F16";
  const width = into.length / scale.data.length;
  for (let i = 0; i < into.length; i += 1) {
    into[i] = (half ? fromHalf(stored.data[i]) : stored.data[i]) * scale.data[Math.floor(i / width)];
  }
}
