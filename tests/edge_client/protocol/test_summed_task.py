"""The scale of a sum: which are possible, and that words are whole numbers modulo 2^bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.errors import Malformed
from edge_client.protocol.summed_task import SummedFit, SumScale


@pytest.mark.parametrize(
    ("bits", "devices", "clip", "noise", "levels"),
    [
        (16, 1, 1.0, 0.0, 2**15 - 1),
        (32, 1, 1.0, 0.0, 2**31 - 1),
        (16, 2**15 - 1, 1.0, 0.0, 1),
        (16, 9, 1e-9, 0.0, (2**15 - 1) // 9),
        (16, 9, 1e9, 1.0, (2**15 - 1) // (9 + 36)),
    ],
)
def test_the_levels_of_a_scale_leave_room_for_every_device_and_twelve_deviations_of_noise(
    bits: int, devices: int, clip: float, noise: float, levels: int
) -> None:
    scale = SumScale(bits=bits, devices=devices, clip=clip, noise=noise)
    assert (scale.levels, scale.deviation) == (levels, noise * levels)


@pytest.mark.parametrize(
    "changed",
    [
        {"bits": 15},
        {"bits": 33},
        {"devices": 0},
        {"devices": 2**15},
        {"clip": 0.0},
        {"clip": math.inf},
        {"noise": -1e-9},
        {"noise": math.inf},
        {"noise": math.nan},
        {"noise": 1e4},
    ],
)
def test_a_scale_whose_sum_could_overflow_or_has_no_bound_is_a_bad_task(changed: dict[str, float]) -> None:
    with pytest.raises(Malformed, match=r"^bad_task: "):
        SumScale(**({"bits": 16, "devices": 9, "clip": 1.0} | changed))  # type: ignore[arg-type]  # integers are floats


@given(st.integers(16, 32), st.data())
def test_a_whole_number_is_read_back_from_its_word(bits: int, data: st.DataObject) -> None:
    half = 2 ** (bits - 1)
    numbers = np.array(data.draw(st.lists(st.integers(-half, half - 1), max_size=9)), dtype=np.int64)
    scale = SumScale(bits=bits, devices=1, clip=1.0)
    words = scale.modulo(numbers)
    assert (words.astype(np.int64) < 2**bits).all()
    assert scale.signed(words).tolist() == numbers.tolist()


def test_a_value_is_rounded_to_a_neighbour_without_a_mean_error_and_cut_at_one() -> None:
    scale = SumScale(bits=16, devices=2**12, clip=1.0)  # 7 levels
    rng = np.random.default_rng(0)
    found = scale.signed(scale.to_words(np.full(10_000, 0.25), rng))
    assert set(found.tolist()) == {1, 2}
    assert abs(found.mean() - 1.75) < 0.025  # five standard deviations of a mean of 10,000 draws
    assert scale.signed(scale.to_words(np.array([-5.0, -1.0, 1.0, 5.0]), rng)).tolist() == [-7, -7, 7, 7]


CENTER = np.zeros(4, np.float32)
FIT: dict[str, Any] = {
    "start": CENTER,
    "steps": 1,
    "lr": 0.1,
    "batch": 1,
    "seed": 0,
    "stage": "add",
    "choose": "only",
    "centers": CENTER[None],
    "scale": SumScale(bits=16, devices=1, clip=1.0),
    "open": (0,),
}


def test_what_a_summed_fit_does_not_name_is_one_whole_fit_of_a_device_that_counts_in_full() -> None:
    fit = SummedFit(**FIT)
    assert (fit.share, fit.repeats, fit.move, fit.refresh, fit.dealt) == (1.0, 1, 1.0, True, False)
    assert (fit.hysteresis, fit.sigma, fit.group, fit.compare, fit.scale.noise) == (0.0, 0.0, None, (), 0.0)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"choose": "best"}, "bad_task: a center is chosen by one of only, "),
        ({"open": ()}, "bad_task: no center is open"),
        ({"open": (1,)}, "bad_task: no center is open"),
        ({"open": (0, -1)}, "bad_task: no center is open"),
        ({"steps": 0}, "steps must be 1"),
    ],
)
def test_a_summed_fit_is_a_fit_of_open_centers_by_a_known_choice(changed: dict[str, Any], says: str) -> None:
    with pytest.raises((Malformed, ValueError), match=f"^{says}"):
        SummedFit(**FIT | changed)
