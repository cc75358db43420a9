"""What must hold of each combination over a broker (real_cases.py).

It is refused before its first task, by an error that names one of its options and says what to do; what is refused in
one process is refused over a broker. Or it runs to its end. Its rounds, its assignment and its centers are then those
of the same run in one process: to the bit, but for a lossy codec and sums, whose difference is rounding. What depends
on time (no rounds, over-selection, a late device, the coordinator's own noise) is compared with nothing. The folder of
the result is read again as the same, and the file that a new device finds is a center of the run. No thread ends with
an exception, and no log has one.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import fedcenters as fc
from coordinator.strategies.registry import make_method
from edge_client.errors import ConfigError, UsageError
from edge_client.nearest.result import NearestAnswer
from emulator.api.result import Result
from tests.support.drawn_cases import DrawnCase
from tests.support.drawn_runs import ROUNDS
from tests.support.real_cases import DEVICES, fleet_of, model_of
from tests.support.real_runs import RealRun
from tests.support.run_promises import SAME, BrokenPromise, told_by_name

OF_SIMULATION = (
    *("codec", "evaluate_every", "fraction_evaluate", "concurrency", "buffer", "max_staleness", "seed", "engine"),
)
UNEQUAL = {"concurrency", "over_select", "privacy-noise"}
TOLD: tuple[str, ...] = (
    "of",
    "assignment",
    "per_device",
    "per_center",
    "accuracy",
    "f1_of_devices",
    "f1_pooled",
    "loss",
    "centers",
)
LOSSY = 1e-5  # a device's float32 update differs in its last bit, and so its word by one level


def judge_real(url: str, case: DrawnCase) -> tuple[str, str]:
    """-> ("runs" | "refused", what to print), with the broker at `url`. Raises BrokenPromise, and what ended a run."""
    options = case.options
    fleet, module = fleet_of(options.get("fleet", "")), model_of(options.get("fleet", ""))
    given: dict[str, Any] = {key: options[key] for key in OF_SIMULATION if key in options}
    refused, virtual = "", None
    try:
        method = make_method(case.method, **case.asked)
        virtual = fc.simulate(
            method, fleet=fleet, model=module, rounds=ROUNDS, progress=False, **{"engine": "onnx", **given}
        )
    except (ConfigError, UsageError) as wrong:
        refused = told_by_name(wrong, case)
    with tempfile.TemporaryDirectory() as name, _no_exception_in_logs():
        try:
            method = make_method(case.method, **case.asked)
            run = RealRun.of(case, Path(name), url, method=method, fleet=fleet, module=module)
            answer = run.play()
        except (ConfigError, UsageError) as wrong:
            return "refused", told_by_name(wrong, case)
        if virtual is None:
            raise BrokenPromise(f"over a broker it runs, in one process it is refused: {refused}")
        real = run.result()
        _check_rounds(real)
        if not UNEQUAL & {*case.settings, *options} and options.get("event") != "late":
            _check_same(real, virtual, case)
        _check_read_again(real, Path(name) / "saved")
        if answer is not None:
            _check_found(real, run, answer)
    return "runs", ""


@contextmanager
def _no_exception_in_logs() -> Iterator[None]:
    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info:
                heard.append(self.format(record))

    heard, ear = list[str](), Ear()
    logging.getLogger().addHandler(ear)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(ear)
    if heard:
        raise BrokenPromise(f"in the log: {heard[0]}")


def _check_rounds(real: Result) -> None:
    json.dumps(real.run.records, allow_nan=False)
    if (found := [record["round"] for record in real.run.records]) != list(range(1, ROUNDS + 1)):
        raise BrokenPromise(f"rounds {found}")
    if not np.isfinite(real.run.state.centers).all():
        raise BrokenPromise("a center is not finite")


def _check_same(real: Result, virtual: Result, case: DrawnCase) -> None:
    ours, theirs, told, most = real.run.state, virtual.run.state, TOLD, 0.0
    if case.options.get("codec", "f32") != "f32":
        told, most = TOLD[:-2], LOSSY
    if "secure" in case.settings:  # a word is rounded up or down by lot, and so are the counts of a test
        level = 2 * DEVICES * float(case.asked["secure-clip"]) / 2 ** int(case.settings.get("secure-bits", 32))
        told, most = TOLD[:2], LOSSY + 10 * level
    if ours.centers.shape != theirs.centers.shape or ours.assignment != theirs.assignment:
        raise BrokenPromise(f"{len(ours.centers)} centers, {ours.assignment}: in one process {theirs.assignment}")
    if (off := float(np.abs(ours.centers - theirs.centers).max())) > most:
        raise BrokenPromise(f"centers are {off} off those of one process")
    for record, other in zip(real.run.records, virtual.run.records, strict=True):
        for key in told:
            if record.get(key) != other.get(key):
                raise BrokenPromise(f"round {record['round']} {key}: {record.get(key)}, not {other.get(key)}")
        if record.get("refused", {}).keys() != other.get("refused", {}).keys():
            raise BrokenPromise(f"refused {record.get('refused')}, in one process {other.get('refused')}")


def _check_read_again(real: Result, place: Path) -> None:
    again = fc.load(real.save(place))
    same = (again.run.state.centers == real.run.state.centers).all() and list(again.rows()) == list(real.rows())
    if not same or dict(again.run.state.assignment) != dict(real.run.state.assignment):
        raise BrokenPromise("the saved folder is another result")


def _check_found(real: Result, run: RealRun, answer: NearestAnswer) -> None:
    """The file that a new device finds does on its held-out samples what that center of the run does."""
    found, held = len(fc.read_bundle(run.folder / "bundle").manifest["centers"]), run.split.devices[run.names[0]].test
    if found != len(real.run.state.centers):
        raise BrokenPromise(f"{found} centers in the bundle of {len(real.run.state.centers)}")
    if answer.center is None or answer.accuracy is None or held is None:
        return
    accuracy = float((real.predict(held.x, center=answer.center) == held.y).mean())
    if abs(accuracy - answer.accuracy) > SAME:
        raise BrokenPromise(f"center {answer.center}: {answer.accuracy} of the new device, {accuracy} of the run")
