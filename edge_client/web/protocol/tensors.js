// Named arrays as bytes: safetensors files with the protocol's rules on top (PROTOCOL.md, section 6). A tensor is
// {dtype, shape, data: a typed array}. Little-endian machines only,
// which all browsers' are.

import { isCount } from "./blocks.js";
import { equal } from "./bytes.js";
import { Malformed, shown } from "./errors.js";
import { canonicalJson, compareCodePoints, parseJson } from "./json.js";
import { CODECS } from "./message_schemas.js";
import { MAX_MESSAGE_BYTES } from "./messages.js";

export const MAX_HEADER_BYTES = 1 << 20;
export const MAX_TENSORS = 4_096;
const MAX_DIMS = 8;
const VERSION = 1;
const SHA256 = /^[0-9a-f]{64}$/;
const KINDS = ["model", "linear", "delta", "stats", "sketch", "frozen"];
// name -> array class (F16 as its bits), in the order in which safetensors 0.8 writes them
export const DTYPES = {
  I64: BigInt64Array, F64: Float64Array, F32: Float32Array, I32: Int32Array, F16: Uint16Array, I8: Int8Array, U8: Uint8Array,
};
const ORDER = Object.keys(DTYPES);

/** The product of a shape, or a number above any file where it would not be exact. */
export function sizeOf(shape) {
  let size = 1;
  for (const dim of shape) {
    size *= dim;
    if (size > Number.MAX_SAFE_INTEGER) return Infinity;
  }
  return size;
}

/** {name: tensor}, {kind, codec, schema, base} -> one tensor file. */
export function packTensors(tensors, meta) {
  const fc = checkedMeta({ v: VERSION, ...meta });
  const names = Object.keys(tensors).sort(
    (a, b) => ORDER.indexOf(tensors[a].dtype) - ORDER.indexOf(tensors[b].dtype) || compareCodePoints(a, b),
  );
  if (!names.length || names.length > MAX_TENSORS) throw new Malformed("bad_schema", `${names.length} tensors`);
  const entries = [`"__metadata__":${JSON.stringify({ fc: new TextDecoder().decode(canonicalJson(fc)) })}`];
  let at = 0;
  for (const name of names) {
    const { dtype, shape, data } = tensors[name];
    const end = at + data.byteLength;
    entries.push(`${JSON.stringify(name)}:${JSON.stringify({ dtype, shape, data_offsets: [at, end] })}`);
    at = end;
  }
  const header = new TextEncoder().encode(`{${entries.join(",")}}`);
  const length = Math.ceil(header.length / 8) * 8;
  const file = new Uint8Array(8 + length + at).fill(0x20, 8, 8 + length);
  new DataView(file.buffer).setUint32(0, length, true);
  file.set(header, 8);
  let begin = 8 + length;
  for (const name of names) {
    const { data } = tensors[name];
    file.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), begin);
    begin += data.byteLength;
  }
  return file;
}

/** A tensor file from anyone -> {tensors: {name: tensor}, meta}. Malformed on anything out of order. */
export function unpackTensors(file) {
  const { header, start } = readHeader(file);
  const meta = readMeta(header.__metadata__);
  delete header.__metadata__;
  const names = Object.keys(header);
  if (!names.length || names.length > MAX_TENSORS) throw new Malformed("bad_schema", `${names.length} tensors`);
  for (const name of names) checkEntry(name, header[name]);
  checkCover(Object.values(header).map((entry) => entry.data_offsets), file.length - start);
  const tensors = Object.create(null);
  for (const name of names) {
    const { dtype, shape, data_offsets: [begin, end] } = header[name];
    tensors[name] = { dtype, shape, data: new DTYPES[dtype](file.slice(start + begin, start + end).buffer) };
  }
  return { tensors, meta };
}

