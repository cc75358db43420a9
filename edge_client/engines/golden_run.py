"""The golden run: a check that a runtime on a device computes what torch computes, for compiler, client and doctor.

A program's golden run (protocol/golden_run.py) is a short training with every term switched on: anchor, linear term,
momentum, mu, and fewer samples in the last step. `golden_inputs` draws it from a seed, `run_golden` trains with an
engine and compares (PROTOCOL.md, section 8). The expected values are torch's, in float64.

Losses and two digests are compared, each relative to its own length. A digest is a sum of the values with drawn signs,
dealt over eight numbers; a wrong value anywhere changes one of them. Weights are judged by how far they moved, since
what they began with is known and would hide a wrong step. Every tensor is divided by the root of its size, or a large
one would hide the small ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edge_client.engines.base import Engine, ports_by_role
from edge_client.engines.targets import port_targets
from edge_client.protocol.golden_run import DIGEST, Golden
from edge_client.protocol.program import Port, Program
from edge_client.protocol.task import Array

POOL = 65_521  # drawn numbers; a prime, so that no row of a weight repeats the row before
PART = 1 << 16  # values of a tensor that are looked at together; a multiple of DIGEST
SMALLEST = float(np.finfo(np.float32).tiny)
Form = Callable[[Array, slice], Array]  # (numbers, their places in the tensor) -> values
MOMENTUM, MU = 0.5, 0.25  # two numbers, so that one in place of the other is seen
SHORT = 0.625  # of the batch, in the last step
SPREAD = 24.0  # over the fan-in: the width of uniform numbers that keep the scale behind a ReLU; He et al. 2015


class Numbers:
    """The drawn numbers of a golden run: POOL uniform ones in [0, 1), read one after another and again from the first.

    Every value of the run is the next number in a form of its own. Forms are computed in float64 and then rounded, a
    part at a time: a board has no memory for a second, wider copy of a model.
    """

    def __init__(self, seed: int) -> None:
        stream = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
        self._pool, self._at = stream.random(POOL, dtype=np.float32).astype(np.float64), 0

    def fill(self, shape: Sequence[int], dtype: str, form: Form) -> Array:
        """Forms of the next numbers in this shape, row by row."""
        out, done = np.empty(math.prod(shape), dtype=dtype), 0
        while done < len(out):
            part = self._pool[self._at : self._at + len(out) - done]
            out[done : done + len(part)] = form(part, slice(done, done + len(part)))
            done, self._at = done + len(part), (self._at + len(part)) % POOL
        return out.reshape(shape)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The inputs: what an update begins with, and what each step reads; `signs` (+1, -1) of the digests by tensor."""

    start: dict[str, Array]
    steps: Sequence[Mapping[str, Array]]
    signs: Mapping[str, Array]


def golden_inputs(program: Program, golden: Golden, *, fixed: bool) -> Run:
    """Draw the run. `fixed`: the engine takes one batch size only, and rows beyond the last step's weigh nothing."""
    numbers, function = Numbers(golden.seed), program.functions["step"]
    fresh = ports_by_role(function)[2]
    start: dict[str, Array] = {}
    for port in (port for port in function.inputs if port not in fresh):
        start[port.name] = _begun(port, numbers, golden, start)
    last = len(golden.losses) - 1
    steps = []
    for k in range(last + 1):
        rows = golden.batch if k < last else max(1, math.floor(SHORT * golden.batch))
        width = golden.batch if fixed else rows
        steps.append({port.name: _read(port, numbers, program, golden, (rows, width)) for port in fresh})
    signs = {name: numbers.fill(start[name].shape, "int8", _sign) for name in _judged(program)}
    return Run(start=start, steps=steps, signs=signs)


def run_golden(engine: Engine, program: Program, golden: Golden, between: Callable[[], None] = lambda: None) -> float:
    """Train, and give the largest relative difference from what is expected; infinite for what is not finite.

    `between` is called before each step.

    As in a real training, nothing but the engine holds what the update began with; and here the memory is taken at once
    by numbers that are not finite, so that a runtime that reads it after it was freed is seen.
    """
    run = golden_inputs(program, golden, fixed=engine.fixed_batch is not None)
    begun = {name: run.start[name].copy() for name in _judged(program, "p")}
    with np.errstate(all="ignore"):  # a runtime that computes wrongly may give anything
        update = engine.update(run.start)
        sizes = [(value.shape, value.dtype) for value in run.start.values()]
        run.start.clear()
        taken = [np.full(shape, np.nan, dtype) for shape, dtype in sizes]
        losses = []
        for fresh in run.steps:
            between()
            losses.append(update.step(fresh))
        taken.clear()
        return golden_difference(golden, losses, digests(program, run.signs, begun, update.read()))


