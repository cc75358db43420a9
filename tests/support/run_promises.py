"""What must hold of each combination of options (drawn_cases.py).

It is refused before its first round, by an error that names one of its options and says what to do. Or it runs to its
end. The same seed then gives the same bits with the devices listed in another order, after an interruption, divided
among workers, and with samples drawn when they are used. Evaluations change no center. Numbers are finite, shares are
0 to 1, averages are those of the devices' numbers, and centers do what the record says. No warning of Python leaks.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from coordinator.rounds.round_record import RoundRecord
from coordinator.storage import state_codec
from coordinator.strategies.common.assignment import serving_center
from edge_client.errors import ConfigError, FedcentersError, UsageError
from edge_client.protocol.task import ClientId, OwnModel
from emulator.run.execute import SimulationResult
from tests.support.drawn_cases import DrawnCase, simpler
from tests.support.drawn_runs import ROUNDS, DrawnWorld, drawn_devices, worker_threads


class BrokenPromise(Exception):
    """What does not hold of a case."""


GOOD = ("runs", "refused")
Judge = Callable[[DrawnCase], tuple[str, str]]  # -> ("runs" | "refused" | "broken", what to print)
SAME = 1e-9  # sums of the same numbers in another order


def judge(case: DrawnCase) -> tuple[str, str]:
    """The verdict on a run in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return verdict_of(_judge, case)


def verdict_of(judged: Judge, case: DrawnCase) -> tuple[str, str]:
    """What `judged` says of a case, or what it raises."""
    try:
        return judged(case)
    except BrokenPromise as wrong:
        return "broken", str(wrong)
    except Exception:  # noqa: BLE001 - whatever a case may raise is told
        return "broken", traceback.format_exc(limit=-6)


def _judge(case: DrawnCase) -> tuple[str, str]:
    try:
        world = DrawnWorld.of(case)
    except (ConfigError, UsageError) as refused:
        return "refused", told_by_name(refused, case)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        whole = world.play(place / "whole")
        _check_records(world, whole)
        _check_served(world, whole)
        _check_centers(world, whole)
        for what, other in _other_ways(case, world, place):
            _check_same(whole, other, what)
    if not {"profiles", "deadline_s", "concurrency"} & case.options.keys():  # else what happens depends on the time
        with tempfile.TemporaryDirectory() as name:
            rarely = replace(world.settings, evaluation=replace(world.settings.evaluation, every=ROUNDS))
            other = replace(world, settings=rarely).play(Path(name))
        if other.state.centers.tobytes() != whole.state.centers.tobytes():
            raise BrokenPromise("with fewer evaluations other centers")
    return "runs", ""


def told_by_name(refused: FedcentersError, case: DrawnCase) -> str:
    """What a refusal says. Raises BrokenPromise where it names no option of the case, or says not what to do."""
    told = f"{refused.message}; {refused.hint}"
    named = [word for key in (*case.settings, *case.options, case.method) for word in (key, key.replace("_", "-"))]
    named += ["model"] if case.options.get("fleet") == "buffered" else []  # which has another one
    if not refused.hint or not any(re.search(rf"(?<![\w-]){re.escape(word)}(?!\w)", told) for word in named):
        raise BrokenPromise(f"a refusal that names no option of the case: {told}") from refused
    return told


def _other_ways(case: DrawnCase, world: DrawnWorld, place: Path) -> Iterator[tuple[str, SimulationResult]]:
    """The same run in other ways, and how."""
    yield "devices listed in another order", world.play(place / "again", local=dict(reversed([*world.local.items()])))
    for stop in range(1, ROUNDS):
        world.play(place / f"cut-{stop}", stop=stop)
        yield f"resumed after round {stop}", world.play(place / f"cut-{stop}", resume=True)
    if count := case.options.get("workers"):
        with worker_threads(world, count) as devices:
            yield "divided among workers", world.play(place / "workers", devices=devices)
        world.play(place / "cut-workers", stop=1)
        with worker_threads(world, count) as devices:
            yield "resumed with workers", world.play(place / "cut-workers", devices=devices, resume=True)
    if case.options.get("fleet") == "drawn":
        yield "samples drawn when they are used", world.play(place / "drawn", local=drawn_devices(world))


def smallest(case: DrawnCase, judged: Judge = judge) -> tuple[DrawnCase, str]:
    """A case that is broken with any value less, and what is broken of it."""
    for other in simpler(case):
        if judged(other)[0] == "broken":
            return smallest(other, judged)
    return case, judged(case)[1]


def one_that_runs(case: DrawnCase, seed: int, judged: Judge = judge) -> Iterator[tuple[DrawnCase, str, str]]:
    """The verdict on the case and, as long as it is refused, on the same with one value less."""
    rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
    while True:
        verdict, said = judged(case)
        yield case, verdict, said
        others = list(simpler(case))
        if verdict != "refused" or not others:
            return
        case = rng.choice(others)


def _check_records(world: DrawnWorld, result: SimulationResult) -> None:
    if [record["round"] for record in result.records] != list(range(1, ROUNDS + 1)):
        raise BrokenPromise(f"rounds {[record['round'] for record in result.records]}")
    for record in result.records:
        json.dumps(record, allow_nan=False)
        _check_numbers(world, record)
        _check_averages(world, record)
        _check_metric(record)
    if not np.isfinite(result.state.centers).all():
        raise BrokenPromise("a center is not finite")
    encoded = state_codec.encode_state(result.state)
    if state_codec.encode_state(state_codec.decode_state(encoded)) != encoded:
        raise BrokenPromise("the state is another one after it was stored")


