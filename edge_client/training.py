"""What a device does with a task: numpy over an Engine. The real client and the emulator run this same code.

`fit` runs SGD steps, `probe` evaluates candidate models. Models are flat vectors [schema.size]. No network, no disk, no
clock, no randomness but the task's seed. What cannot be done raises Malformed with the protocol's code for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_client.dataset import Dataset, Local, batches
from edge_client.engines.base import Engine, step
from edge_client.errors import Malformed
from edge_client.noise import noise
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array, Fit, Flat, OwnModel, Probe, Reply, Schema, Tensors

F64 = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """The trained model [schema.size] in the program's dtype, and the mean training loss over all steps."""

    vector: Flat
    loss: float


def fit(  # noqa: PLR0913 - what a task needs, and two things that only some have
    engine: Engine,
    program: Program,
    task: Fit,
    data: Dataset,
    *,
    own: Flat | None = None,
    posterior: Array | None = None,
    between: Callable[[], None] = lambda: None,
) -> FitResult:
    """Run the task's SGD steps on `data`.

    `own` [schema.size] is the device's own model in the task's slot, if it has one; `posterior` [M, n] are the
    responsibilities that the last probe left on the device, for `task.rows = "posterior:m"`. `between` is called before
    each step; what it raises ends the training.
    """
    _fits(program, data)
    weights = _row_weights(task, data, posterior)
    if engine.fixed_batch is not None and engine.fixed_batch != task.batch:
        raise Malformed("bad_task", f"batch {task.batch}, but this program runs batches of {engine.fixed_batch}")
    update = engine.update(_kept(program, task, _start(task, own)))
    losses = []
    order = batches(len(data), task.batch, task.seed, task.steps, fixed=engine.fixed_batch is not None)
    for k, index in enumerate(order):
        between()
        drawn = noise(program, task.seed, k, len(index))
        losses.append(update.step(_batch(program, data, index, weights[index] / len(index)) | drawn))
    vector = _flat(program.schema, update.read())
    if not np.isfinite(vector).all():
        raise Malformed("not_finite", f"training diverged; the learning rate {task.lr} may be too high")
    return FitResult(vector=vector, loss=float(np.mean(losses)))


def probe(
    engine: Engine,
    program: Program,
    task: Probe,
    local: Local,
    *,
    own: Callable[[str], Flat | None] = lambda slot: None,  # noqa: ARG005 - named for its readers
    keep: Callable[[F64], None] = lambda posterior: None,  # noqa: ARG005
) -> Reply:
    """Evaluate the task's models on the asked split; the reply holds what was asked for and nothing else.

    `own` gives the device's model [schema.size] in a slot, if it has one. `keep` is handed the responsibilities [M, n]
    of a probe of all training samples for "posterior": they stay on the device, for the fits that follow.
    """
    data = _probed(task, local)
    _fits(program, data)
    models, want = [_candidate(model, own) for model in task.models], task.want
    if "grad" in want:
        return Reply(n=len(data), grad=_gradient(engine, program, task, models, data))
    losses, logits = evaluate(engine, program, models, data, batch=task.batch)
    shares = responsibilities(losses, task.prior) if "posterior" in want else None
    if shares is not None and task.split == "train" and len(data) == len(local.train):
        keep(shares)
    return Reply(
        n=len(data),
        losses=losses.mean(axis=1) if "loss" in want else None,
        votes=np.bincount(losses.argmin(axis=0), minlength=len(losses)) if "votes" in want else None,
        posterior=None if shares is None else shares.mean(axis=1),
        confusion=_confusion(program, logits, data.y, task.prior) if "confusion" in want else None,
    )


def evaluate(
    engine: Engine, program: Program, models: Sequence[Flat], data: Dataset, *, batch: int
) -> tuple[F64, Array]:
    """-> per-sample losses [M, n] float64 and logits [M, n, classes], batch norm in inference mode.

    An engine with a fixed batch gets the last batch padded; the padded rows are dropped, which is exact in this mode.
    """
    width = engine.fixed_batch or batch
    losses = np.empty((len(models), len(data)), dtype=np.float64)
    logits: list[list[Array]] = [[] for _ in models]
    feeds = [_model(program, model) for model in models]
    for start in range(0, len(data), width):
        index = np.arange(start, min(start + width, len(data)))
        padded = np.resize(index, width) if engine.fixed_batch else index
        samples = _samples(program, data, padded)
        for m, model in enumerate(feeds):
            result = engine.evaluate(model | samples)
            losses[m, index] = result["loss"][: len(index)]
            logits[m].append(result["logits"][: len(index)])
    return losses, np.stack([np.concatenate(parts) for parts in logits])


