"""A GPU without enough memory: the work is done in smaller parts, and the results are the same to the last bit.

The engines are real and run on the CPU; what is added is the error that torch raises where a GPU's memory ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edge_client.errors import RuntimeMissing
from edge_client.training.learner import Learner
from emulator.engines.gpu.memory import is_out_of_memory, run_in_parts
from emulator.engines.gpu.objective import Objective
from emulator.engines.gpu.stacked import StackedRecipe
from tests.support.engine_models import TERMS, model_of
from tests.support.reference_sgd import JobFacts, check_same_as_loop, job_of
from tests.support.unrecorded_graphs import Unrecorded

MODEL = model_of("digits-mlp")
JOBS = [job_of(MODEL, JobFacts(n=7 + i, seed=i, terms=TERMS[-1])) for i in range(7)]
DATA = JOBS[-1].data


def small(parts: list[int], room: int) -> Callable[[int, int], list[int]]:
    """Work that has memory for `room` things at once; it notes the size of every part that it did."""

    def run(first: int, last: int) -> list[int]:
        if last - first > room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        parts.append(last - first)
        return list(range(first, last))

    return run


@given(total=st.integers(0, 50), size=st.integers(1, 60), room=st.integers(1, 60))
def test_everything_is_done_once_and_in_order_whatever_the_memory(total: int, size: int, room: int) -> None:
    parts = list[int]()
    done = [each for part in run_in_parts(total, size, small(parts, room), what="clients") for each in part]
    assert done == list(range(total))
    assert max(parts, default=1) <= min(size, room)


def test_what_does_not_fit_alone_is_refused_with_what_to_do() -> None:
    with pytest.raises(RuntimeMissing, match=r"no memory for 1 clients at once(.|\n)*engine lean"):
        list(run_in_parts(4, 4, small([], 0), what="clients"))


def test_other_errors_are_not_tried_again() -> None:
    def run(first: int, last: int) -> int:
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied, {first} to {last}")

    with pytest.raises(RuntimeError, match="0 to 4"):
        list(run_in_parts(4, 4, run, what="clients"))


def test_a_recording_that_ends_for_want_of_memory_is_known() -> None:
    told = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    told.__context__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert is_out_of_memory(told)
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stacked passes of more than two clients or batches run out of memory; the sizes of those that did not."""
    fitted, gradients = list[int](), Objective.gradients

    def limited(objective: Objective, w: Any, b: Any, *rest: Any) -> Any:  # noqa: ANN401 - torch's
        if len(b) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        fitted.append(len(b))
        return gradients(objective, w, b, *rest)

    monkeypatch.setattr(Objective, "gradients", limited)
    return fitted


def stacked() -> Learner:
    return StackedRecipe(model=MODEL, device="cpu", dtype="float64", chunk=7).open()


def test_stacked_clients_are_halved_until_they_fit_and_stay_so(
    crowded: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    learner = stacked()
    crowded.clear()
    with caplog.at_level(logging.WARNING):
        check_same_as_loop(learner, MODEL, JOBS)
    assert caplog.messages == [
        "the GPU has no memory for 7 clients at once: 3 from now on",
        "the GPU has no memory for 3 clients at once: 1 from now on",
    ]
    caplog.clear()
    list(learner.train(JOBS))
    assert caplog.messages == []
    assert set(crowded) == {1}


def test_a_gradient_of_many_batches_is_halved(crowded: list[int]) -> None:
    vector = JOBS[0].start
    learner, alone = stacked(), Unrecorded(model=MODEL).open()
    found, expected = (each.gradient(vector, DATA, batch=2, seed=0) for each in (learner, alone))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)  # float64, added in another order
    assert crowded


def test_losses_of_many_samples_are_halved_and_the_next_are_not_tried_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learner, seen, predictions = stacked(), list[int](), Objective.predictions
    whole = learner.evaluate([JOBS[0].start, JOBS[1].start], DATA, batch=16)

    def limited(objective: Objective, w: Any, b: Any, x: Any) -> Any:  # noqa: ANN401 - torch's
        if len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        seen.append(len(x))
        return predictions(objective, w, b, x)

    monkeypatch.setattr(Objective, "predictions", limited)
    for found, expected in zip(learner.evaluate([JOBS[0].start, JOBS[1].start], DATA, batch=16), whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert max(seen) <= 4
    caplog.clear()
    learner.evaluate([JOBS[0].start, JOBS[1].start], DATA, batch=16)
    assert caplog.messages == []


def test_lanes_that_do_not_fit_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third lane has no memory for its buffers."""
    learner, lanes, gradient = Unrecorded(model=MODEL, lanes=3).open(), set[int](), Objective.gradient

    def limited(objective: Objective, w: Any, *rest: Any) -> Any:  # noqa: ANN401 - torch's
        lanes.add(w.data_ptr())
        if len(lanes) > 2:
            lanes.clear()
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return gradient(objective, w, *rest)

    monkeypatch.setattr(Objective, "gradient", limited)
    check_same_as_loop(learner, MODEL, JOBS)
    assert len(lanes) == 1  # of 3 lanes, half