def _check_numbers(world: DrawnWorld, record: RoundRecord) -> None:
    shares = [*record["per_device"].values(), *record["accuracy"].values(), *record["f1_of_devices"].values()]
    shares += [*record["per_center"], record["answered"]]
    if not all(share is None or 0 <= share <= 1 for share in shares):  # type: ignore[operator]  # of a TypedDict
        raise BrokenPromise(f"a share is not 0 to 1: {shares}")
    if not set(record["assignment"]) <= set(world.local):
        raise BrokenPromise("a device that is none has a center")
    if not set(record["assignment"].values()) <= {*range(len(record["per_center"]))}:
        raise BrokenPromise(f"{record['assignment']} of {len(record['per_center'])} centers")
    if min(record["bytes"]["down"], record["bytes"]["up"], record["seconds"], record["local_steps"]) < 0:
        raise BrokenPromise(f"{record['bytes']}, {record['seconds']} s, {record['local_steps']} steps")


def _check_metric(record: RoundRecord) -> None:
    """A metric of the user's own that computes the accuracy finds what the devices tell."""
    mine = record.get("metrics", {})["mine"]["per_device"] if "metrics" in record else {}
    for who in record["per_device"].keys() & mine.keys():
        if abs(mine[who] - record["per_device"][who]) > SAME:
            raise BrokenPromise(f"{who}: accuracy {record['per_device'][who]}, by an own metric {mine[who]}")


def _check_centers(world: DrawnWorld, result: SimulationResult) -> None:
    """What the last record tells of the centers is what they do by themselves on the samples that test."""
    last, right = result.records[-1], _accuracies(world, result)
    if "centers" in last:
        told = {(k, c): a for k, devices in enumerate(last["centers"]["per_device"]) for c, a in devices.items()}
    else:  # each device is served its center
        usual = serving_center(result.state.assignment, None)
        told = {(last["assignment"].get(c, usual), c): a for c, a in last["per_device"].items()}
    for (k, who), accuracy in told.items():
        if abs(accuracy - right[who][k]) > SAME:
            raise BrokenPromise(f"center {k} on {who}: told {accuracy}, found {right[who][k]}")
    summed = last["accuracy"]["micro"] if "secure" in last and "centers" not in last else None
    if summed is not None and len(result.state.centers) == 1 and last["answered"] == 1:
        tested = [len(one.test) for one in world.local.values() if one.test is not None]
        found = float(np.average([shares[0] for shares in right.values()], weights=tested))
        if abs(summed - found) > SAME:
            raise BrokenPromise(f"the only center: a sum tells {summed}, found {found}")


def _accuracies(world: DrawnWorld, result: SimulationResult) -> dict[ClientId, list[float]]:
    """The share of right answers of each center on the samples of each device that test."""
    found: dict[ClientId, list[float]] = {}
    for who, one in world.local.items():
        if one.test is not None:
            outputs = world.learner.evaluate(list(result.state.centers), one.test, batch=8)[1]
            found[who] = [float((of_center.argmax(axis=1) == one.test.y).mean()) for of_center in outputs]
    return found


def _check_averages(world: DrawnWorld, record: RoundRecord) -> None:
    """Averages over devices are those of the devices' own numbers."""
    tested = {who: len(one.test) for who, one in world.local.items() if one.test is not None}
    each = dict(record["per_device"])
    if not each:
        return
    told = np.array([record["accuracy"]["micro"], record["accuracy"]["macro"]], dtype=np.float64)
    micro = sum(tested[c] * a for c, a in each.items()) / sum(tested[c] for c in each)
    if not np.allclose(told, [micro, float(np.mean([*each.values()]))], rtol=0, atol=SAME):
        raise BrokenPromise(f"accuracy {record['accuracy']} of devices with {each}")
    for k, of_center in enumerate(record["per_center"]):
        mine = [c for c in each if record["assignment"].get(c) == k]
        found = sum(tested[c] * each[c] for c in mine) / sum(tested[c] for c in mine) if mine else None
        if (of_center is None) != (found is None) or abs((of_center or 0.0) - (found or 0.0)) > SAME:
            raise BrokenPromise(f"center {k} has {of_center}, its devices {found}")


def _check_served(world: DrawnWorld, result: SimulationResult) -> None:
    for who in [*world.local, "stranger", None]:
        mixture = world.strategy.predictor(result.state, who)
        weights = np.array([weight for weight, _ in mixture])
        if abs(weights.sum() - 1) > SAME or (weights < 0).any():
            raise BrokenPromise(f"{who} is served {weights}")
        if any(not isinstance(m, OwnModel) and not np.isfinite(m).all() for _, m in mixture):
            raise BrokenPromise(f"{who} is served a model that is not finite")


def _check_same(one: SimulationResult, other: SimulationResult, what: str) -> None:
    for number, (first, second) in enumerate(zip(one.records, other.records, strict=True), 1):
        if first != second:
            mine, its = dict(first), dict(second)
            keys = [key for key in mine if mine[key] != its.get(key)]
            raise BrokenPromise(f"{what}: round {number} has another {', '.join(keys)}")
    states = [replace(r.state, assignment=dict(r.state.assignment)) for r in (one, other)]
    if state_codec.encode_state(states[0]) != state_codec.encode_state(states[1]):
        raise BrokenPromise(f"{what}: another state")
    if one.virtual_seconds != other.virtual_seconds:
        raise BrokenPromise(f"{what}: other seconds")
    points = [[(m.round, m.who, m.points.tobytes()) for m in r.kept.moments] for r in (one, other)]
    if points[0] != points[1]:
        raise BrokenPromise(f"{what}: other points of pictures")
