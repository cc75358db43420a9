"""Compute a program's golden run with torch in float64, and run it on each container (engines/golden_run.py).

The inputs of the run are drawn from a seed. Some seeds cannot judge a float32 program: next to the kink of a ReLU
rounding alone decides (program_parity.py). The first of a few seeds at which torch's own float32 agrees with float64 is
used. A deep network has kinks at every seed, and a run of it takes long: with each further seed the best of them may be
off by a little more. Rounding also grows from step to step: with each further seed the run is a step shorter, to half.
The learning rate and the size of the pulls follow from the gradient at the start, so that every term contributes to
each step and a step moves a weight by about a hundredth; less where the gradient is so small that this learning rate
would make the pull to the anchor overshoot in every step.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from edge_client.engines.base import open_engine, ports_by_role
from edge_client.engines.golden_run import MOMENTUM, MU, Run, digests, golden_difference, golden_inputs, run_golden
from edge_client.errors import ProgramRefused
from edge_client.protocol.golden_run import Golden
from edge_client.protocol.program import FROZEN, Program
from edge_client.protocol.task import Array
from export.compiler.hints.difference_hints import not_finite_hint, saturation_hint
from export.compiler.program_functions import TraceSource, call_module, example_inputs, tensors_of, whole_numbers
from export.compiler.program_parity import torch_step
from export.compiler.signatures.lasting_state import kept_hint
from export.diagnostics import quiet_warnings
from export.float64_mode import as_in

BATCH = 8  # for engines that take any batch size
BATCH_OF_LARGE, LARGE = 2, 4_096  # where a sample's output has more numbers: a device needs memory for all of them
STEPS, STEPS_MIN = 10, 3
WORK = 2.5e9  # multiplications and additions of a whole run: under a second of one core of a small board
TOLERANCE = 1e-2  # a correct runtime differs by 1e-6 to 1e-4, a missing term by more than 0.1
CLEAR = 1e-4  # a difference of torch's float32 below this: no kink is near; times as much for as many seeds
SEEDS = 8
STRIDE = 256.0  # the part of a weight that a step moves: a weight over a pull
STEEPEST = 2 * (1 + MOMENTUM) / MU  # learning rates from here on carry a weight ever farther from its anchor


def checked_run(
    source: TraceSource,
    program: Program,
    files: Mapping[str, Mapping[str, bytes]],
    *,
    fixed: int | None,
    progress: Callable[[str], None] = lambda _: None,
) -> Golden:
    """The run that the containers `files` of engines with this batch size make as torch does; None: they take any.

    Another seed is tried where one of them does not: in a deep network torch's float32 may pass each kink on the side
    of its float64, and a right container not. A wrong one is off again. Raises ProgramRefused.
    """
    hint = partial(saturation_hint, source)
    found = golden_run(source, program, fixed=fixed)
    for last in (False, True):
        told = replace(program, golden=dict.fromkeys(files, found))
        try:
            for engine, made in files.items():
                progress(f"{engine} in the golden run")
                check_golden(told, engine, made, hint=hint)
            break
        except ProgramRefused:
            if last:
                raise
        found = golden_run(source, program, fixed=fixed, first=found.seed + 1)
    return found


def golden_run(source: TraceSource, program: Program, *, fixed: int | None, first: int = 0) -> Golden:
    """The run for engines with this fixed batch size, or None for those that take any; `first`: the seed to try first.

    Raises ProgramRefused where torch's float32 disagrees with its float64 at every seed.
    """
    best, least = None, math.inf
    free = BATCH if math.prod(source.target) <= LARGE else BATCH_OF_LARGE
    for tried, golden in enumerate(_candidates(source, program, free if fixed is None else fixed, first), start=1):
        run = golden_inputs(program, golden, fixed=fixed is not None)
        told = _answered(source, program, golden, run, "float64")
        if told is None:
            continue
        off = 0.0 if source.dtype == "float64" else _own(source, program, told, run)
        if off < least:
            best, least = told, off
        if least <= CLEAR * tried:
            break
    if best is None or not least <= TOLERANCE / 2:
        finite = math.isfinite(least)
        off_by = f"float32 is {least:.0e} off" if finite else "numbers are not finite"
        raise ProgramRefused(
            f"model {source.name!r} has no golden run: from drawn weights torch's own {off_by}",
            hint=((saturation_hint(source) or kept_hint(source.module)) if finite else not_finite_hint(source))
            or "scale what the model computes from its weights: no device could check its runtime with this one",
        )
    return best


def check_golden(program: Program, engine: str, files: Mapping[str, bytes], *, hint: Callable[[], str] = str) -> float:
    """The difference of the containers of `engine` from their golden run.

    Raises ProgramRefused above its tolerance, with the text of `hint` where it is not empty.
    """
    golden = program.golden[engine]
    with tempfile.TemporaryDirectory() as scratch:
        held = {name: Path(scratch) / name for name in ("step", FROZEN) if name in files}
        for name, path in held.items():
            path.write_bytes(files[name])
        found = run_golden(open_engine(engine, program, held, device="cpu"), program, golden)
    if not found <= golden.tolerance:
        raise ProgramRefused(
            f"model {program.model!r} on {engine} is {found:.1e} off in {len(golden.losses)} steps, "
            f"at most {golden.tolerance:.0e}",
            hint=hint()
            or f"leave {engine} out of the engines and report the model, or install another version of its runtime",
        )
    return found


def _candidates(source: TraceSource, program: Program, batch: int, first: int) -> Iterator[Golden]:
    steps = _steps(source, batch)
    fewest = steps if saturation_hint(source) else max(STEPS_MIN, steps // 2)  # a sigmoid rounds to 1 late in a run
    for tried in range(SEEDS):
        draft = Golden(
            seed=first + tried,
            batch=batch,
            lr=1.0,
            pull=1.0,
            tokens=whole_numbers(source),
            losses=(0.0,) * max(fewest, steps - tried),
            weights=(),
            buffers=(),
            tolerance=TOLERANCE,
        )
        pull = _gradient(source, program, draft)
        if not (math.isfinite(pull) and pull > 0):
            continue
        weights = np.concatenate([np.ravel(a) for n, a in _start(program, draft).items() if n.startswith("w/")])
        wanted = _power(_size(weights) / (STRIDE * pull))
        yield replace(draft, pull=_power(pull), lr=min(wanted, 2.0 ** math.floor(math.log2(STEEPEST))))


def _steps(source: TraceSource, batch: int) -> int:
    """The number of steps, fewer for a large model. Work is counted and not timed, so a program is reproducible."""
    count = FlopCounterMode(display=False)
    detached = tensors_of(source.module)  # torch's counter takes a view of a weight that wants a gradient for a mistake
    with quiet_warnings(), as_in(source.dtype), count, torch.no_grad():
        call_module(source.module.eval(), detached, example_inputs(source, "infer", 1)[-1])
    work = 3 * batch * (count.get_total_flops() + 2 * source.schema.n_params)  # a backward pass costs twice a forward
    return max(STEPS_MIN, min(STEPS, int(WORK / max(1, work))))


def _start(program: Program, golden: Golden) -> Mapping[str, Array]:
    return golden_inputs(program, replace(golden, losses=(0.0,)), fixed=True).start


def _gradient(source: TraceSource, program: Program, draft: Golden) -> float:
    """The root mean square of the first step's gradient."""
    run = golden_inputs(program, replace(draft, losses=(0.0,)), fixed=True)
    zero = {n: np.zeros_like(a) for n, a in run.start.items() if n.startswith(("velocity/", "linear/"))}
    given = {**run.start, **zero, "mu": np.array(0.0), "momentum": np.array(0.0), **run.steps[0]}
    stepped = torch_step(source, {n: torch.tensor(a, dtype=torch.float64) for n, a in given.items()}, "float64")
    return _size(np.concatenate([np.ravel(v.numpy()) for n, v in stepped.items() if n.startswith("velocity/")]))


