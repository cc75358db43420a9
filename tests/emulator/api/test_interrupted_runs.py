"""Runs that end before their last round: by on_round, by leaving the loop, by Ctrl-C; and how each goes on."""

from __future__ import annotations

import errno
import gc
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedcenters as fc
from edge_client.errors import ConfigError, FedcentersError, UsageError
from emulator.api.play import play
from emulator.cli import app
from emulator.options import SimulateArgs
from emulator.run.resolve import resolve_run

STEPS = 5


def digits(devices: int = 4) -> fc.Fleet:
    return fc.fleets.digits(devices=devices)


def test_on_round_ends_a_run_early_and_its_folder_can_be_resumed(tmp_path: Path) -> None:
    method = fc.FedAvg(local_steps=STEPS)
    place: dict[str, Any] = {"out": tmp_path, "name": "cut"}
    whole = fc.simulate(method, fleet=digits(), rounds=3)
    cut = fc.simulate(method, fleet=digits(), rounds=3, on_round=lambda r: len(r.run.records) == 2, **place)
    assert len(cut.history) == cut.args.rounds == cut.summary()["rounds"] == 2
    again = fc.simulate(method, fleet=digits(), rounds=3, resume=True, **place)
    np.testing.assert_array_equal(again.run.state.centers, whole.run.state.centers)
    assert list(again.history["accuracy"]) == list(whole.history["accuracy"])
    more = fc.simulate(method, fleet=digits(), rounds=4, resume=True, **place)
    assert [record["of"] for record in more.run.records] == [4] * 4


def hand_written(seed: int, *, last: float | None = None) -> fc.Fleet:
    """`last` replaces one number of each device's last sample."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((3, 30, 4)).astype(np.float32)
    x[:, -1, 0] = x[:, -1, 0] if last is None else last
    return fc.fleet({f"u{i}": (x[i], np.arange(30) % 3) for i in range(3)})


def two_layers(hidden: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, hidden), torch.nn.Linear(hidden, 3))


def test_a_run_goes_on_with_its_own_samples_and_model_only(tmp_path: Path) -> None:
    """The options of a run do not name the user's own, and its folder does not hold them."""
    asked: dict[str, Any] = {"out": tmp_path, "name": "mine", "model": lambda: two_layers(2)}
    method = fc.FedAvg(local_steps=STEPS)
    whole = fc.simulate(method, fleet=hand_written(0), model=asked["model"], rounds=2)
    fc.simulate(method, fleet=hand_written(0), rounds=1, **asked)
    with pytest.raises(ConfigError, match="mine has a run of devices with other samples"):
        fc.simulate(method, fleet=hand_written(1), rounds=2, resume=True, **asked)
    wider = asked | {"model": lambda: two_layers(8)}
    with pytest.raises(ConfigError, match="mine has a run of a model with 19 numbers, not 67"):
        fc.simulate(method, fleet=hand_written(0), rounds=2, resume=True, **wider)
    again = fc.simulate(method, fleet=hand_written(0), rounds=2, resume=True, **asked)
    np.testing.assert_array_equal(again.run.state.centers, whole.run.state.centers)


def test_samples_that_differ_only_after_each_devices_first_are_others(tmp_path: Path) -> None:
    """The checkpoint of an earlier version, which tells of the first ones alone, goes on as it did."""
    asked: dict[str, Any] = {"out": tmp_path, "name": "mine", "model": lambda: two_layers(2)}
    method = fc.FedAvg(local_steps=STEPS)
    fc.simulate(method, fleet=hand_written(0), rounds=1, **asked)
    with pytest.raises(ConfigError, match="mine has a run of devices with other samples"):
        fc.simulate(method, fleet=hand_written(0, last=9.0), rounds=2, resume=True, **asked)
    with pytest.raises(ConfigError, match="this fleet has other samples than the run, as many of each class"):
        fc.load(tmp_path / "mine", fleet=hand_written(0, last=9.0))
    kept = tmp_path / "mine" / "checkpoint" / "run.json"
    told = json.loads(kept.read_text())
    told["network"]["samples"] = told["network"]["samples"][0]
    kept.write_text(json.dumps(told))
    (tmp_path / "mine" / "fleet.json").unlink()
    with pytest.raises(ConfigError, match="mine has a run of devices with other samples"):
        fc.simulate(method, fleet=hand_written(1), rounds=2, resume=True, **asked)
    assert len(fc.simulate(method, fleet=hand_written(0), rounds=2, resume=True, **asked).history) == 2