def digests(
    program: Program, signs: Mapping[str, Array], begun: Mapping[str, Array], end: Mapping[str, Array]
) -> tuple[list[float], list[float]]:
    """Of the weights' moves from `begun`, and of the buffers (empty without): DIGEST numbers each."""
    weights, buffers = _judged(program, "p"), _judged(program, "b")
    moves = sum((_dealt(end[name], signs[name], begun[name]) for name in weights), np.zeros(DIGEST))
    ends = sum((_dealt(end[name], signs[name]) for name in buffers), np.zeros(DIGEST))
    return moves.tolist(), ends.tolist() if buffers else []


def golden_difference(golden: Golden, losses: Sequence[float], found: tuple[Sequence[float], Sequence[float]]) -> float:
    """The largest of the three relative differences; infinite where one is not finite."""
    pairs = ((losses, golden.losses), (found[0], golden.weights), (found[1], golden.buffers))
    off = [_relative(np.array(got), np.array(wanted)) for got, wanted in pairs if len(wanted)]
    return max(off) if all(map(math.isfinite, off)) else math.inf  # max() may pass over what is no number


def _dealt(value: Array, signs: Array, start: Array | None = None) -> Array:
    """One tensor's share of a digest, in parts."""
    sums = np.zeros(DIGEST)
    for at in range(0, value.size, PART):
        part = np.ravel(value)[at : at + PART].astype(np.float64)
        if start is not None:
            part -= np.ravel(start)[at : at + PART]
        part *= np.ravel(signs)[at : at + PART]
        sums += np.bincount(np.arange(len(part)) % DIGEST, weights=part, minlength=DIGEST)
    return sums / math.sqrt(value.size)


def _relative(got: Array, wanted: Array) -> float:
    return float(np.linalg.norm(got - wanted)) / max(float(np.linalg.norm(wanted)), SMALLEST)


def _judged(program: Program, roles_: str = "pb") -> list[str]:
    """The ports of these tensors, in the schema's order."""
    return [f"{'w' if t.role == 'p' else 'buffers'}/{t.name}" for t in program.schema.tensors if t.role in roles_]


def _sign(u: Array, _at: slice) -> Array:
    return np.where(u < 0.5, -1, 1)  # noqa: PLR2004 - half of them


def _begun(port: Port, numbers: Numbers, golden: Golden, start: Mapping[str, Array]) -> Array:
    """What an update begins with. Scalars draw nothing; an anchor stands beside its weight."""
    kind, _, name = port.name.partition("/")
    scalars = {"lr": golden.lr, "momentum": MOMENTUM, "mu": MU}
    if kind in scalars:
        return np.array(scalars[kind], dtype=port.dtype)
    shape = tuple(int(d) for d in port.shape)
    width = math.sqrt(SPREAD / max(1, math.prod(shape[1:])))
    forms: dict[str, Form] = {
        # One dimension: biases, and the scales of norms, for which numbers around zero would be too small.
        "w": lambda u, _: (u - 0.5) * width if len(shape) > 1 else 0.5 + 0.5 * (u - 0.5),
        "buffers": lambda u, _: 0.5 + u,  # variances are above zero
        "anchor": lambda u, at: np.ravel(start[f"w/{name}"])[at] + 16.0 * golden.pull * (u - 0.5),
    }
    return numbers.fill(shape, port.dtype, forms.get(kind, lambda u, _: 4.0 * golden.pull * (u - 0.5)))


def _read(port: Port, numbers: Numbers, program: Program, golden: Golden, batch: tuple[int, int]) -> Array:
    """What a step reads: `batch` is (rows that weigh something, rows)."""
    rows, width = batch
    shape = (width, *(int(d) for d in port.shape[1:]))
    if port.name == "y" and program.has_classes:
        labels = numbers.fill((width, *program.truth), "int64", lambda u, _: np.floor(u * program.classes))
        return port_targets(program, labels)
    forms: dict[str, Form] = {
        "x": lambda u, _: np.floor(u * golden.tokens) if golden.tokens else 4.0 * (u - 0.5),
        "y": lambda u, _: u if program.own_loss else 2.0 * (u - 0.5),
        "q": lambda u, at: np.where(np.arange(at.start, at.stop) < rows, (u + 0.5) / rows, 0.0),
    }
    return numbers.fill(shape, port.dtype, forms.get(port.name, lambda u, _: u))  # noise as it was drawn