def _answered(source: TraceSource, program: Program, golden: Golden, run: Run, dtype: str) -> Golden | None:
    """The run with torch's losses and digests; None where these are not finite."""
    losses, end = _trained(source, program, run, dtype)
    weights, buffers = digests(program, run.signs, run.start, end)
    if not np.isfinite([*losses, *weights, *buffers]).all() or not any(weights):
        return None
    rows = [tuple(float(f"{v:.9g}") for v in row) for row in (losses, weights, buffers)]
    return replace(golden, losses=rows[0], weights=rows[1], buffers=rows[2])


def _own(source: TraceSource, program: Program, told: Golden, run: Run) -> float:
    """The difference of torch's float32 from its float64."""
    losses, end = _trained(source, program, run, "float32")
    return golden_difference(told, losses, digests(program, run.signs, run.start, end))


def _trained(source: TraceSource, program: Program, run: Run, dtype: str) -> tuple[list[float], dict[str, Array]]:
    """Torch's loss per step, and the final weights, buffers and velocities by port name."""
    kind = getattr(torch, dtype)
    held = {name: torch.tensor(array, dtype=kind) for name, array in run.start.items()}
    names, losses = [port.name for port in ports_by_role(program.functions["step"])[0]], []
    for fresh in run.steps:
        stepped = torch_step(source, held | {n: torch.tensor(a, dtype=kind) for n, a in fresh.items()}, dtype)
        losses.append(float(stepped["loss"].detach()))
        held |= {name: stepped[name].detach() for name in names}
    return losses, {name: held[name].numpy() for name in names}


def _size(values: Array) -> float:
    """The root of the mean square."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def _power(value: float) -> float:
    """The nearest power of two, which every number format holds exactly."""
    return float(2.0 ** round(math.log2(value)))
