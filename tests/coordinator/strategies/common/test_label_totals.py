"""Label totals have as many digits as a task has room for, and what passes the check before the first round fits."""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.config_sections import RunConfig
from coordinator.rounds.label_counting import check_label_totals
from coordinator.runtime.exchange.live_exchange import LiveExchange
from coordinator.runtime.exchange.task_messages import prepare_tasks
from coordinator.runtime.training_loop import RunTrainer
from coordinator.storage.event_log import EventLog
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.strategies.base import State
from coordinator.strategies.common.label_totals import (
    MODEL_BYTES,
    OWN_BYTES,
    TASK_BYTES,
    TOTALS_KEY,
    check_room,
    label_totals_of,
)
from coordinator.strategies.registry import make_method
from edge_client.errors import ConfigError
from edge_client.protocol import task_codec
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.messages import MAX_MESSAGE_BYTES, canonical_json, read_message, write_message
from edge_client.protocol.task import F64, MAX_LABEL_TOTALS, MAX_MODELS, Flat, OwnModel, Probe
from edge_client.training.label_prior import LABEL_PRIOR_SAMPLES
from emulator.run.execute import open_run
from emulator.run.settings import RunSettings
from tests.support.softmax_program import devices_of, grouped_fleet, program, start_of
from tests.support.virtual_time import VirtualClock
from tests.support.wired_coordinator import DEVICES, WiredCoordinator