def responsibilities(losses: F64, prior: Sequence[float] | None = None) -> F64:
    """[M, n] losses and prior weights [M] (uniform when absent) -> [M, n], each column sums to 1."""
    weight = np.ones(len(losses)) if prior is None else np.asarray(prior, dtype=np.float64)
    with np.errstate(divide="ignore"):  # a weight of zero is a log of minus infinity: no responsibility
        score = np.log(weight)[:, None] - losses
    top = score.max(axis=0)
    if not np.isfinite(top).all():
        raise Malformed("bad_task", "every prior weight is zero, or a loss is not finite")
    share: F64 = np.exp(score - top)
    share /= share.sum(axis=0)
    return share


def _fits(program: Program, data: Dataset) -> None:
    if len(data) == 0:
        raise Malformed("no_data", "no samples on this device")
    if data.x.shape[1:] != program.input:
        raise Malformed("bad_program", f"the program reads samples of shape {program.input}, not {data.x.shape[1:]}")
    if np.issubdtype(data.y.dtype, np.integer):
        if program.loss == "squared-error":
            raise Malformed("bad_program", "the program predicts numbers, but the device holds class labels")
        if data.y.max() >= program.classes:
            raise Malformed("bad_program", f"label {data.y.max()}, but the program has {program.classes} classes")
    elif data.y.shape[1:] != program.target:
        raise Malformed("bad_program", f"the program has targets of shape {program.target}, not {data.y.shape[1:]}")


def _row_weights(task: Fit, data: Dataset, posterior: Array | None) -> F64:
    if task.rows == "ones":
        return np.ones(len(data))
    m = int(task.rows.removeprefix("posterior:"))
    if posterior is None or m >= len(posterior) or posterior.shape[1:] != (len(data),):
        raise Malformed("no_posterior", f"rows {task.rows!r}, but no probe left such weights for {len(data)} samples")
    return np.asarray(posterior[m], dtype=np.float64)


def _start(task: Fit, own: Flat | None) -> Flat:
    if isinstance(task.start, np.ndarray):
        return task.start
    start = own if own is not None else task.init
    if start is None:
        raise Malformed("no_own_model", f"no model in slot {task.slot!r}, and the task brings none")
    return start


def _candidate(model: Flat | OwnModel, own: Callable[[str], Flat | None]) -> Flat:
    if not isinstance(model, OwnModel):
        return model
    kept = own(model.slot)
    found = kept if kept is not None else model.init
    if found is None:
        raise Malformed("no_own_model", f"no model in slot {model.slot!r}, and the task brings none")
    return found


def _kept(program: Program, task: Fit, start: Flat) -> dict[str, Array]:
    """What an update keeps between its steps. Velocity starts at zero; an absent anchor has no force (mu = 0)."""
    zero = np.zeros(program.schema.size)
    feeds = _model(program, start)
    for prefix, vector in (("velocity", None), ("anchor", task.anchor), ("linear", task.linear)):
        feeds |= _named(program, prefix, zero if vector is None else vector, role="p")
    for name in ("lr", "momentum", "mu"):
        feeds[name] = np.asarray(getattr(task, name), dtype=program.dtype)
    return feeds


def _model(program: Program, model: Flat) -> dict[str, Array]:
    return _named(program, "w", model, role="p") | _named(program, "buffers", model, role="b")


def _named(program: Program, prefix: str, flat: Flat, *, role: str) -> dict[str, Array]:
    if flat.shape != (program.schema.size,):
        raise Malformed("bad_schema", f"a model of shape {flat.shape}, the program has {program.schema.size} values")
    arrays = program.schema.split(flat)
    return {
        f"{prefix}/{t.name}": np.ascontiguousarray(arrays[t.name], dtype=program.dtype)
        for t in program.schema.tensors
        if t.role == role
    }