function readHeader(file) {
  if (file.length < 8) throw new Malformed("bad_schema", `tensor file of ${file.length} bytes`);
  const view = new DataView(file.buffer, file.byteOffset, file.byteLength);
  const length = view.getUint32(4, true) * 2 ** 32 + view.getUint32(0, true);
  if (length > MAX_HEADER_BYTES || length % 8 || 8 + length > file.length) {
    throw new Malformed("bad_schema", `header of ${length} bytes: a multiple of 8 up to ${MAX_HEADER_BYTES}, in the file`);
  }
  const text = file.subarray(8, 8 + length);
  if (text[0] !== 0x7b) throw new Malformed("bad_schema", "the header does not start with '{'");
  return { header: parseStrict(text, MAX_HEADER_BYTES, "header"), start: 8 + length };
}

function parseStrict(text, limit, what) {
  try {
    return parseJson(text, limit);
  } catch (wrong) {
    throw new Malformed("bad_schema", `${what}: ${wrong.message}`);
  }
}

function keysOf(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value) ? Object.keys(value).sort().join() : "";
}

function readMeta(metadata) {
  if (keysOf(metadata) !== "fc" || typeof metadata.fc !== "string") {
    throw new Malformed("bad_schema", "__metadata__ must hold one text, fc");
  }
  const text = new TextEncoder().encode(metadata.fc);
  const fc = parseStrict(text, MAX_MESSAGE_BYTES, "fc");
  if (!["codec,kind,schema,v", "base,codec,kind,schema,v"].includes(keysOf(fc))) {
    throw new Malformed("bad_schema", "fc holds v, kind, codec, schema, and base for a delta");
  }
  if (!isCount(fc.v, VERSION, VERSION)) throw new Malformed("bad_version", `tensor file version ${shown(fc.v)}`);
  if (!equal(canonicalJson(fc), text) || Object.entries(fc).some(([k, v]) => k !== "v" && typeof v !== "string")) {
    throw new Malformed("bad_schema", "fc is not canonical JSON of texts");
  }
  return checkedMeta(fc);
}

function checkedMeta({ v, kind, codec, schema, base }) {
  if (!KINDS.includes(kind)) throw new Malformed("bad_schema", `tensor file of kind ${shown(kind)}`);
  if (!CODECS.includes(codec)) throw new Malformed("bad_codec", `codec ${shown(codec)}`);
  if (!SHA256.test(schema)) throw new Malformed("bad_schema", `schema ${shown(schema)} is no sha256`);
  if ((kind === "delta") !== (base !== undefined) || !(base === undefined || base === "zero" || SHA256.test(base))) {
    throw new Malformed("bad_codec", `a delta names its base and nothing else does; ${kind} has ${shown(base)}`);
  }
  return { v, kind, codec, schema, ...(base === undefined ? {} : { base }) };
}

function checkEntry(name, entry) {
  const refuse = (why) => {
    throw new Malformed("bad_schema", `tensor ${shown(name)} ${why}`);
  };
  if (keysOf(entry) !== "data_offsets,dtype,shape") refuse("needs dtype, shape and data_offsets, nothing else");
  const { dtype, shape, data_offsets: offsets } = entry;
  if (typeof dtype !== "string" || !Object.hasOwn(DTYPES, dtype)) refuse(`has dtype ${shown(dtype)}`);
  if (!Array.isArray(shape) || shape.length > MAX_DIMS || !shape.every((d) => isCount(d, 1))) {
    refuse(`has shape ${shown(shape)}`);
  }
  if (!Array.isArray(offsets) || offsets.length !== 2 || !offsets.every((o) => isCount(o, 0))) {
    refuse(`has offsets ${shown(offsets)}`);
  }
  const item = DTYPES[dtype].BYTES_PER_ELEMENT;
  if (offsets[1] - offsets[0] !== sizeOf(shape) * item || offsets[0] % item) refuse("does not fit its bytes");
}

function checkCover(spans, bodyBytes) {
  let at = 0;
  for (const [begin, end] of spans.sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
    if (begin !== at) throw new Malformed("bad_schema", `tensor data has a hole or an overlap at byte ${Math.min(at, begin)}`);
    at = end;
  }
  if (at !== bodyBytes) throw new Malformed("bad_schema", `tensors cover ${at} of ${bodyBytes} bytes`);
}