def test_leaving_the_loop_writes_the_folder_of_the_rounds_so_far(tmp_path: Path) -> None:
    for _ in fc.rounds(fc.FedAvg(local_steps=STEPS), fleet=digits(), rounds=9, out=tmp_path, name="left"):
        break
    assert len((tmp_path / "left" / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_run_of_ones_own_parts_whose_loop_was_left_needs_none_of_them_afterwards(tmp_path: Path) -> None:
    """Python leaves a generator by an exception; torch, which writes the module meanwhile, has not failed by it."""
    fleet = hand_written(0)
    for _ in fc.rounds(fc.FedAvg(local_steps=1), fleet=fleet, model=two_layers(4), rounds=9, out=tmp_path, name="left"):
        break
    x = fleet["u0"].train.x
    assert fc.load(tmp_path / "left").predict(x, center=0).shape == (len(x),)
    assert fc.load(tmp_path / "left").guide is not None


def test_a_run_that_has_all_its_rounds_is_not_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its devices would train once more for `nearest`, in each run of a comparison that goes on."""
    asked: dict[str, Any] = {"fleet": hand_written(0), "model": two_layers(4), "rounds": 1, "out": tmp_path}
    first = fc.simulate(fc.FedAvg(local_steps=1), **asked, name="mine")
    guide = tmp_path / "mine" / "newcomers" / "guide.json"
    before = guide.stat().st_mtime_ns
    again = fc.simulate(fc.FedAvg(local_steps=1), **asked, name="mine", resume=True)
    assert again.accuracy == first.accuracy
    assert guide.stat().st_mtime_ns == before
    assert f"{tmp_path / 'mine'} has its 1 round already" in capsys.readouterr().err


def test_the_guide_of_a_run_that_goes_on_is_that_of_the_centers_in_its_folder(tmp_path: Path) -> None:
    """It was removed at the start, so that an interrupted run had none; a kill could leave an old one."""
    folder, last = tmp_path / "mine", 3
    asked: dict[str, Any] = {"fleet": hand_written(0), "model": two_layers(4), "out": tmp_path, "name": "mine"}
    fc.simulate(fc.FedAvg(local_steps=1), **asked, rounds=1)
    files = [folder / "newcomers" / "guide.json", folder / "metrics.jsonl"]
    first = [file.read_bytes() for file in files]
    for result in fc.rounds(fc.FedAvg(local_steps=1), **asked, rounds=last, resume=True):
        assert len(result.history) > len(fc.load(folder).history) == 1
        assert fc.load(folder).guide is not None
    done = [file.read_bytes() for file in files]
    for file, before in zip(files, first, strict=True):
        file.write_bytes(before)  # as if it had been killed behind its last checkpoint
    fc.simulate(fc.FedAvg(local_steps=1), **asked, rounds=last, resume=True)
    assert len(fc.load(folder).history) == last
    assert files[0].read_bytes() == done[0] != first[0]


def test_a_run_of_ones_own_model_may_be_played_while_an_exception_is_handled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {"fleet": hand_written(0), "model": two_layers(4), "rounds": 1}
    try:
        fc.load(tmp_path / "mine")
    except ConfigError:
        fc.simulate(fc.FedAvg(local_steps=1), **asked, out=tmp_path, name="mine")
    assert "will need" not in capsys.readouterr().err
    assert fc.load(tmp_path / "mine").module(0) is not None


def test_a_run_whose_loop_was_left_goes_on(tmp_path: Path) -> None:
    method, place = fc.FedAvg(local_steps=STEPS), {"out": tmp_path, "name": "left"}
    for result in fc.rounds(method, fleet=digits(3), rounds=9, **place):  # type: ignore[arg-type]
        if len(result.history) == 2:
            break
    again = fc.simulate(method, fleet=digits(3), rounds=3, resume=True, **place)  # type: ignore[arg-type]
    whole = fc.simulate(method, fleet=digits(3), rounds=3)
    np.testing.assert_array_equal(again.run.state.centers, whole.run.state.centers)


def test_a_run_over_a_column_that_was_saved_before_columns_were_told_goes_on(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 3
    asked: dict[str, Any] = {
        "method": fc.FedAvg(local_steps=STEPS),
        "fleet": fc.fleet((x, y), by=np.repeat(["anna", "ben", "cleo"], 20)),
        "model": torch.nn.Linear(4, 3),
    }
    place: dict[str, Any] = {"out": tmp_path, "name": "mine"}
    fc.simulate(**asked, rounds=2, **place)
    for file in (tmp_path / "mine" / "config.toml", tmp_path / "mine" / "checkpoint" / "run.json"):
        told = file.read_text()
        assert "by=array" in told
        file.write_text(told.replace("by=array", "by-user:least=2"))
    again = fc.simulate(**asked, rounds=3, resume=True, **place)
    np.testing.assert_array_equal(again.run.state.centers, fc.simulate(**asked, rounds=3).run.state.centers)


def test_a_loop_that_was_left_is_saved_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    method, fleet = fc.FedAvg(local_steps=STEPS), digits(3)
    for result in fc.rounds(method, fleet=fleet, rounds=9):
        if len(result.history) == 2:
            result.save(tmp_path / "inside")
            break
    assert "inside has no checkpoint to go on from: save when the loop is left, or give out=" in caplog.text
    caplog.clear()
    result.save(tmp_path / "mine")
    assert "no checkpoint" not in caplog.text
    again = fc.simulate(method, fleet=fleet, rounds=3, out=tmp_path, name="mine", resume=True)
    whole = fc.simulate(method, fleet=fleet, rounds=3)
    np.testing.assert_array_equal(again.run.state.centers, whole.run.state.centers)
    with pytest.raises(UsageError, match=r"(?s)has 3 rounds already.*shall have 2.*`rounds`, or leave out `resume`"):
        fc.simulate(method, fleet=fleet, rounds=2, out=tmp_path, name="mine", resume=True)


def test_an_interrupted_run_names_what_it_keeps_and_how_it_goes_on(tmp_path: Path) -> None:
    told: list[str] = []
    args = SimulateArgs(devices=3, rounds=4, checkpoint_every=1, out=tmp_path, name="cut", settings={"local-steps": 1})
    run = play(resolve_run(args), say=told.append)
    assert [len(next(run).run.records) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(KeyboardInterrupt):
        run.throw(KeyboardInterrupt)
    command = f"fedcenters-emulator simulate {tmp_path}/cut/config.toml --resume"
    kept = f"rounds 1 to 2 of 4 are kept in {tmp_path}/cut"
    assert told == [f"interrupted; {kept}. In Python give resume=True. Go on with: {command}"]
    done = CliRunner().invoke(app, command.split()[1:])
    assert done.exit_code == 0, done.output
    assert len((tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("part", "given"),
    [
        ("samples", lambda: {"fleet": hand_written(0)}),
        ("model", lambda: {"fleet": digits(), "model": nn.Sequential(nn.Flatten(), nn.Linear(64, 10))}),
        ("loss", lambda: {"fleet": digits(), "loss": nn.CrossEntropyLoss()}),
    ],
)
def test_an_interrupted_run_of_what_is_ones_own_names_no_command_since_none_has_it(
    part: str, given: Callable[[], dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {**given(), "rounds": 4, "out": tmp_path, "name": "cut"}
    tested: list[int] = []

    def interrupts(y: np.ndarray, _: np.ndarray) -> float:
        tested.append(len(y))
        if len(tested) == 3 * len(asked["fleet"]):
            raise KeyboardInterrupt
        return 0.0

    asked |= {"metrics": {"tested": interrupts}, "checkpoint_every": 1}
    with pytest.raises(KeyboardInterrupt):
        fc.simulate(fc.FedAvg(local_steps=1), **asked)
    told = capfd.readouterr().err
    assert f"Go on with the same call and out='{tmp_path}', name='cut', resume=True" in told
    assert f"(no command has the {part} that you gave in Python)" in told
    assert "fedcenters-emulator" not in told
    assert len(fc.simulate(fc.FedAvg(local_steps=1), resume=True, **asked).history) == 4


@pytest.mark.parametrize(
    ("every", "rounds", "words"),
    [
        (None, 2, "round 1 of 10 is kept in"),
        (None, 1, "nothing is kept: no round was written"),
        (5, 2, "nothing is kept: checkpoint-every is 5"),
    ],
)
def test_a_run_keeps_its_first_round_unless_asked_for_less(
    every: int | None, rounds: int, words: str, tmp_path: Path
) -> None:
    told: list[str] = []
    args = SimulateArgs(devices=3, checkpoint_every=every, out=tmp_path, name="cut", settings={"local-steps": 1})
    run = play(resolve_run(args), say=told.append)
    for _ in range(rounds):
        next(run)
    with pytest.raises(KeyboardInterrupt):
        run.throw(KeyboardInterrupt)
    assert words in told[-1]


def test_the_card_of_a_run_that_was_ended_early_counts_the_rounds_that_were_done(tmp_path: Path) -> None:
    fleet = fc.fleets.digits(devices=3)
    result = fc.simulate(fc.FedAvg(local_steps=1), fleet=fleet, rounds=9, on_round=lambda now: len(now.history) == 2)
    bundle = result.export(tmp_path / "centers", formats=())
    assert [center["card"]["rounds"] for center in bundle.manifest["centers"]] == [2]


def test_an_error_that_is_kept_does_not_write_over_the_run_that_came_after_it(tmp_path: Path) -> None:
    """A notebook keeps the last error, and with it what was running."""
    asked: dict[str, Any] = {"fleet": digits(), "rounds": 3, "out": tmp_path, "name": "mine"}

    def wrong(_: fc.Result) -> None:
        raise KeyError("a typing error")

    with pytest.raises(KeyError) as kept:
        fc.simulate(fc.FedAvg(local_steps=STEPS), on_round=wrong, **asked)
    fc.simulate(fc.FedAvg(local_steps=STEPS), **asked)
    del kept
    gc.collect()
    assert len((tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_run_that_goes_on_has_its_folder_for_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two would mix their checkpoints, and each removed the other's. The second one said that the first is replaced."""
    asked: dict[str, Any] = {"fleet": digits(), "rounds": 3, "out": tmp_path, "name": "mine"}
    method = fc.FedAvg(local_steps=STEPS)
    first = fc.rounds(method, checkpoint_every=1, **asked)
    next(first)
    kept = (tmp_path / "mine" / "config.toml").read_bytes()
    for resume in (False, True):
        with pytest.raises(ConfigError, match="mine is in use by a run that has not ended") as told:
            fc.simulate(method, resume=resume, **asked)
        assert "another `name`" in told.value.hint
    assert (tmp_path / "mine" / "config.toml").read_bytes() == kept
    assert "it is replaced" not in capfd.readouterr().err
    assert len(list(first)) == 2
    fc.simulate(method, **asked)


def test_a_run_that_ended_while_its_centers_were_written_is_loaded_from_its_checkpoint(tmp_path: Path) -> None:
    """It was told as fewer rounds, with centers of the last one or none."""
    asked: dict[str, Any] = {"fleet": digits(3), "out": tmp_path, "name": "mine"}
    whole = fc.simulate(fc.FedAvg(local_steps=1), fleet=digits(3), rounds=2)
    fc.simulate(fc.FedAvg(local_steps=1), **asked, rounds=1)
    center = tmp_path / "mine" / "centers" / "fedavg" / "center-0.safetensors"
    center.unlink()
    center.mkdir()  # where no center can be written
    with pytest.raises(OSError, match="center-0"):
        fc.simulate(fc.FedAvg(local_steps=1), **asked, rounds=2, resume=True)
    again = fc.load(tmp_path / "mine")
    assert len(again.history) == 2
    np.testing.assert_array_equal(again.run.state.centers, whole.run.state.centers)


def test_a_damaged_file_of_the_fleet_hides_no_word_of_how_a_run_goes_on(tmp_path: Path) -> None:
    told: list[str] = []
    args = SimulateArgs(devices=3, rounds=1, out=tmp_path, name="cut", settings={"local-steps": 1})
    list(play(resolve_run(args)))
    (tmp_path / "cut" / "fleet.json").write_text("")
    run = play(resolve_run(replace(args, rounds=9)), resume=True, say=told.append)
    next(run)
    with pytest.raises(KeyboardInterrupt):
        run.throw(KeyboardInterrupt)
    assert told[-1].startswith("interrupted; round 1 of 9 is kept")


def test_damaged_models_of_devices_are_told_to_who_asks_for_them(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"fleet": digits(), "out": tmp_path, "name": "mine"}
    result = fc.simulate(fc.Ditto(local_steps=1), **asked, rounds=1)
    file = tmp_path / "mine" / "checkpoint" / "own" / "own.npz"
    deflated = re.sub(rb"(PK\x01\x02.{6})\0\0", b"\\1\x08\0", file.read_bytes(), flags=re.DOTALL)
    file.write_bytes(deflated)  # its members are called compressed, which they are not
    x = result.split.devices["device-00"].test.x  # type: ignore[union-attr]
    for ask in (
        lambda: fc.load(tmp_path / "mine").predict(x, device="device-00"),
        lambda: fc.simulate(fc.Ditto(local_steps=1), **asked, rounds=2, resume=True),
    ):
        with pytest.raises(ConfigError, match="checkpoint cannot be read: it is damaged") as told:
            ask()
        assert "resume" not in told.value.hint  # `load` and `predict` have no such argument


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space"), FedcentersError("a worker process ended")])
def test_a_run_that_its_machine_ends_says_how_it_goes_on(error: Exception, tmp_path: Path) -> None:
    """The same command without --resume would begin anew, and replace what is kept."""
    told: list[str] = []
    args = SimulateArgs(devices=3, rounds=4, checkpoint_every=1, out=tmp_path, name="cut", settings={"local-steps": 1})
    run = play(resolve_run(args), say=told.append)
    for _ in range(3):
        next(run)
    with pytest.raises(type(error)):
        run.throw(error)
    command = f"fedcenters-emulator simulate {tmp_path}/cut/config.toml --resume"
    kept = f"rounds 1 to 2 of 4 are kept in {tmp_path}/cut"
    assert told == [f"ended by an error; {kept}. In Python give resume=True. Go on with: {command}"]


def test_the_seconds_of_a_run_that_went_on_are_those_of_all_its_rounds(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"fleet": fc.fleets.digits(devices=3), "out": tmp_path, "name": "mine", "progress": False}
    fc.simulate(fc.FedAvg(local_steps=2), rounds=2, **asked)
    folder = tmp_path / "mine"
    told = json.loads((folder / "checkpoint" / "run.json").read_text())
    (folder / "checkpoint" / "run.json").write_text(json.dumps({**told, "real_seconds": [100.0, 200.0]}))
    again = fc.simulate(fc.FedAvg(local_steps=2), rounds=2, resume=True, **asked)
    assert again.seconds >= 300
    assert again.seconds >= sum(fc.load(folder).run.real_seconds)


def test_the_folder_of_an_interrupted_run_says_how_to_go_on(tmp_path: Path) -> None:
    """`fc.load` said that it has no run, and to give the folder that `save` wrote."""

    def interrupt(_: fc.Result) -> None:
        raise KeyboardInterrupt

    place: dict[str, Any] = {"out": tmp_path, "name": "cut", "progress": False}
    method = fc.FedAvg(local_steps=STEPS)
    with pytest.raises(KeyboardInterrupt):
        fc.simulate(method, fleet=hand_written(0), rounds=2, on_round=interrupt, workers=1, **place)
    shutil.rmtree(tmp_path / "cut" / "centers")  # an interruption within a round leaves a checkpoint alone
    (tmp_path / "cut" / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="interrupted after round 1") as told:
        fc.load(tmp_path / "cut")
    assert f'out="{tmp_path}", name="cut", resume=True' in told.value.hint
    assert len(fc.simulate(method, fleet=hand_written(0), rounds=2, resume=True, **place).history) == 2
