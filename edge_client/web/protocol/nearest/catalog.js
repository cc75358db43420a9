// The catalog of centers (PROTOCOL.md, section 12): read and checked.

import { checkInline, KIND_LIMITS } from "../blocks.js";
import { Malformed } from "../errors.js";
import { integer, listOf, manifest, mapOf, matching, number, optional, orNull, record, required, text } from "../validators.js";
import { parseJson, plain } from "../json.js";
import { MAX_CENTERS } from "../message_schemas.js";

/** What the fleet calls the classes 0, 1, ... */
export const CLASS_NAMES = listOf(text(64), 0, 1024);

const FILES = mapOf(matching("[a-z0-9]{1,16}"), manifest("container"), 16);
const CENTER = record(required({ id: integer(0, MAX_CENTERS - 1), model: manifest("model"), devices: integer(0), files: FILES }));
const CATALOG = record({
  ...required({
    v: integer(0), ver: integer(0), program: manifest("program"), container: FILES,
    centers: listOf(CENTER, 0, MAX_CENTERS), abstain: number(),
  }),
  ...optional({ classes: CLASS_NAMES, router: orNull(manifest("router")) }),
});

/** The blob of kind "catalog" -> {ver, program, container, centers: [{id, model, devices, files}], abstain, [classes], [router]}. */
export async function readCatalog(data) {
  const found = plain(CATALOG(parseJson(data, KIND_LIMITS.catalog), "catalog"));
  if (found.v !== 1) throw new Malformed("bad_version", `catalog version ${found.v}`);
  if (found.centers.some(({ id }, k) => id !== k)) throw new Malformed("bad_field", "the ids of a catalog's centers must count from 0");
  const named = [found.program, ...Object.values(found.container)];
  for (const { model, files } of found.centers) named.push(model, ...Object.values(files));
  await Promise.all(named.map(checkInline));
  return found;
}

/** The center of least mean loss, the lower id on a tie; null when even that is above `abstain`. NaN is no loss. */
export function chooseCenter(losses, abstain) {
  let best = null;
  losses.forEach((loss, k) => {
    if (best === null ? !Number.isNaN(loss) : loss < losses[best]) best = k;
  });
  return best !== null && losses[best] <= abstain ? best : null;
}
