"""A simulated run never replaces the results of a run with other settings, samples, module or loss."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedcenters as fc
from coordinator.strategies.registry import make_method
from edge_client.errors import ConfigError, UsageError
from emulator.cli import app
from emulator.config import resolved_table
from emulator.options import SimulateArgs
from emulator.run.folder import open_run_folder
from emulator.simulate import simulate_json

ASKED = SimulateArgs(method="fedavg", devices=4, rounds=1, settings={"local-steps": 2})


def opened(args: SimulateArgs, *, resume: bool = False) -> tuple[str, str]:
    """-> the name of the folder that these options get, and what the user is told."""
    told: list[str] = []
    table = resolved_table(args, make_method(args.method, **args.settings))
    with open_run_folder(args, table, resume=resume, say=told.append) as folder:
        (folder / "metrics.jsonl").touch()
    return folder.name, "\n".join(told)


def test_a_run_with_other_settings_gets_a_number_and_the_user_learns_why(tmp_path: Path) -> None:
    asked = replace(ASKED, out=tmp_path)
    assert opened(asked) == ("simulate-fedavg-0", "")
    kept = {path: path.read_bytes() for path in (tmp_path / "simulate-fedavg-0").iterdir()}
    first, second = tmp_path / "simulate-fedavg-0", tmp_path / "simulate-fedavg-0-2"
    name, told = opened(replace(asked, settings={"local-steps": 3}))
    assert (name, told) == (second.name, f"{first} has a run with local-steps = 2, not 3; this one goes to {second}")
    assert {path: path.read_bytes() for path in first.iterdir()} == kept


def test_the_file_of_a_run_says_with_which_versions_it_was_made(tmp_path: Path) -> None:
    opened(replace(ASKED, out=tmp_path))
    first, _, rest = (tmp_path / "simulate-fedavg-0" / "config.toml").read_text().partition("\n")
    assert first.startswith(f"# Written by fedcenters {fc.__version__}, python 3.")
    assert f"numpy {np.__version__}, torch {torch.__version__}" in first
    assert rest.startswith("method = ")


def test_the_same_settings_replace_the_run_and_the_user_is_told(tmp_path: Path) -> None:
    asked = replace(ASKED, out=tmp_path)
    other = replace(asked, settings={"local-steps": 3})
    assert [opened(asked), opened(other)[0]] == [("simulate-fedavg-0", ""), "simulate-fedavg-0-2"]
    for args, name in ((asked, "simulate-fedavg-0"), (other, "simulate-fedavg-0-2")):
        again, told = opened(replace(args, workers=2, loggers="tensorboard"))  # they do not change the numbers
        assert (again, told) == (name, f"{tmp_path / name} has a run with the same settings; it is replaced")


def test_a_name_of_ones_own_is_not_taken_from_a_run_with_other_settings(tmp_path: Path) -> None:
    asked = replace(ASKED, out=tmp_path, name="mine")
    assert opened(asked) == ("mine", "")
    told = r"mine has a run with num-rounds = 1, not 2\n\nhint: --resume goes on .*; or choose another --name"
    with pytest.raises(UsageError, match=told):
        opened(replace(asked, rounds=2))
    with pytest.raises(UsageError, match=r"mine has a run with num-rounds = 1, not 2\n\nhint: choose another --name"):
        opened(replace(asked, rounds=2, seed=1))
    assert opened(asked)[0] == "mine"


def test_a_folder_that_holds_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "simulate-fedavg-0").mkdir()
    (tmp_path / "simulate-fedavg-0" / "notes.txt").write_text("mine")
    name, told = opened(replace(ASKED, out=tmp_path))
    assert name == "simulate-fedavg-0-2"
    assert "has no config.toml that can be read" in told


def test_resume_goes_on_in_the_folder_of_its_settings_also_with_more_rounds(tmp_path: Path) -> None:
    asked = replace(ASKED, out=tmp_path)
    other = replace(asked, settings={"local-steps": 3})
    opened(asked)
    opened(other)
    assert opened(replace(other, rounds=5), resume=True)[0] == "simulate-fedavg-0-2"
    with pytest.raises(ConfigError, match="local-steps = 2, not 4"):
        opened(replace(asked, settings={"local-steps": 4}), resume=True)


def test_runs_that_begin_at_the_same_time_get_folders_of_their_own(tmp_path: Path) -> None:
    names: list[str] = []
    together = threading.Barrier(4)

    def begin(steps: int) -> None:
        together.wait()
        names.append(opened(replace(ASKED, out=tmp_path, settings={"local-steps": steps}))[0])

    threads = [threading.Thread(target=begin, args=(steps,)) for steps in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names) == [f"simulate-fedavg-0{ending}" for ending in ("", "-2", "-3", "-4")]


def test_a_run_that_fails_before_its_first_round_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        simulate_json(replace(ASKED, out=tmp_path, engine="caffe"))
    assert list(tmp_path.iterdir()) == []


def test_the_command_keeps_both_runs_and_refuses_a_name_that_is_taken(tmp_path: Path) -> None:
    options = ["--method", "fedavg", "--devices", "4", "--rounds", "1", "--out", str(tmp_path), "--name", "mine"]
    done = CliRunner().invoke(app, ["simulate", *options, "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["run"] == str(tmp_path / "mine")
    done = CliRunner().invoke(app, ["simulate", *options, "--seed", "1"])
    assert done.exit_code == 2
    assert "mine has a run with seed = 0, not 1" in done.stderr
    done = CliRunner().invoke(app, ["simulate", *options])
    assert done.exit_code == 0, done.stderr
    assert "mine has a run with the same settings; it is replaced" in done.stderr.replace("\n", "")
    assert len(list(tmp_path.iterdir())) == 1


def test_resume_without_a_run_or_without_its_checkpoint_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    asked = replace(ASKED, out=tmp_path, name="never")
    with pytest.raises(ConfigError, match=r"never is not there: there is no run to resume\n\nhint: leave out --resume"):
        simulate_json(asked, resume=True)
    assert list(tmp_path.iterdir()) == []
    simulate_json(replace(asked, checkpoint_every=0))
    with pytest.raises(ConfigError, match=r"never has no checkpoint to resume from\n\nhint: leave out --resume"):
        simulate_json(replace(asked, checkpoint_every=0), resume=True)


def hand_written(seed: int) -> fc.Fleet:
    x = np.random.default_rng(seed).normal(size=(90, 4)).astype(np.float32)
    return fc.fleet((x, np.arange(90) % 3), by=np.repeat(["anna", "ben", "cleo"], 30))


def layers(*before: nn.Module, width: int = 4) -> nn.Module:
    return nn.Sequential(*before, nn.Linear(4, width), nn.Linear(width, 3))


def frozen(value: float) -> nn.Module:
    """A layer that no run trains."""
    module = nn.Linear(4, 4).requires_grad_(requires_grad=False)
    nn.init.constant_(module.weight, value)
    nn.init.zeros_(module.bias)
    return module


ONE_ROUND: dict[str, Any] = {"method": fc.FedAvg(local_steps=1), "rounds": 1}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "samples": ({"fleet": hand_written(1)}, "a run of devices with other samples"),
    "width": ({"model": layers(width=9)}, "a run of a model with 35 numbers, not 75"),
    "tensors": ({"model": layers(nn.Identity())}, "a run of a model with other tensors"),
    "frozen": ({"model": layers(frozen(2.0))}, "a run of a model with other frozen values"),
    "loss": ({"loss": nn.CrossEntropyLoss()}, "a run with the usual loss, not the loss CrossEntropyLoss"),
}


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], tuple[nn.Module, Path]]:
    """-> a module, partly frozen or not, and a folder with two runs of it, one by a name of its own; to be copied."""

    @cache
    def played(partly_frozen: bool) -> tuple[nn.Module, Path]:  # noqa: FBT001 - a key
        module, folder = layers(*[frozen(1.0)] * partly_frozen), tmp_path_factory.mktemp("runs")
        for name in ("mine", ""):
            fc.simulate(**ONE_ROUND, fleet=hand_written(0), model=module, out=folder, name=name)
        return module, folder

    return played


@pytest.mark.parametrize(
    ("other", "interrupted"),
    [
        *((other, False) for other in OTHERS),
        ("samples", True),
        ("width", True),
        ("loss", True),
    ],  # a checkpoint tells no more
)
def test_a_run_of_other_samples_or_another_module_replaces_none(
    other: str,
    interrupted: bool,  # noqa: FBT001 - a row
    tmp_path: Path,
    two_runs: Callable[[bool], tuple[nn.Module, Path]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    module, kept = two_runs(other == "frozen")
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    asked: dict[str, Any] = ONE_ROUND | {"out": tmp_path}
    theirs: dict[str, Any] = {"fleet": hand_written(0), "model": module} | OTHERS[other][0]
    folders = [tmp_path / "mine", tmp_path / "simulate-fedavg-0"]
    if interrupted:
        for folder in folders:
            (folder / "fleet.json").unlink()
    before = {path: path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}
    said = f"mine has {OTHERS[other][1]}"
    with pytest.raises(UsageError, match=rf"{said}\n\nhint: choose another `name`"):
        fc.simulate(**asked, **theirs, name="mine")
    capfd.readouterr()
    second = fc.simulate(**asked, **theirs)
    assert f"has {OTHERS[other][1]}; this one goes to" in capfd.readouterr().err
    assert second.folder == tmp_path / "simulate-fedavg-0-2"
    with pytest.raises(UsageError, match=said):
        second.save(tmp_path / "mine")
    assert fc.simulate(**asked, **theirs, resume=True).folder == second.folder
    assert {path: path.read_bytes() for path in before} == before


def test_a_loss_is_known_by_what_it_gives_and_a_copy_of_the_folder_knows_it_too(tmp_path: Path) -> None:
    """Two functions may have one name, as two `lambda` have; the name says nothing of a loss's settings."""
    asked: dict[str, Any] = {"fleet": hand_written(0), "model": layers(), "out": tmp_path, "name": "mine"}
    method, mine, other = fc.FedAvg(local_steps=1), *(nn.CrossEntropyLoss(label_smoothing=s) for s in (0.2, 0.4))
    fc.simulate(method, rounds=1, loss=mine, **asked)
    said = "mine has a run with the loss CrossEntropyLoss that gives other numbers"
    with pytest.raises(UsageError, match=said):
        fc.simulate(method, rounds=1, loss=other, **asked)
    with pytest.raises(ConfigError, match=said):
        fc.simulate(method, rounds=2, loss=other, resume=True, **asked)
    fc.load(tmp_path / "mine", fleet=hand_written(0)).save(tmp_path / "copy")  # without the loss, which no folder has
    with pytest.raises(ConfigError, match="copy has a run with the loss CrossEntropyLoss, not the usual loss"):
        fc.simulate(method, rounds=2, resume=True, **asked | {"name": "copy"})
    again = fc.simulate(method, rounds=2, loss=mine, resume=True, **asked | {"name": "copy"})
    assert len(again.history) == 2


