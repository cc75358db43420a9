"""Tries to outweigh a fleet with numbers that a device announces: training samples, held-out samples, classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.config_sections import RunConfig
from coordinator.rounds.update_validation import ReplySpec, validate_reply
from edge_client.errors import Malformed
from edge_client.protocol import codecs
from edge_client.protocol.blocks import manifest_of
from edge_client.protocol.task import Array, Probe, Reply
from tests.support.virtual_federation import Federation, Outcome, Spy, program

LIAR = "d03"
HONEST = 41  # training samples of the honest devices: 40, 41, 42
MOST = 10 * HONEST  # with the default of max-samples-ratio
CLASSES = program().classes
ALL_WRONG = np.eye(CLASSES, k=1 - CLASSES, dtype=np.int64)  # one sample, of the wrong class


def answer(spy: Spy, task: Mapping[str, Any], data: bytes, *, n: int, kind: str) -> None:
    key = {name: task[name] for name in ("run", "round", "exchange")}
    spy.say(LIAR, "rdy", **key, attempt=0, n=n, what=kind, update=manifest_of(data, kind, inline=True), seconds=1.0)


def moved(task: Mapping[str, Any]) -> bytes:
    """An update that moves every parameter by 0.3, no further than honest ones do."""
    schema, base = program().schema, task["start"]["sha256"]
    flat = np.full(schema.size, 0.3, np.float32)
    return codecs.encode_vector(flat, schema, codec="f32", kind="delta", base=base)


def matrix_file(confusion: Array) -> bytes:
    return codecs.encode_stats(Reply(n=1, confusion=confusion[None], losses=np.array([9.0])), program().schema)


def is_test(task: Mapping[str, Any]) -> bool:
    return task["job"] == "probe" and task.get("split") == "test"


def play(
    folder: Path, method: str, announced: int, lie: Callable[[Spy, Mapping[str, Any]], None], asked: Callable[..., bool]
) -> Federation:
    """Two rounds of three honest devices and a liar, which answers the first task for which `asked` is true."""
    run = RunConfig(method=method, rounds=2, name="fesem", settings={"batch-size": 8})
    fed = Federation.of(folder, runs=(run,), quorum=0.5, deadline_s=30.0, evaluate_every=1)
    spy = Spy(fed.world.broker)
    fed.start_coordinator()
    fed.start_mute_device(LIAR, n=announced)
    fed.start_devices(3)

    def given() -> list[dict[str, Any]]:
        return [task for task in spy.said("task", cid=LIAR) if asked(task)]

    fed.world.run(lambda: bool(given()))
    lie(spy, given()[0])
    fed.world.run(partial(answered, spy))
    return fed.complete()


def answered(spy: Spy) -> bool:
    return bool(spy.said("ack", cid=LIAR))


def taken(fed: Federation) -> Federation:
    """The same, whose first round refused no answer of the liar."""
    assert LIAR not in fed.rounds()[0].get("refused", {})
    return fed


def fitted(folder: Path, method: str, announced: int) -> Outcome:
    def lie(spy: Spy, task: Mapping[str, Any]) -> None:
        answer(spy, task, moved(task), n=announced, kind="delta")

    fed = play(folder, method, announced, lie, lambda task: task["job"] == "fit")
    return taken(fed).outcome()


@pytest.mark.parametrize("method", ["fedavg", "fedsgd", "fesem", "cfl"])
def test_a_device_that_announces_any_number_of_samples_weighs_ten_times_the_median_at_most(
    tmp_path: Path, method: str
) -> None:
    if method == "fedsgd":

        def lie(spy: Spy, task: Mapping[str, Any], n: int) -> None:
            grad = np.full(program().schema.n_params, 0.3, np.float32)
            answer(spy, task, codecs.encode_stats(Reply(n=1, grad=grad), program().schema), n=n, kind="stats")

        outcomes = [
            taken(play(tmp_path / str(n), method, n, partial(lie, n=n), lambda task: task["job"] == "probe")).outcome()
            for n in (2**31, MOST)
        ]
    else:
        outcomes = [fitted(tmp_path / str(n), method, n) for n in (2**31, MOST)]
    assert outcomes[0] == outcomes[1]


def test_a_device_that_tests_on_any_number_of_samples_weighs_ten_times_the_median_at_most(tmp_path: Path) -> None:
    def report(n: int) -> dict[str, Any]:
        def lie(spy: Spy, task: Mapping[str, Any]) -> None:
            answer(spy, task, matrix_file(ALL_WRONG * n), n=n, kind="stats")

        return taken(play(tmp_path / str(n), "fedavg", HONEST, lie, is_test)).rounds()[0]

    lied, bounded = report(2**31), report(MOST)
    assert lied["accuracy"] == bounded["accuracy"]
    assert lied["accuracy"]["micro"] > 0.05  # the honest devices alone have 0.48, the liar 0 on 410 of 470 samples


@pytest.mark.parametrize("classes", [CLASSES - 1, CLASSES + 1])
def test_a_matrix_of_other_classes_than_the_programs_is_refused(tmp_path: Path, classes: int) -> None:
    def lie(spy: Spy, task: Mapping[str, Any]) -> None:
        answer(spy, task, matrix_file(np.eye(classes, dtype=np.int64)), n=classes, kind="stats")

    fed = play(tmp_path, "fedavg", HONEST, lie, is_test)
    assert fed.rounds()[0]["refused"][LIAR].startswith("bad_schema")


def labels_taken(counts: list[float]) -> Reply:
    task = Probe(models=(), want=frozenset({"labels"}), batch=1, seed=0)
    about = {"codec": "f32", "base": "zero", "base_vector": None, "max_update_rms": 10.0, "max_samples": 400}
    spec = ReplySpec(task=task, schema=program().schema, samples=40, **about)  # type: ignore[arg-type]  # each by its name
    return validate_reply(spec, Reply(n=40, labels=np.array(counts)))


@pytest.mark.parametrize("counts", [[1e308, 1e308], [2.0**32, 0.0], [0.0, 0.0]])
def test_numbers_of_labels_that_no_device_has_are_refused(counts: list[float]) -> None:
    with pytest.raises(Malformed, match="label counts") as wrong:
        labels_taken(counts)
    assert wrong.value.code == "rejected"


def test_labels_that_sum_to_next_to_nothing_count_as_that() -> None:
    read = labels_taken([5e-324, 0.0])
    assert read.labels is not None
    assert read.labels.tolist() == [5e-324, 0.0]
