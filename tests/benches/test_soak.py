"""What the soak counts and the line that it draws."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.benches.soak import Account, is_flat, is_whole, of_one, slope, slope_between


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


def test_a_device_among_many_in_a_process_is_flat_as_one_in_a_process_of_its_own_is() -> None:
    seconds = np.arange(0.0, 7200.0, 10.0)
    own = slope(seconds, 150_000 + 0 * seconds)
    for kb_per_h, flat in ((1_000, True), (2_000, False)):
        part = of_one(slope(seconds, 250_000 + 299 * kb_per_h / 3600 * seconds), 299, own)
        assert part["slope"] == pytest.approx(kb_per_h, abs=1)
        assert is_flat(part, 0.01) is flat
    assert not is_flat(of_one(slope([0.0, 10.0], [1.0, 1.0]), 299, own), 0.01)


@pytest.mark.parametrize(
    ("events", "lost", "unanswered", "overtaken"),
    [
        ([("result", 1, "fit"), ("ok", 1, "fit")], 0, 0, 0),
        ([("result", 2, "fit"), ("ok", 2, "fit")], 1, 0, 0),
        ([("result", 1, "fit"), ("result", 2, "fit")], 0, 1, 0),
        ([("result", 1, "fit"), ("late", 1, "fit"), ("result", 2, "fit")], 0, 0, 0),
        ([("result", 1, "probe"), ("result", 2, "fit")], 0, 0, 1),
    ],
)
def test_lost_is_what_was_acknowledged_and_not_closed_with(
    tmp_path: Path, events: list[tuple[str, int, str]], lost: int, unanswered: int, overtaken: int
) -> None:
    told: list[dict[str, object]] = []
    for said, number, job in events:
        answer = {"event": "result"} if said == "result" else {"event": "answered", "status": said}
        told.append({"cid": "d00", "round": number, "job": job} | answer)
    (tmp_path / "device.told").write_text("".join(json.dumps(line) + "\n" for line in told))
    found = Account(tmp_path, {(1, "fit"): {"d00"}, (2, "fit"): {"d01"}}).result()
    assert (found["lost"], found["unanswered"], found["overtaken"]) == (lost, unanswered, overtaken)


def test_a_run_in_which_no_update_was_compared_is_not_called_whole() -> None:
    good = {"compared": 3, "lost": 0, "unanswered": 0}
    assert is_whole(good)
    assert not any(is_whole(good | worse) for worse in ({"compared": 0}, {"lost": 1}, {"unanswered": 1}))


def test_a_process_is_flat_where_it_grew_only_before_the_time_that_is_looked_at() -> None:
    lines = [{"s": s, "a_kb": 50_000 + min(s, 3600.0)} for s in np.arange(0.0, 7200.0, 10.0)]
    assert slope_between(lines, "a_kb", 600.0, 3600.0)["slope"] == pytest.approx(3600, abs=1)
    assert is_flat(slope_between(lines, "a_kb", 3600.0, 7200.0), 0.01)
