// The tensors of a model in order, parameters first, and the flat vector that holds them one after another.

import { sha256 } from "./bytes.js";
import { compareCodePoints, canonicalJson } from "./json.js";
import { sizeOf } from "./tensors.js";

const MAX_DIMS = 8;

/** Made by `schemaOf`; `spans[name]` is where a tensor lies in the flat vector [size]. */
export class Schema {
  constructor(tensors, hash) {
    this.tensors = tensors;
    this.sha256 = hash;
    this.spans = Object.create(null);
    let at = 0;
    for (const { name, shape } of tensors) {
      this.spans[name] = [at, at + sizeOf(shape)];
      [, at] = this.spans[name];
    }
    this.size = at;
    this.nParams = tensors.filter(({ role }) => role === "p").reduce((sum, { shape }) => sum + sizeOf(shape), 0);
  }

  /** [size] (or [nParams] with `paramsOnly`) -> {name: {shape, data: a view}}. */
  split(flat, paramsOnly = false) {
    const wanted = paramsOnly ? this.nParams : this.size;
    if (flat.length !== wanted) throw new RangeError(`vector of ${flat.length} values, the schema has ${wanted}`);
    const chosen = this.tensors.filter(({ role }) => !paramsOnly || role === "p");
    const found = Object.create(null);
    for (const { name, shape } of chosen) found[name] = { shape, data: flat.subarray(...this.spans[name]) };
    return found;
  }
}

/** [[name, role, shape], ...] -> Schema; throws RangeError for rows that no model has. */
export async function schemaOf(rows) {
  const tensors = rows.map(([name, role, shape]) => ({ name, role, shape }));
  const roles = tensors.map(({ role }) => role).join("");
  if (!/^p*b*$/.test(roles) || !tensors.length) throw new RangeError("parameters come before buffers in a schema");
  if (new Set(tensors.map(({ name }) => name)).size < tensors.length) throw new RangeError("a tensor name twice");
  for (const { name, shape } of tensors) {
    if (!name || name.includes("#")) throw new RangeError(`tensor name ${name}`);
    if (shape.length > MAX_DIMS || shape.some((d) => d < 1)) throw new RangeError(`shape of ${name} is [${shape}]`);
  }
  const sorted = [...rows].sort((a, b) => compareCodePoints(a[0], b[0]));
  return new Schema(tensors, await sha256(canonicalJson(sorted)));
}
