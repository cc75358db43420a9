"""The bundle of a simulated run: its devices' samples, its cards, and what the command says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from edge_client.errors import ConfigError
from export.bundle.commands import bundle_run, verify_bundle
from export.bundle.reader import read_bundle
from export.bundle.writer import BundleOptions
from tests.support.export_cli import run_export


def simulated(folder: Path, method: str = "fesem", **settings: int) -> Path:
    from emulator.options import SimulateArgs
    from emulator.simulate import simulate_json

    simulate_json(
        SimulateArgs(
            method=method, rounds=1, devices=6, settings={"local-steps": 2, **settings}, engine="lean", out=folder
        )
    )
    return folder / f"simulate-{method}-0"


def test_a_simulated_run_is_bundled_with_its_devices_samples(tmp_path: Path) -> None:
    run = simulated(tmp_path, clusters=2)
    bundle_run(run, tmp_path / "b", BundleOptions(formats=("onnx",)), samples=12)
    read = read_bundle(tmp_path / "b")
    cards = [c["card"] for c in read.manifest["centers"]]
    assert [c["method"] for c in cards] == ["fesem", "fesem"]
    assert sum(c["devices"] for c in cards) == 6
    assert all(sum(c["labels"]["counts"]) == c["samples"] for c in cards if c["devices"])
    told = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["per_device"]
    assert max(c["accuracy"]["max"] for c in cards if c["accuracy"]) == max(told.values())
    given = read.reference_samples()
    assert given is not None
    assert sorted(set(given.device)) == sorted(told)
    with pytest.raises(ConfigError, match="ifca"):
        bundle_run(run, tmp_path / "never", BundleOptions(), method="ifca")


@pytest.mark.parametrize(
    ("method", "settings"), [("fesem", {"clusters": 2}), ("ditto", {}), ("fedsoft", {"clusters": 2})]
)
def test_a_card_has_the_accuracy_of_its_own_file(tmp_path: Path, method: str, settings: dict[str, int]) -> None:
    """Not of what devices are served: ditto's and fedsoft's devices are served models of their own."""
    from export.bundle.bundle_contents import find_run_reader

    run = simulated(tmp_path, method, **settings)
    bundle_run(run, tmp_path / "b", BundleOptions(formats=("onnx",)))
    cards = [center["card"] for center in read_bundle(tmp_path / "b").manifest["centers"]]
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    for row, card in zip(
        verify_bundle(tmp_path / "b", find_run_reader(run).held_out(run, data=None)), cards, strict=True
    ):
        if card["devices"]:
            assert row["accuracy"] == pytest.approx(card["accuracy"])
    own_models = method != "fesem"
    assert ("centers" in last) == own_models
    assert all((card["served"] is not None) == own_models for card in cards if card["devices"])
    if own_models:
        measured = sorted(share for devices in last["centers"]["per_device"] for share in devices.values())
        assert max(card["accuracy"]["max"] for card in cards if card["devices"]) == pytest.approx(measured[-1])
        served = {card["served"]["max"] for card in cards if card["devices"]}
        assert max(served) == max(last["per_device"].values())


def test_bundling_a_run_says_what_it_works_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDCENTERS_CACHE", str(tmp_path / "cache"))  # with the program in it nothing is compiled
    run = simulated(tmp_path, clusters=2)
    assert run_export("bundle", str(run), "--out", str(tmp_path / "b"), "--formats", "onnx") == 0
    told = capsys.readouterr().err.splitlines()
    assert told.count("compiling pt2 step") == 1
    assert [line for line in told if "center" in line] == ["writing center 1 of 2", "writing center 2 of 2"]


def test_the_command_says_that_the_users_own_loss_is_not_in_the_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As `fc.load` does: the program had another loss in its place, without a word."""
    import fedcenters as fc

    asked: dict[str, Any] = {"fleet": fc.fleets.digits(devices=3), "model": "digits-mlp", "rounds": 1}
    fc.simulate(fc.FedAvg(local_steps=1), **asked, loss=nn.CrossEntropyLoss(), out=tmp_path, name="own")
    assert run_export("bundle", str(tmp_path / "own"), "--out", str(tmp_path / "b"), "--formats", "onnx") == 0
    assert "own loss CrossEntropyLoss is not in" in caplog.text
    caplog.clear()
    run = simulated(tmp_path)
    assert run_export("bundle", str(run), "--out", str(tmp_path / "c"), "--formats", "onnx") == 0
    assert "own loss" not in caplog.text
