"""Tasks as messages: `Fit` and `Probe` to the job fields of a `task` message, and back on the device.

Vectors do not travel in messages: `put` stores one as a blob and names it, `get` gives the decoded vector of a
manifest. Both are the caller's, so nothing here knows a disk, a codec, or a connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from edge_client.errors import Malformed
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.task import OWN_MODEL, Fit, Flat, Optimiser, OwnModel, Probe

PutVector = Callable[[Flat, str], Manifest]  # (vector, "model" or "linear") -> the manifest of its stored blob
GetVector = Callable[[Manifest], Flat]  # manifest of a fetched blob -> decoded vector [schema.size]
FIT_PLAIN_FIELDS = ("lr", "momentum", "mu", "steps", "batch", "seed", "rows", "slot", "upload", "buffers", "center")
PROBE_PLAIN_FIELDS = ("batch", "seed", "prior", "split", "limit", "buffers", "label_totals", "least")  # as they are


def task_fields(task: Fit | Probe, put: PutVector) -> dict[str, Any]:
    """The job fields of a `task` message. The same task gives the same fields, so that a replay can be compared."""
    if isinstance(task, Probe):
        return _probe_fields(task, put)
    fields: dict[str, Any] = {
        "job": "fit",
        "start": OWN_MODEL if isinstance(task.start, str) else put(task.start, "model").to_json(),
        "lr": float(task.lr),
        **({"momentum": float(task.momentum)} if task.optimiser is None else {"optimiser": task.optimiser.to_json()}),
        "mu": float(task.mu),
        "steps": int(task.steps),
        "batch": int(task.batch),
        "seed": int(task.seed),
        "rows": task.rows,
        "slot": task.slot,
    }
    fields |= _unusual(task, upload=True, buffers="sent")
    if task.center is not None:
        fields["center"] = int(task.center)
    if task.anchor is not None:
        fields["anchor"] = "start" if task.anchor is task.start else put(task.anchor, "model").to_json()
    if task.init is not None:
        fields["init"] = put(task.init, "model").to_json()
    if task.linear is not None:
        fields["linear"] = put(task.linear, "linear").to_json()
    return fields


def container_functions(fields: Mapping[str, Any]) -> dict[str, str]:
    """Field of a task message that names a file -> the function of the program that the file holds."""
    if fields["job"] == "sum":
        return _sum_functions(fields.get("work"))
    if fields["job"] == "fit" or fields["want"] == ["grad"]:
        return {"container": "step"}
    batch = fields.get("buffers") == "batch"  # a training step tells the statistics of samples
    return {"container": "evaluate"} | ({"step": "step"} if batch else {})


def _sum_functions(work: Mapping[str, Any] | None) -> dict[str, str]:
    if work is None or work["job"] == "fit":
        losses = work is not None and work.get("sum", {}).get("choose") in ("loss", "shares", "posterior")
        return {"container": "evaluate", "step": "step"} if losses else {"container": "step"}
    return container_functions(work)


def _probe_fields(task: Probe, put: PutVector) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "job": "probe",
        "models": [_candidate_fields(model, put) for model in task.models],
        "want": sorted(task.want),
        "batch": int(task.batch),
        "seed": int(task.seed),
        "split": task.split,
    }
    if task.prior is not None:
        fields["prior"] = [float(p) for p in task.prior]
    if task.limit is not None:
        fields["limit"] = int(task.limit)
    if task.label_totals is not None:
        fields["label_totals"] = [None if row is None else [_total(n) for n in row] for row in task.label_totals]
    return fields | _unusual(task, buffers="sent", least=False)


def _total(n: float) -> int | float:
    """A whole number without a point: a message has little room."""
    return int(n) if n == int(n) else float(n)


def _unusual(task: Fit | Probe, **usual: object) -> dict[str, Any]:
    return {name: getattr(task, name) for name, value in usual.items() if getattr(task, name) != value}


def _candidate_fields(model: Flat | OwnModel, put: PutVector) -> dict[str, Any]:
    if isinstance(model, OwnModel):
        spare = {} if model.init is None else {"init": put(model.init, "model").to_json()}
        return {"own": model.slot, **spare}
    return put(model, "model").to_json()


def without_unneeded_inits(message: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """The task without the `init` of every slot in which the device has a model: those need not be fetched."""
    kept = dict(message)
    if "work" in kept:
        kept["work"] = without_unneeded_inits(kept["work"], has)
    if kept.get("start") == OWN_MODEL and "init" in kept and has(kept.get("slot", "main")):
        del kept["init"]
    if "models" in kept:
        kept["models"] = [{"own": m["own"]} if "own" in m and has(m["own"]) else m for m in kept["models"]]
    return kept


def task_manifests(message: Mapping[str, Any]) -> list[Manifest]:
    """The vectors, and the message of a sum, that a device must fetch for this `task`, each blob of a kind once."""
    named = [message.get(field) for field in ("start", "init", "anchor", "linear", "message")]
    added = message.get("sum", {})
    named += [added.get("points"), *added.get("centers", [])]
    named += [model.get("init") if "own" in model else model for model in message.get("models", [])]
    blobs = [Manifest.from_json(value) for value in named if isinstance(value, dict)]
    if "work" in message:
        blobs += task_manifests(message["work"])
    return list({(blob.kind, blob.sha256): blob for blob in blobs}.values())  # a signature is of a kind


def read_task(message: Mapping[str, Any], get: GetVector) -> Fit | Probe:
    """The task of a `task` message (read by messages.read). Each blob is asked of `get` once. Raises Malformed."""
    vectors = {blob.sha256: get(blob) for blob in task_manifests(message)}
    try:
        return _fit(message, vectors) if message["job"] == "fit" else _probe(message, vectors)
    except (KeyError, TypeError, ValueError) as wrong:
        raise Malformed("bad_task", str(wrong)) from wrong


def _fit(message: Mapping[str, Any], vectors: Mapping[str, Flat]) -> Fit:
    def named(field: str) -> Flat | None:
        if message.get(field) == "start":  # the anchor may be the start; not "own", which messages.read refuses
            field = "start"
        return vectors[message[field]["sha256"]] if field in message else None

    start: Flat | Literal["own"] = OWN_MODEL if message["start"] == OWN_MODEL else vectors[message["start"]["sha256"]]
    return Fit(
        start=start,
        init=named("init"),
        anchor=named("anchor"),
        linear=named("linear"),
        optimiser=Optimiser(**message["optimiser"]) if "optimiser" in message else None,
        **{name: message[name] for name in FIT_PLAIN_FIELDS if name in message},
    )


def _probe(message: Mapping[str, Any], vectors: Mapping[str, Flat]) -> Probe:
    def candidate(model: Mapping[str, Any]) -> Flat | OwnModel:
        if "own" not in model:
            return vectors[model["sha256"]]
        return OwnModel(slot=model["own"], init=vectors[model["init"]["sha256"]] if "init" in model else None)

    return Probe(
        models=[candidate(model) for model in message["models"]],
        want=frozenset(message["want"]),
        **{name: message[name] for name in PROBE_PLAIN_FIELDS if name in message},
    )
