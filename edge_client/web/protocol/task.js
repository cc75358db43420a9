// What a `task` message names: the functions whose files it needs, and the vectors that a device must fetch.

/** {field of the message that names a file: function of the program that the file holds}. */
export function containerFunctions(task) {
  if (task.job === "sum") return task.work?.job === "probe" ? containerFunctions(task.work) : sumFunctions(task.work);
  if (task.job === "fit" || task.want[0] === "grad") return { container: "step" };
  return task.buffers === "batch" ? { container: "evaluate", step: "step" } : { container: "evaluate" };
}

/** Centers are chosen by losses, or by the trained model. */
function sumFunctions(fit) {
  const losses = ["loss", "shares", "posterior"].includes(fit?.sum?.choose);
  return losses ? { container: "evaluate", step: "step" } : { container: "step" };
}

/** The slots whose `init` the task would have fetched, were no model kept in them. */
export function initSlots(task) {
  if (task.job === "sum") return task.work ? initSlots(task.work) : [];
  if (task.job === "fit") return [task.slot ?? "main"];
  return task.models.filter((model) => "own" in model).map((model) => model.own);
}

/** The task without the `init` of every slot of `kept`: those need not be fetched. */
export function withoutUnneededInits(task, kept) {
  const found = { ...task };
  if (found.work) found.work = withoutUnneededInits(found.work, kept);
  if (found.start === "own" && kept.has(found.slot ?? "main")) delete found.init;
  if (found.models) found.models = found.models.map((m) => ("own" in m && kept.has(m.own) ? { own: m.own } : m));
  return found;
}

/** The manifests of the vectors, and of the message of a sum, that a device must fetch, each blob of a kind once: a signature is of a kind. */
export function taskManifests(task) {
  const named = [task.start, task.init, task.anchor, task.linear, task.message, task.sum?.points, ...(task.sum?.centers ?? [])];
  if (task.work) named.push(...taskManifests(task.work));
  named.push(...(task.models ?? []).map((model) => ("own" in model ? model.init : model)));
  const blobs = named.filter((value) => value !== null && typeof value === "object");
  return [...new Map(blobs.map((blob) => [blob.kind + blob.sha256, blob])).values()];
}