def test_a_loss_of_probabilities_is_known_too(tmp_path: Path) -> None:
    """It fails for outputs that are no shares."""
    x, y = np.random.default_rng(0).normal(size=(40, 4)), np.random.default_rng(1).integers(2, size=(40, 2))
    fleet = fc.fleet((x, y.astype(float)), by=np.repeat([0, 1], 20))
    asked: dict[str, Any] = {"fleet": fleet, "out": tmp_path, "name": "mine", "rounds": 1}
    asked["model"] = nn.Sequential(nn.Linear(4, 2), nn.Sigmoid())
    fc.simulate(fc.FedAvg(local_steps=1), loss=nn.BCELoss(), **asked)
    with pytest.raises(UsageError, match="the loss BCELoss that gives other numbers"):
        fc.simulate(fc.FedAvg(local_steps=1), loss=nn.BCELoss(weight=torch.tensor([1.0, 3.0])), **asked)


def test_the_same_run_of_ones_own_replaces_the_first_and_saving_it_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    place, replaced = tmp_path / "mine", f"{tmp_path / 'mine'} has a run with the same settings; it is replaced"
    for _ in range(2):
        asked: dict[str, Any] = {"fleet": hand_written(0), "model": layers(), "rounds": 1, "name": "mine"}
        result = fc.simulate(fc.FedAvg(local_steps=1), out=tmp_path, **asked)
    assert replaced in capfd.readouterr().err.replace("\n", "")
    result.save(place)  # its own folder
    assert caplog.messages == []
    del asked["name"]
    fc.simulate(fc.FedAvg(local_steps=1), **asked).save(place)
    assert caplog.messages == [replaced]


