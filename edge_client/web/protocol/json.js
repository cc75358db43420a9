// Strict JSON in, canonical JSON out (PROTOCOL.md, section 3). JSON.parse will not do: it takes a key twice, 1e999 and lone
// surrogates, and drops whether a number was written as an integer.

import { Malformed, shown } from "./errors.js";

export const MAX_DEPTH = 8;
export const MAX_INTEGER = Number.MAX_SAFE_INTEGER;
const DIGITS_MAX = 17; // of MAX_INTEGER, with a sign
const DECODER = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const ENCODER = new TextEncoder();
const NUMBER = /-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/y;
const PLAIN = /[^"\\\u0000-\u001f]*/y;
const HEX = /^[0-9a-fA-F]{4}$/;
const ESCAPES = { '"': '"', "\\": "\\", "/": "/", b: "\b", f: "\f", n: "\n", r: "\r", t: "\t" };

/** A number that was written with a point or an exponent: no integer, even where its value is whole. */
export class Real extends Number {}

/** At most `limit` bytes of UTF-8 -> the value; objects have no prototype, fractions are `Real`. Throws Malformed. */
export function parseJson(data, limit) {
  if (data.length > limit) throw new Malformed("too_big", `JSON of ${data.length} bytes, at most ${limit}`);
  let text;
  try {
    text = DECODER.decode(data);
  } catch {
    throw new Malformed("bad_json", "not UTF-8");
  }
  const reader = new Reader(text);
  const value = reader.value(0);
  reader.space();
  if (reader.at !== text.length) reader.refuse("something after the end");
  return value;
}

/** The same value with plain numbers for fractions. */
export function plain(value) {
  if (value instanceof Real) return value.valueOf();
  if (Array.isArray(value)) return value.map(plain);
  if (value === null || typeof value !== "object") return value;
  return Object.assign(Object.create(null), Object.fromEntries(Object.entries(value).map(([k, v]) => [k, plain(v)])));
}

/** Value -> canonical bytes: keys sorted by code point, no spaces, no escapes but those that JSON needs. */
export function canonicalJson(value) {
  return ENCODER.encode(toText(value));
}

/** Two texts in the order of their UTF-8 bytes, which is that of their code points and not of UTF-16. */
export function compareCodePoints(a, b) {
  const left = [...a];
  const right = [...b];
  for (let i = 0; i < left.length && i < right.length; i += 1) {
    if (left[i] !== right[i]) return left[i].codePointAt(0) - right[i].codePointAt(0);
  }
  return left.length - right.length;
}

class Reader {
  constructor(text) {
    this.text = text;
    this.at = 0;
  }

  refuse(why) {
    throw new Malformed("bad_json", `not strict JSON at character ${this.at}: ${why}`);
  }

  space() {
    while (this.at < this.text.length && " \t\n\r".includes(this.text[this.at])) this.at += 1;
  }

  value(depth) {
    this.space();
    const first = this.text[this.at];
    if (first === "{" || first === "[") {
      if (depth === MAX_DEPTH) this.refuse(`nested deeper than ${MAX_DEPTH} levels`);
      return first === "{" ? this.object(depth + 1) : this.array(depth + 1);
    }
    if (first === '"') return this.string();
    for (const [word, value] of [["true", true], ["false", false], ["null", null]]) {
      if (this.text.startsWith(word, this.at)) {
        this.at += word.length;
        return value;
      }
    }
    return this.number();
  }

  object(depth) {
    const found = Object.create(null);
    this.items("}", () => {
      if (this.text[this.at] !== '"') this.refuse("a key is a text");
      const key = this.string();
      this.space();
      this.take(":");
      const value = this.value(depth);
      if (Object.hasOwn(found, key)) this.refuse("the same key twice");
      found[key] = value;
    });
    return found;
  }

  array(depth) {
    const found = [];
    this.items("]", () => found.push(this.value(depth)));
    return found;
  }

  items(end, one) {
    this.at += 1;
    this.space();
    if (this.text[this.at] === end) {
      this.at += 1;
      return;
    }
    for (;;) {
      this.space();
      one();
      this.space();
      if (this.text[this.at] === end) break;
      this.take(",");
    }
    this.at += 1;
  }

  take(wanted) {
    if (this.text[this.at] !== wanted) this.refuse(`expected ${wanted}`);
    this.at += 1;
  }

  string() {
    this.at += 1;
    let out = "";
    for (;;) {
      PLAIN.lastIndex = this.at;
      const run = PLAIN.exec(this.text)[0];
      out += run;
      this.at += run.length;
      const next = this.text[this.at];
      this.at += 1;
      if (next === '"') break;
      if (next !== "\\") this.refuse("a text without end, or a control character in it");
      out += this.escape();
    }
    if (!out.isWellFormed()) this.refuse("a lone surrogate");
    return out;
  }

  escape() {
    const kind = this.text[this.at];
    this.at += 1;
    if (kind === "u") {
      const digits = this.text.slice(this.at, this.at + 4);
      if (!HEX.test(digits)) this.refuse("\\u needs four hex digits");
      this.at += 4;
      return String.fromCharCode(Number.parseInt(digits, 16));
    }
    if (kind === undefined || !Object.hasOwn(ESCAPES, kind)) this.refuse("an unknown escape");
    return ESCAPES[kind];
  }

  number() {
    NUMBER.lastIndex = this.at;
    const found = NUMBER.exec(this.text);
    if (found === null) this.refuse("no value");
    this.at += found[0].length;
    const value = Number(found[0]);
    if (found[1] !== undefined || found[2] !== undefined) {
      if (!Number.isFinite(value)) this.refuse(`number ${shown(found[0])} overflows`);
      return new Real(value);
    }
    if (found[0].length > DIGITS_MAX || Math.abs(value) > MAX_INTEGER) {
      this.refuse(`integer ${shown(found[0])} is beyond 2^53 - 1`);
    }
    return value + 0; // -0 is the integer 0
  }
}

function toText(value) {
  if (value === null || typeof value === "boolean") return String(value);
  if (typeof value === "number" || value instanceof Real) return numberText(value);
  if (typeof value === "string") {
    if (!value.isWellFormed()) throw new Malformed("bad_field", "cannot be written as JSON: a lone surrogate");
    return JSON.stringify(value);
  }
  if (Array.isArray(value)) return `[${value.map(toText).join(",")}]`;
  if (typeof value !== "object") throw new Malformed("bad_field", `cannot be written as JSON: ${shown(value)}`);
  const keys = Object.keys(value).sort(compareCodePoints);
  return `{${keys.map((key) => `${toText(key)}:${toText(value[key])}`).join(",")}}`;
}

function numberText(value) {
  const number = value.valueOf();
  if (!Number.isFinite(number)) throw new Malformed("bad_field", `cannot be written as JSON: ${number}`);
  if (Object.is(number, -0)) return "-0.0"; // "-0" would be read as the integer 0
  const text = String(number);
  const real = value instanceof Real || Math.abs(number) > MAX_INTEGER; // an integer beyond is refused
  return real && Number.isInteger(number) && !text.includes("e") ? `${text}.0` : text;
}
