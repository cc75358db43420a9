"""Windows of a recording that overlap are told; other samples are not called windows."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from edge_client.protocol.task import Array
from emulator.data.loaders.samples import DataSet, RawSamples
from emulator.data.partition_schemes import parse_scheme
from emulator.data.window_overlap import windows_overlap

WINDOW = 16


def windows(step: int, *, axis: int = 1) -> Array:
    """[40, 16, 3], or [40, 3, 16], of a recording of three channels."""
    recording = np.random.default_rng(0).standard_normal((40 * WINDOW, 3))
    cut = np.stack([recording[i * step : i * step + WINDOW] for i in range(40)])
    return cut if axis == 1 else cut.transpose(0, 2, 1)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize(("step", "overlap"), [(WINDOW // 2, True), (4, True), (WINDOW, False)])
def test_windows_that_repeat_values_of_the_one_before_overlap(*, step: int, axis: int, overlap: bool) -> None:
    assert windows_overlap(windows(step, axis=axis), [np.arange(40)]) is overlap


def test_blank_images_are_no_windows() -> None:
    assert not windows_overlap(np.zeros((40, 1, 8, 8)), [np.arange(40)])


@pytest.mark.parametrize(("step", "warned"), [(WINDOW // 2, True), (WINDOW, False)])
def test_splitting_overlapping_windows_by_user_warns_of_the_leak(
    caplog: pytest.LogCaptureFixture, *, step: int, warned: bool
) -> None:
    labels, users = np.arange(40) % 2, np.repeat(np.arange(2), 20)
    samples = RawSamples(x=windows(step).astype(np.float32), y=labels.astype(np.int64), user=users.astype(np.int64))
    data = DataSet(train=samples)
    with caplog.at_level(logging.WARNING):
        parse_scheme("by-user").split(data, devices=0, seed=0)
    assert ("overlap in time" in caplog.text) is warned
