"""What a demo reports follows from what was recorded, and from nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from edge_client.errors import FedcentersError
from emulator.testbed import demo_result
from emulator.testbed.demo import DemoSettings, command_again
from tests.support import finished_run

ENGINES = {"device-00": "onnx", "device-01": "pt2", "device-02": "onnx", "device-03": "litert"}
RIGHT = {"device": "new-0", "group": 1, "center": 1, "right": True, "format": "onnx", "accuracy": 0.8}


def bundle(folder: Path, *, tflite: float) -> Path:
    (folder / "bundle").mkdir(parents=True)
    centers = [
        {"files": {"onnx": {"parity": 1e-7}, "tflite": {"parity": 2e-7}}},
        {"files": {"onnx": {"parity": 3e-7}, "tflite": {"parity": tflite}}},
    ]
    (folder / "bundle" / "manifest.json").write_text(json.dumps({"centers": centers}), encoding="utf-8")
    return folder


def test_the_result_says_what_the_last_rounds_reached(tmp_path: Path) -> None:
    wrong = {**RIGHT, "right": False, "accuracy": 0.2}
    none = {**RIGHT, "right": False, "center": None, "accuracy": None}
    found = demo_result.demo_result(
        bundle(tmp_path, tflite=5e-6),
        finished_run.events(),
        groups=finished_run.GROUPS,
        engines=ENGINES,
        new=[RIGHT, wrong, none],
    )
    assert found == {
        "method": "fesem",
        "devices": 4,
        "rounds": 3,
        "clusters": 2,
        "ari": 1.0,
        "accuracy": {"centers": 0.8, "global": 0.23},
        "new_devices": {"asked": 3, "right": 1, "accuracy": 0.5},
        "parity": {"onnx": 3e-7, "tflite": 5e-6},
        "engines": {"onnx": 2, "litert": 1, "torch": 1},
        "bytes": {"down": 6000, "up": 600},
    }


@pytest.mark.parametrize("difference", [2e-4, float("nan")])
def test_a_file_that_computes_something_else_fails_the_demo(difference: float, tmp_path: Path) -> None:
    with pytest.raises(FedcentersError, match="tflite files differ"):
        demo_result.max_parity(bundle(tmp_path, tflite=difference))


def test_a_center_stands_for_the_group_of_most_of_its_devices() -> None:
    assert demo_result.group_by_center(finished_run.events()[:2], "fesem", finished_run.GROUPS) == {0: 0, 1: 1}
    assert demo_result.group_by_center(finished_run.events(), "fedavg", finished_run.GROUPS) == {
        0: 0
    }  # a tie: the lower one


@pytest.mark.parametrize(("center", "group", "right"), [(1, 1, True), (0, 1, False), (7, 1, False), (None, 1, False)])
def test_a_choice_is_right_when_the_center_stands_for_the_devices_group(
    center: int | None, group: int, *, right: bool
) -> None:
    answer = {"center": center, "accuracy": None if center is None else 0.9}
    judged = demo_result.judge_choice("new-0", "onnx", answer, group=group, group_of={0: 0, 1: 1})
    assert judged["right"] is right
    assert ("WRONG" in demo_result.format_choice(judged)) is not right


def test_a_new_device_without_a_center_fails_the_demo() -> None:
    demo_result.check_choices([RIGHT, {**RIGHT, "right": False}])
    with pytest.raises(FedcentersError, match="no center fits new-0"):
        demo_result.check_choices([{**RIGHT, "center": None}])


def test_the_command_to_see_a_demo_again_works_where_it_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / ".demo" / "bin" / "fedcenters-emulator"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    assert command_again(DemoSettings(seed=3, rounds=5)) == ".demo/bin/fedcenters-emulator demo --seed 3 --rounds 5"
    monkeypatch.setenv("PATH", str(program.parent))
    assert command_again(DemoSettings(seed=3, rounds=5)) == "fedcenters-emulator demo --seed 3 --rounds 5"
