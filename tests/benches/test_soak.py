"""What the soak counts and the line that it draws."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.benches.soak import Account, is_flat, slope


def test_a_slope_that_is_there_is_found_within_its_interval_and_is_not_flat() -> None:
    seconds = np.arange(0.0, 7200.0, 10.0)
    noise = np.random.default_rng(0).normal(0, 300, len(seconds))
    grows = slope(seconds, 50_000 + seconds + noise)
    assert grows["low"] < 3600 < grows["high"]
    assert not is_flat(grows, 0.01)
    assert is_flat(slope(seconds, 50_000 + noise), 0.01)
    assert is_flat(slope(seconds, 50_000 + 0.01 * seconds), 0.01)


def test_a_run_that_is_too_short_for_an_interval_is_not_called_flat() -> None:
    assert not is_flat(slope([0.0, 10.0], [1.0, 1.0]), 0.01)


@pytest.mark.parametrize(
    ("events", "lost", "unanswered"),
    [
        ([("result", 1, ""), ("answered", 1, "ok")], 0, 0),
        ([("result", 2, ""), ("answered", 2, "ok")], 1, 0),
        ([("result", 1, ""), ("result", 2, "")], 0, 1),
        ([("result", 1, ""), ("answered", 1, "late"), ("result", 2, "")], 0, 0),
    ],
)
def test_lost_is_what_was_acknowledged_and_not_closed_with(
    tmp_path: Path, events: list[tuple[str, int, str]], lost: int, unanswered: int
) -> None:
    told = [{"cid": "d00", "event": e, "round": r, "job": "fit"} | ({"status": s} if s else {}) for e, r, s in events]
    (tmp_path / "device.told").write_text("".join(json.dumps(line) + "\n" for line in told))
    found = Account(tmp_path, {(1, "fit"): {"d00"}, (2, "fit"): {"d01"}}).result()
    assert (found["lost"], found["unanswered"]) == (lost, unanswered)