@pytest.mark.parametrize("name", ["simulate-fedavg-0", "renamed"])
@pytest.mark.parametrize("stays", [True, False])
def test_a_run_goes_on_in_the_folder_of_its_file_also_after_a_copy(tmp_path: Path, name: str, *, stays: bool) -> None:
    """Its file has the place where it was begun, which may be on another machine, or below another folder."""
    options = ["--method", "fedavg", "--devices", "4", "--rounds", "1", "--out", str(tmp_path / "old")]
    assert CliRunner().invoke(app, ["simulate", *options, "-c", "local-steps=1"]).exit_code == 0
    shutil.copytree(tmp_path / "old" / "simulate-fedavg-0", tmp_path / "new" / name)
    if not stays:
        shutil.rmtree(tmp_path / "old")
    file = tmp_path / "new" / name / "config.toml"
    done = CliRunner().invoke(app, ["simulate", str(file), "--resume", "--rounds", "2", "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["run"] == str(file.parent)
    rounds = [len(path.read_text().splitlines()) for path in sorted(tmp_path.glob("*/*/metrics.jsonl"))]
    assert rounds == [2, *[1] * stays]
    assert CliRunner().invoke(app, ["simulate", str(file), "--resume", "--rounds", "3"]).exit_code == 0


def test_a_run_of_an_earlier_version_goes_on_with_the_defaults_of_settings_that_came_later(tmp_path: Path) -> None:
    """Each run of before 26 November was refused: "has a run with adam-eps = unset, not 1e-08"."""
    asked = replace(ASKED, out=tmp_path, checkpoint_every=1)
    simulate_json(asked)
    folder = tmp_path / "simulate-fedavg-0"
    table, kept = folder / "config.toml", folder / "checkpoint" / "run.json"
    table.write_text(table.read_text().replace("clip-norm = 0.0\n", ""))
    told = json.loads(kept.read_text())
    del told["lesson"]["clip-norm"]
    kept.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=r"has a run with clip-norm = unset, not 0\.1"):
        simulate_json(replace(asked, rounds=2, settings={"local-steps": 2, "clip-norm": 0.1}), resume=True)
    simulate_json(replace(asked, rounds=2), resume=True)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