def _flat(schema: Schema, feeds: Tensors) -> Flat:
    prefix = {"p": "w", "b": "buffers"}
    return schema.join({t.name: feeds[f"{prefix[t.role]}/{t.name}"] for t in schema.tensors})


def _batch(program: Program, data: Dataset, index: NDArray[np.int64], q: F64) -> dict[str, Array]:
    """What every step reads anew: `x` [b, ...], `y` [b, ...] and the weights `q` [b] of the samples."""
    return _samples(program, data, index) | {"q": q.astype(program.dtype)}


def _samples(program: Program, data: Dataset, index: NDArray[np.int64]) -> dict[str, Array]:
    """`x` [b, ...] and `y`: one-hot [b, classes] for class labels, the targets as they are otherwise."""
    y = data.y[index]
    if np.issubdtype(y.dtype, np.integer):
        y = np.eye(program.classes, dtype=program.dtype)[y]
    return {"x": data.x[index].astype(program.dtype), "y": y.astype(program.dtype)}


def _probed(task: Probe, local: Local) -> Dataset:
    data = local.train if task.split == "train" else local.test
    if data is None:
        raise Malformed("no_data", "no held-out samples on this device")
    if task.limit is None or task.limit >= len(data):
        return data
    index = np.random.Generator(np.random.PCG64(task.seed)).permutation(len(data))[: task.limit]
    return Dataset(data.x[index], data.y[index])


def _gradient(engine: Engine, program: Program, task: Probe, models: Sequence[Flat], data: Dataset) -> Flat:
    """[n_params] mean gradient of the only model: the velocity after a step from zero velocity, summed over batches.

    Rows that pad a fixed batch weigh nothing; under batch norm they would still count, so there the rest is dropped.
    """
    if len(models) != 1:
        raise Malformed("bad_task", f"a gradient is taken of one model, got {len(models)}")
    still = Fit(start=models[0], steps=1, lr=0.0, batch=task.batch, seed=task.seed)
    kept = _kept(program, still, models[0])
    names = [f"velocity/{t.name}" for t in program.schema.tensors if t.role == "p"]
    parts = list(_weighted_batches(engine, program, len(data), task.batch))
    used = sum(float(q.sum()) for _, q in parts)
    total = np.zeros(program.schema.n_params)
    for k, (index, q) in enumerate(parts):
        drawn = noise(program, task.seed, k, len(index))
        result = step(
            engine, kept | _batch(program, data, index, q / used) | drawn
        )  # each from the buffers that were sent
        total += np.concatenate([np.ravel(result[name]) for name in names])
    return total.astype(program.dtype)


def _weighted_batches(engine: Engine, program: Program, n: int, batch: int) -> Iterator[tuple[NDArray[np.int64], F64]]:
    width = engine.fixed_batch or batch
    for start in range(0, n, width):
        index = np.arange(start, min(start + width, n))
        if engine.fixed_batch is None or len(index) == width:
            yield index, np.ones(len(index))
        elif program.schema.n_params == program.schema.size:
            yield np.resize(index, width), (np.arange(width) < len(index)).astype(np.float64)
        elif n < width:
            raise Malformed("no_data", f"{n} samples, a batch needs {width}")


def _confusion(program: Program, logits: Array, y: Array, prior: Sequence[float] | None) -> NDArray[np.int64]:
    """[M, C, C] counts, rows true class, columns predicted; with `prior` [1, C, C] of the mixture of probabilities."""
    if program.loss != "cross-entropy":
        raise Malformed("bad_task", "a confusion matrix needs a classifier")
    truth = y if np.issubdtype(y.dtype, np.integer) else y.argmax(axis=-1)
    scores = logits.astype(np.float64)
    if prior is not None:
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        scores = np.tensordot(np.asarray(prior, dtype=np.float64), p, axes=1)[None]
    c = program.classes
    cells = truth * c + scores.argmax(axis=-1)  # [M, n]
    return np.stack([np.bincount(row, minlength=c * c).reshape(c, c) for row in cells])
