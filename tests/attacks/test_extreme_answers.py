"""Tries to end a run, or to ruin its models, by answers of the right form whose numbers are extreme: in each method."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from coordinator.rounds.metrics import Scoring, make_report, other_scores
from coordinator.rounds.round_record import round_record
from coordinator.rounds.sample_weights import max_samples
from coordinator.rounds.update_validation import ReplySpec, delta_base, validate_reply
from edge_client.errors import Malformed
from edge_client.protocol.codecs import check_scores
from edge_client.protocol.task import ClientId, Fit, Probe, Reply, Task
from tests.support.methods import CASES, MethodWorld, build, world
from tests.support.softmax_program import CLASSES, grouped_fleet

MOST = 1.7e308
LOSSES = {"huge": (MOST, MOST), "of either sign": (MOST, -MOST), "next to nothing": (5e-324, 0.0)}
FLEET = grouped_fleet(6, 2)
LIAR = "d00"


def lied(task: Task, said: Reply, kind: str, n_params: int) -> Reply:
    """The reply with each number as far as the checks of a single reply let it go."""
    first, last = LOSSES[kind]
    more: dict[str, object] = {}
    if said.losses is not None and isinstance(task, Probe):
        more["losses"] = np.where(np.arange(len(said.losses)) % 2, last, first)
    if said.votes is not None:
        more["votes"] = np.where(np.arange(len(said.votes)) == 0, said.n, 0)
    if said.posterior is not None:
        more["posterior"] = (np.arange(len(said.posterior)) == 0).astype(np.float64)
    if said.labels is not None:
        more["labels"] = np.where(np.arange(len(said.labels)) == 0, min(first, 2.0**31), 0.0)
    if said.grad is not None:
        more["grad"] = np.full_like(said.grad, 9.9)
    if said.update is not None:
        base = delta_base(task)[1]
        told = np.zeros_like(said.update) if base is None else base.astype(said.update.dtype)
        told[n_params:] = said.update[n_params:]
        more["update"] = np.where(np.arange(len(told)) < n_params, told + 9.9, told)
    return replace(said, **more)  # type: ignore[arg-type]  # fields of a reply


def let_one_lie(fleet: MethodWorld, kind: str) -> None:
    honest, schema, most = fleet.devices.answer, fleet.schema, max_samples(list(fleet.fleet.values()), 10.0)

    def answer(who: ClientId, task: Task) -> Reply:
        said = honest(who, task)
        if who != LIAR:
            return said
        base = delta_base(task)[1] if isinstance(task, Fit) else None
        about = {"codec": "f32", "base": "", "base_vector": base, "max_update_rms": 10.0, "classes": CLASSES}
        spec = ReplySpec(task=task, schema=schema, samples=fleet.fleet[who], max_samples=most, **about)  # type: ignore[arg-type]  # each by its name
        try:
            return validate_reply(spec, lied(task, said, kind, schema.n_params))
        except Malformed:
            return Reply(n=said.n)  # refused

    fleet.devices.answer = answer  # type: ignore[method-assign]


@pytest.mark.parametrize("case", CASES)
def test_extreme_numbers_of_one_device_end_no_run_and_leave_all_numbers_finite(case: str) -> None:
    for kind in LOSSES:
        fleet = world(build(case), FLEET)
        let_one_lie(fleet, kind)
        for _ in range(3):
            report = fleet.round()
        assert np.isfinite(fleet.state.centers).all()
        assert all(np.isfinite(array).all() for array in fleet.state.extra.values() if array.dtype.kind == "f")
        assert report.loss.micro is None or np.isfinite(report.loss.micro)


def test_a_device_that_alone_is_asked_for_a_test_ends_no_run() -> None:
    """A variance next to nothing gave an r2 of -inf, which no record holds: the coordinator ended at each start."""
    numbers = (0.0, 5e-324, 1e-300, 1.0, 9.9e29, 1e154, MOST)
    scoring = Scoring(want=frozenset({"errors", "positions", "loss"}), signed=True, perplexity=True)
    for three in product(numbers, repeat=3):
        told, alone = np.array([three]), Reply(n=2**31, losses=np.array([-three[0]]))
        for reply in (replace(alone, errors=told), replace(alone, positions=told)):
            try:
                check_scores(reply.errors, reply.positions, reply.n)
            except Malformed:
                continue
            with np.errstate(all="ignore"):
                labels = {} if reply.positions is None else {LIAR: (three[0], three[1])}
                losses, samples = {LIAR: -three[0]}, {LIAR: reply.n}
                report = make_report(
                    {}, {LIAR: 0}, n_centers=1, losses=losses, counted_labels=labels, samples=samples, signed=True
                )
                report = replace(report, scores=other_scores({LIAR: reply}, scoring))
            counted = {"bytes_down": 0, "bytes_up": 0, "seconds": 0.0}
            json.dumps(round_record(report, run="r", method="fedavg", round=1, of=1, **counted), allow_nan=False)  # type: ignore[arg-type]  # each by its name
