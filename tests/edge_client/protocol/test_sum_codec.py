"""The stages of a masked sum as tasks: a device computes what the method asked, or refuses."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from edge_client.errors import Malformed
from edge_client.protocol import messages
from edge_client.protocol.blocks import manifest_of
from edge_client.protocol.sum_codec import (
    SumStage,
    decode_points,
    decode_told,
    encode_points,
    encode_told,
    read_work,
    stage_fields,
    words_of,
)
from edge_client.protocol.summed_task import SummedFit, SummedProbe
from edge_client.protocol.task import Optimiser
from edge_client.protocol.task_codec import container_functions, task_manifests
from edge_client.training.summed import plain_fits
from tests.support.sum_tasks import CENTERS, FIT, STAGES, get, job, put, put_message, task_message


@pytest.mark.parametrize("name", [name for name, stage in STAGES.items() if stage.work is not None])
def test_the_work_of_a_task_is_what_was_asked(name: str) -> None:
    asked = STAGES[name].work
    found = read_work(messages.read_message(task_message(job(name)), "t"), get)
    assert type(found) is type(asked)
    for field in fields(type(found)):
        np.testing.assert_equal(getattr(found, field.name), getattr(asked, field.name), err_msg=field.name)


def test_a_fit_that_is_summed_keeps_its_optimiser() -> None:
    work = replace(FIT, stage="add", optimiser=Optimiser(name="adam", clip_norm=1.0))
    sent = stage_fields(
        SumStage(stage="add", message=b"a relay", work=work), put, lambda data: manifest_of(data, "sum")
    )
    found = read_work(messages.read_message(task_message(sent), "t"), get)
    assert isinstance(found, SummedFit)
    assert found.optimiser == work.optimiser
    assert [fit.optimiser for fit in plain_fits(found, None, None)] == [work.optimiser]


@pytest.mark.parametrize("name", STAGES)
def test_each_blob_of_a_task_is_named_once_and_the_message_is_among_them(name: str) -> None:
    said = messages.read_message(task_message(job(name)), "t")
    kinds = [manifest.kind for manifest in task_manifests(said)]
    assert kinds.count("sum") == (1 if STAGES[name].message else 0)
    assert len({manifest.sha256 for manifest in task_manifests(said)}) == len(kinds)


def test_a_choice_by_losses_needs_both_functions_and_an_evaluation_one() -> None:
    tell = job("tell")
    assert container_functions(tell) == {"container": "step"}
    tell["work"]["sum"]["choose"] = "loss"
    assert container_functions(tell) == {"container": "evaluate", "step": "step"}
    assert container_functions(job("add, evaluation")) == {"container": "evaluate"}


def test_no_column_is_compared_again_and_again() -> None:
    """64 ranges of all columns would take 64 times the memory of the centers."""
    said = messages.read_message(task_message(job("add")), "t")
    said["work"]["sum"]["compare"] = [[0, 6], [0, 1]]
    with pytest.raises(Malformed, match="bad_task: 7 columns of a model of 6 are compared"):
        read_work(said, get)


@pytest.mark.parametrize("given", [[1, 1], [1] * 6])
def test_it_is_told_of_each_centroid_whether_it_takes_part(given: list[int]) -> None:
    said = messages.read_message(task_message(job("add, k-means")), "t")
    said["work"]["sum"]["points_open"] = given
    with pytest.raises(Malformed, match="bad_task: points_open has another shape than the centroids"):
        read_work(said, get)


def test_the_words_of_each_part_are_counted_without_computing_them() -> None:
    counts = {name: words_of(STAGES[name].work) for name in STAGES if name.startswith(("add", "tell"))}  # type: ignore[arg-type]
    assert counts == {"add": 8, "add, k-means": 2 * 2 * (4 + 2), "add, evaluation": 5, "tell": 2}


@pytest.mark.parametrize("data", [b"", bytes(8), encode_told(np.array([1, 1], np.uint32)), bytes(12)])
def test_a_told_choice_is_of_one_center(data: bytes) -> None:
    np.testing.assert_array_equal(decode_told(encode_told(np.array([0, 1], np.uint32)), 2), [0, 1])
    with pytest.raises(Malformed):
        decode_told(data, 2)


@pytest.mark.parametrize("data", [bytes(7), np.array([np.nan]).tobytes()])
def test_centroids_are_finite_numbers_of_eight_bytes(data: bytes) -> None:
    assert decode_points(encode_points(np.array([[0.1], [-2.0]]))).tolist() == [0.1, -2.0]
    with pytest.raises(Malformed):
        decode_points(data)


def test_a_device_with_models_of_its_own_is_told_the_usual_center_too() -> None:
    """The coordinator asks all devices alike, also where one has a single model to be served by."""
    asked = STAGES["add, evaluation"]
    assert isinstance(asked.work, SummedProbe)
    work = replace(asked.work, models=list(CENTERS[:1]), served="asked", usual=1)
    told = stage_fields(replace(asked, work=work), put, put_message)
    assert messages.read_message(task_message(told), "t")["work"]["sum"]["usual"] == 1
