// Checkers, from which the tables of message_schemas.js are built: each takes a value and the name to complain about, and gives the
// value back or throws Malformed("bad_field").

import { isCount, readManifestForm } from "./blocks.js";
import { Malformed, shown } from "./errors.js";
import { MAX_INTEGER, Real } from "./json.js";

function bad(name, value, wanted) {
  return new Malformed("bad_field", `${name} is ${shown(value)}; expected ${wanted}`);
}

export const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value) && !(value instanceof Real);

/** An integer from `low` to `high`, written as one. */
export const integer = (low, high = MAX_INTEGER) => (value, name) => {
  if (!isCount(value, low, high)) throw bad(name, value, `an integer from ${low} to ${high}`);
  return value;
};

/** A finite number from `low` to `high`. */
export const number = (low = 0, high = Infinity) => (value, name) => {
  const is = typeof value === "number" || value instanceof Real;
  if (!is || !Number.isFinite(value.valueOf()) || value < low || value > high) throw bad(name, value, `a finite number from ${low} to ${high}`);
  return value;
};

export const oneOf = (...allowed) => (value, name) => {
  if (typeof value !== "string" || !allowed.includes(value)) throw bad(name, value, `one of ${allowed.join(", ")}`);
  return value;
};

/** A text that the whole pattern matches. */
export const matching = (pattern) => {
  const whole = new RegExp(`^(?:${pattern})$`);
  return (value, name) => {
    if (typeof value !== "string" || !whole.test(value)) throw bad(name, value, `the form ${pattern}`);
    return value;
  };
};

/** Any text of at most `limit` code points. */
export const text = (limit) => (value, name) => {
  if (typeof value !== "string" || value.length > 2 * limit || [...value].length > limit) {
    throw bad(name, value, `a text of at most ${limit} characters`);
  }
  return value;
};

export const boolean = (value, name) => {
  if (typeof value !== "boolean") throw bad(name, value, "true or false");
  return value;
};

export const listOf = (item, low, high) => (value, name) => {
  if (!Array.isArray(value) || value.length < low || value.length > high) {
    throw bad(name, value, `a list of ${low} to ${high} items`);
  }
  return value.map((each, i) => item(each, `${name}[${i}]`));
};

export const mapOf = (key, item, high) => (value, name) => {
  if (!isObject(value) || Object.keys(value).length > high) throw bad(name, value, `an object of at most ${high} entries`);
  const found = Object.create(null);
  for (const [k, v] of Object.entries(value)) found[key(k, `a key of ${name}`)] = item(v, `${name}.${k.slice(0, 40)}`);
  return found;
};

/** An object with the fields of `table` ({name: [checker, required]}); other fields are dropped. */
export const record = (table) => (value, name) => {
  if (!isObject(value)) throw bad(name, value, "an object");
  const rows = Object.entries(table);
  const missing = rows.filter(([field, [, needed]]) => needed && !Object.hasOwn(value, field)).map(([field]) => field);
  if (missing.length) throw new Malformed("bad_field", `${name} lacks ${missing.join(", ")}`);
  const found = Object.create(null);
  for (const [field, [check]] of rows) {
    if (Object.hasOwn(value, field)) found[field] = check(value[field], `${name}.${field}`);
  }
  return found;
};

/** An object with exactly the fields of the table ({field: checker}) that its `name` picks, all of them required. */
export const named = (tables) => (value, name) => {
  const word = isObject(value) ? value.name : undefined;
  if (typeof word !== "string" || !Object.hasOwn(tables, word)) throw bad(`${name}.name`, word, `one of ${Object.keys(tables).join(", ")}`);
  const unknown = Object.keys(value).find((field) => field !== "name" && !Object.hasOwn(tables[word], field));
  if (unknown !== undefined) throw bad(name, unknown, `the fields ${Object.keys(tables[word]).join(", ")} of ${word}`);
  return Object.assign(record(required(tables[word]))(value, name), { name: word });
};

/** A manifest of one of `kinds`; the hash of an inline blob is looked at by messages.read. */
export const manifest = (...kinds) => (value, name) => {
  const blob = readManifestForm(value);
  if (!kinds.includes(blob.kind)) throw bad(name, blob.kind, `a manifest of kind ${kinds.join(" or ")}`);
  return blob;
};

/** The given word, or what `other` accepts. */
export const wordOr = (word, other) => (value, name) => (value === word ? value : other(value, name));

/** What `own` accepts if it is an object with `field`, else what `other` accepts. */
export const withField = (field, own, other) => (value, name) =>
  (isObject(value) && Object.hasOwn(value, field) ? own : other)(value, name);

export const orNull = (other) => (value, name) => (value === null ? null : other(value, name));

const table = (checks, needed) => Object.fromEntries(Object.entries(checks).map(([name, check]) => [name, [check, needed]]));
export const required = (checks) => table(checks, true);
export const optional = (checks) => table(checks, false);