FITTING = [(k, MAX_LABEL_TOTALS // k) for k in range(1, MAX_MODELS + 1)]  # centers and classes: the most that may be
OF_A_CLASSIFIER = frozenset({"loss", "votes", "posterior", "confusion", "inputs", "answers"})
LONGEST_WEIGHT = 1.2345678901234567e-100


def state_of(totals: F64) -> State:
    """Centers that are told apart, with these label totals."""
    centers = np.repeat(np.arange(len(totals), dtype=np.float32)[:, None], 4, axis=1)
    return State(centers=centers, extra={TOTALS_KEY: totals})


def told(totals: F64) -> F64:
    """[K, C] what a probe of all centers is told."""
    state = state_of(totals)
    rows = label_totals_of(state, list(state.centers))
    assert rows is not None
    return np.array(rows, dtype=np.float64)


def longest_manifest(kind: str, size: int) -> Manifest:
    """Signed but for that of a container, which the program names."""
    named = hashlib.sha256(kind.encode()).hexdigest()
    manifest = Manifest(sha256=named, size=size, block=1 << 20, kind=kind)
    return manifest if kind == "container" else replace(manifest, key="0" * 16, sig="0" * 128)


def longest_task(probe: Probe) -> bytes:
    """The task with everything else as long as a coordinator can make it.

    It is sent by its ten billionth start, after 30 years of an exchange, in the year 5138.
    """
    started, sent = 10**10 - 1, 10**12 - 1
    container = longest_manifest("container", 1 << 28).to_json()
    facts: dict[str, Any] = {
        "epoch": started,
        "left_ms": 10**12 - 1,
        "run": "0" * 16,
        "round": 2**32 - 1,
        "exchange": 2**32 - 1,
        "program": longest_manifest("program", 1 << 20).to_json(),
        "container": container,
        "step": container,
        "schema": "0" * 64,
        "reply": {"codec": "f32", "base": "zero", "max_size": 4 << 30},
    }
    fields = task_codec.task_fields(probe, lambda _, kind: longest_manifest(kind, 4 << 30))
    return write_message("task", ident=f"c{started}-{sent}", t_ms=10**14 - 1, **facts, **fields)


def longest_probe(models: list[Flat | OwnModel], totals: list[list[int | float] | None] | None) -> Probe:
    return Probe(
        models=models,
        want=OF_A_CLASSIFIER,
        batch=65_536,
        seed=2**53 - 1,
        prior=[LONGEST_WEIGHT] * len(models),
        split="train",
        limit=2**31,
        buffers="batch",
        label_totals=totals,
    )


KINDS: dict[str, Any] = {
    "fractions": lambda rng, shape: 100 * rng.random(shape),
    "thousands": lambda rng, shape: rng.integers(1_000, 10_000, shape).astype(float),
    "millions and one": lambda rng, shape: np.where(rng.random(shape) < 0.5, 1.0, 1e6 * rng.random(shape)),
    "the fractions of one device among many": lambda rng, shape: (
        rng.integers(10_000, 20_000, shape) + rng.random(shape)
    ),
    "more than there are": lambda rng, shape: 1e15 * rng.random(shape),
    "hardly any": lambda rng, shape: 0.01 * rng.random(shape),
    "just below a thousand": lambda rng, shape: 999.4 + 0.2 * rng.random(shape),
    "just below ten": lambda rng, shape: 9.94 + 0.02 * rng.random(shape),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("centers", "classes"), FITTING)
def test_the_longest_task_of_as_many_totals_as_pass_the_check_fits_a_message(
    kind: str, centers: int, classes: int
) -> None:
    check_room(centers, classes)
    state = state_of(KINDS[kind](np.random.default_rng(0), (centers, classes)))
    models = list(state.centers)
    message = longest_task(longest_probe(models, label_totals_of(state, models)))
    assert len(message) <= MAX_MESSAGE_BYTES


@pytest.mark.parametrize("centers", range(1, MAX_MODELS + 1))
@pytest.mark.parametrize("own", [False, True])
def test_what_a_task_needs_beside_the_totals_is_bounded(centers: int, own: bool) -> None:  # noqa: FBT001 - a parameter
    models = [OwnModel(slot="s" * 32, init=np.zeros(4)) if own else np.zeros(4)] * centers
    rest = len(longest_task(longest_probe(models, [None] * centers))) - len(canonical_json([None] * centers))
    assert rest <= TASK_BYTES + (MODEL_BYTES + own * OWN_BYTES) * centers


@given(
    st.integers(1, 4),
    st.integers(2, 20),
    st.sampled_from(sorted(KINDS)),
    st.integers(0, 2**32),
)
def test_totals_have_three_digits_after_the_point_where_there_is_room(
    centers: int, classes: int, kind: str, seed: int
) -> None:
    totals = KINDS[kind](np.random.default_rng(seed), (centers, classes))
    totals[:, 0] += 1
    assert told(totals).tolist() == totals.round(3).tolist()


@settings(deadline=None)
@given(st.floats(0, 6), st.integers(0, 2**32))
def test_where_there_is_least_room_a_frequent_class_is_corrected_within_a_sixth(size: float, seed: int) -> None:
    """A class with a hundredth of its row's greatest total or more, and with a sample."""
    totals = 10.0 ** (size * np.random.default_rng(seed).random((16, 32)))
    for row, kept in zip(totals, told(totals), strict=True):
        off = np.log(kept + LABEL_PRIOR_SAMPLES) - np.log(row + LABEL_PRIOR_SAMPLES)
        frequent = row >= max(1.0, row.max() / 100)
        # Rounding changes them by a twentieth; 0.1 samples beside one that is left of them by a tenth.
        assert np.abs(off - off[row.argmax()])[frequent].max() < 1 / 6


def test_a_device_reads_the_numbers_that_an_emulated_one_computes_with() -> None:
    for kind, draw in KINDS.items():
        state = state_of(draw(np.random.default_rng(1), (16, 32)))
        models = list(state.centers)
        probe = longest_probe(models, label_totals_of(state, models))
        assert read_message(longest_task(probe))["label_totals"] == probe.label_totals, kind


def test_a_task_with_the_fractions_of_one_device_is_sent(tmp_path: Path) -> None:
    """Whole totals of 12 centers with 40 classes were sent, with fractions they were longer than a message may be."""
    wired, sent = WiredCoordinator(tmp_path, VirtualClock(), 0, len(DEVICES)), []
    size = wired.context.prepared.program.schema.size
    centers = np.repeat(np.arange(12, dtype=np.float32)[:, None], size, axis=1)
    with closing(wired.store):
        for number, more in enumerate((0.0, 0.123)):
            state, key = State(centers=centers, extra={TOTALS_KEY: np.full((12, 40), 80_000 + more)}), _key(number)
            models = list(centers)
            totals = label_totals_of(state, models)
            probe = Probe(models=models, want=frozenset({"loss"}), batch=16, seed=1, label_totals=totals)
            tasks = dict.fromkeys(DEVICES, probe)
            asked = prepare_tasks(key, tasks, wired.context)
            wired.store.exchanges.open(key, {c: a.sha256 for c, a in asked.items()}, 300.0)
            LiveExchange(key, tasks, asked, None, wired.context).begin()
            sent += [message["label_totals"] for _, message in wired.said() if message["k"] == "task"]
    assert sent == [[[80_000] * 40] * 12] * 2 * len(DEVICES)


def _key(number: int) -> ExchangeKey:
    return ExchangeKey("0" * 16, 1, number)


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"loss": "squared-error"}, "is trained for squared-error"),
        ({"loss": "token-cross-entropy", "target": (4, 3)}, "is trained for token-cross-entropy"),
        ({"own_loss": True}, "has a loss of its own"),
    ],
)
def test_a_program_of_which_devices_would_refuse_each_probe_is_refused(facts: dict[str, Any], told: str) -> None:
    """A run went on without an evaluation, and fedrc without responsibilities."""
    with pytest.raises(ConfigError, match=f"of one class for each sample, and .* {told}"):
        check_label_totals(make_method("fedrc"), replace(program(), **facts))
    check_label_totals(make_method("fedem"), replace(program(), **facts))


