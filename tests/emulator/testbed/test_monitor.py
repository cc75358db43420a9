"""Following a growing file loses no line, repeats none, and waits for those that are not finished."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.dashboard.endpoint import LINK_FILE
from coordinator.rounds.round_record import center_sizes
from coordinator.storage.status import STATUS_FILE
from emulator.testbed.monitor import (
    FileTail,
    dashboard_url,
    describe_next_step,
    format_milestone,
    format_stability,
    is_paused,
    part_in_work,
)
from tests.support import finished_run


@given(st.lists(st.text(max_size=5), max_size=8), st.data())
def test_every_line_comes_once_however_the_writer_cuts_them(words: list[str], data: st.DataObject) -> None:
    whole = "".join(json.dumps({"event": word}) + "\n" for word in words).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        tail, seen = FileTail(path), []
        for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            with path.open("ab") as file:
                file.write(whole[start:stop])
            seen += [event["event"] for event in tail.read_new()]
    assert seen == words


def test_a_file_that_does_not_exist_yet_has_no_lines(tmp_path: Path) -> None:
    assert FileTail(tmp_path / "later.jsonl").read_new() == []


def test_a_round_is_told_with_its_accuracy_and_cluster_sizes() -> None:
    assert format_milestone(finished_run.events()[1]) == "FeSEM round 1/3: accuracy 60.0%, devices per center [1, 3]"
    assert format_milestone(finished_run.events()[5]) == "FedAvg round 1/3: accuracy 21.0%"


def test_a_round_is_told_with_the_centers_that_have_no_device() -> None:
    event = finished_run.events()[1]
    spare = {**event, "per_center": [*event["per_center"], None]}
    assert format_milestone(spare).endswith("devices per center [1, 3, 0]")


@pytest.mark.parametrize("event", finished_run.events())
def test_every_event_has_words_or_none(event: dict[str, object]) -> None:
    assert isinstance(format_milestone(event), str)
    assert isinstance(describe_next_step([event]), str)


def test_empty_clusters_are_counted() -> None:
    assert center_sizes({"a": 2, "b": 0}, 4) == [1, 0, 1, 0]
    assert center_sizes({}, 2) == [0, 0]


@pytest.mark.parametrize(
    ("centers", "said"),
    [
        ([], ""),
        ([0], ""),
        ([0, 0, 0], "no device has changed its center since round 1"),
        ([0, 1, 1], "no device has changed its center since round 2"),
        ([1, 0, 1, 0], "devices still changed centers in the last round"),
    ],
)
def test_whether_the_assignment_has_settled_is_said_in_words(centers: list[int], said: str) -> None:
    assert format_stability([{"device-00": center, "device-01": 2} for center in centers]) == said


def test_the_link_of_a_dashboard_is_there_while_its_file_is(tmp_path: Path) -> None:
    assert dashboard_url(tmp_path) == ""
    (tmp_path / LINK_FILE).write_text("http://127.0.0.1:1/#control=x\n")
    assert dashboard_url(tmp_path) == "http://127.0.0.1:1/#control=x"


@pytest.mark.parametrize(
    ("text", "waits"), [('{"phase": "paused"}', True), ('{"phase": "asking"}', False), ("{}", False), ("{", False)]
)
def test_a_paused_run_is_known_by_what_its_coordinator_left(tmp_path: Path, text: str, *, waits: bool) -> None:
    assert not is_paused(tmp_path)
    (tmp_path / STATUS_FILE).write_text(text)
    assert is_paused(tmp_path) == waits


def test_the_part_that_is_compiled_is_named(tmp_path: Path) -> None:
    assert part_in_work(tmp_path) == ""
    (tmp_path / STATUS_FILE).write_text(json.dumps({"phase": "compiling", "working_on": "model digits-mlp for onnx"}))
    assert part_in_work(tmp_path) == "model digits-mlp for onnx"


def test_after_a_run_the_next_one_is_named_and_after_the_last_the_export() -> None:
    events: list[dict[str, Any]] = [{"event": "start", "rounds": {"fesem": 2, "fedavg": 2}}]
    events.append({"event": "run-done", "run": "fesem"})
    assert describe_next_step(events) == "beginning FedAvg"
    events.append({"event": "run-done", "run": "fedavg"})
    assert describe_next_step(events) == "exporting the centers"
