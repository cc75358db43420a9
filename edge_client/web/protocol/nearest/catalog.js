// The catalog of centers (PROTOCOL.md, section 12): read and checked.

import { checkInline, LIMITS } from "../blocks.js";
import { Malformed } from "../errors.js";
import { integer, listOf, manifest, mapOf, matching, number, optional, orNull, record, required, SAFE } from "../validators.js";
import { parse, plain } from "../json.js";
import { CENTERS_MAX } from "../message_schemas.js";

const FILES = mapOf(matching("[a-z0-9]{1,16}"), manifest("container"), 16);
const CENTER = record(required({ id: integer(0, CENTERS_MAX - 1), model: manifest("model"), devices: integer(0, SAFE), files: FILES }));
const CATALOG = record({
  ...required({
    v: integer(0, SAFE), ver: integer(0, SAFE), program: manifest("program"), container: FILES,
    centers: listOf(CENTER, 0, CENTERS_MAX), abstain: number(),
  }),
  ...optional({ router: orNull(manifest("router")) }),
});

/** The blob of kind "catalog" -> {ver, program, container, centers: [{id, model, devices, files}], abstain, router}. */
export async function readCatalog(data) {
  const found = plain(CATALOG(parse(data, LIMITS.catalog), "catalog"));
  if (found.v !== 1) throw new Malformed("bad_version", `catalog version ${found.v}`);
  if (found.centers.some(({ id }, k) => id !== k)) throw new Malformed("bad_field", "the ids of a catalog's centers must count from 0");
  const named = [found.program, ...Object.values(found.container)];
  for (const { model, files } of found.centers) named.push(model, ...Object.values(files));
  await Promise.all(named.map(checkInline));
  return found;
}

/** The center of least mean loss, the lower id on a tie; null when even that is above `abstain`. */
export function choose(losses, abstain) {
  let best = null;
  losses.forEach((loss, k) => {
    if (best === null || loss < losses[best]) best = k;
  });
  return best !== null && losses[best] <= abstain ? best : null;
}