@pytest.mark.parametrize(
    ("method", "options", "most"),
    [
        ("fedavg", {}, 512),
        ("fesem", {"clusters": 10}, 51),
        ("fesem", {"clusters": 17}, 512),
        ("fesem", {"clusters": 10, "start": "loss"}, 51),
        ("ifca", {"clusters": 16}, 32),
        ("fedrc", {"clusters": 5}, 102),
        ("fedsoft", {"clusters": 16}, 32),
        ("fedavg-plus", {"runs": 4}, 128),
        ("ditto", {}, 512),
        ("ditto", {"common-weight": 0.5}, 256),
        ("fedcenters", {"most-centers": 1}, 170),
        ("fedcenters", {"most-centers": 8}, 64),
        ("fedcenters", {"most-centers": 8, "trial-rounds": 0}, 512),
    ],
)
def test_more_classes_than_a_task_has_room_for_are_refused(method: str, options: dict[str, Any], most: int) -> None:
    made = make_method(method, **{"label-prior": "device"}, **options)
    check_label_totals(made, replace(program(), target=(most,)))
    many = replace(program(), target=(most + 1,))
    with pytest.raises(ConfigError, match=f"{most + 1} label totals for each of") as refused:
        check_label_totals(made, many)
    assert ("use fewer centers" in (refused.value.hint or "")) == (most < MAX_LABEL_TOTALS)
    check_label_totals(make_method(method, **{"label-prior": "model"}, **options), many)


def test_a_coordinator_refuses_them_before_the_first_round(tmp_path: Path) -> None:
    class Fleet:
        def let_in(self, *_: object) -> dict[str, int]:
            return {"a": 10, "b": 10}

    wired = WiredCoordinator(tmp_path, VirtualClock(), 0, len(DEVICES))
    store, log = wired.store, EventLog(tmp_path / "log", wired.store.events, lambda _: None, lambda: 0)
    prepared = replace(wired.context.prepared, program=replace(program(), target=(40,)))
    run = RunConfig(name="r", method="fedrc", rounds=2)
    trainer = RunTrainer(
        config=replace(wired.config, runs=(run,)),
        store=store,
        event_log=log,
        meter=lambda: (0.0, 0, 0),
        prepared=prepared,
        devices=Fleet(),  # type: ignore[arg-type]
    )
    with pytest.raises(ConfigError, match="40 label totals for each of 16 centers"):
        trainer.run(run, make_method("fedrc", clusters=16), _never)
    assert store.states.last(store.states.run_id("r", lambda: "0" * 16)) is None
    store.close()


def test_an_emulated_run_refuses_them_before_the_first_round() -> None:
    devices = devices_of(grouped_fleet(4, 2))
    devices.learner.program = replace(program(), target=(40,))  # type: ignore[misc]
    with pytest.raises(ConfigError, match="40 label totals for each of 16 centers"):
        open_run(make_method("fedrc", clusters=16), start_of(), devices, RunSettings(rounds=1, seed=0, batch=8))


def _never(*_: object, **__: object) -> Any:  # noqa: ANN401 - as Ask says
    raise AssertionError
