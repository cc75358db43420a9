"""A mistake in a user's own method or model: told with the user's file and line, and not as a bug of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edge_client.protocol.task import TOO_MANY_SLOTS
from emulator.cli import app

MINE = """
from dataclasses import dataclass, replace
import fedcenters as fc
import helpers_of_mine

@dataclass(frozen=True, kw_only=True)
class Raises(fc.LocalSgd):
    def round(self, state, schema, fleet, rng):
        raise KeyError("oops")
        yield {}

@dataclass(frozen=True, kw_only=True)
class Helped(fc.LocalSgd):
    def round(self, state, schema, fleet, rng):
        yield helpers_of_mine.tasks(fleet)

@dataclass(frozen=True, kw_only=True)
class CallsFit(fc.LocalSgd):
    def round(self, state, schema, fleet, rng):
        yield {who: self.fit(state.centers[0], 3) for who in fleet}

@dataclass(frozen=True, kw_only=True)
class CallsOurs(fc.WeCFL):
    def round(self, state, schema, fleet, rng):
        return (yield from super().round(state, schema, None, rng))

@dataclass(frozen=True, kw_only=True)
class YieldsList(fc.LocalSgd):
    def round(self, state, schema, fleet, rng):
        yield [1, 2]

@dataclass(frozen=True, kw_only=True)
class YieldsNumbers(fc.LocalSgd):
    def round(self, state, schema, fleet, rng):
        yield {who: 3 for who in fleet}

@dataclass(frozen=True, kw_only=True)
class NoRound(fc.LocalSgd):
    pass

@dataclass(frozen=True, kw_only=True)
class NoBegin(fc.FedAvg):
    def begin(self, model, schema, fleet, rng):
        return None

@dataclass(frozen=True, kw_only=True)
class ListOfCenters(fc.FedAvg):
    def round(self, state, schema, fleet, rng):
        yield {}
        return replace(state, centers=list(state.centers))

@dataclass(frozen=True, kw_only=True)
class BarePredictor(fc.FedAvg):
    def predictor(self, state, who):
        return state.centers[0]

@dataclass(frozen=True, kw_only=True)
class ReadsFile(fc.FedAvg):
    def __post_init__(self):
        open("absent.csv")

def make():
    return 1 / 0

class Mine(fc.FedAvg):
    pass

@dataclass(frozen=True, kw_only=True)
class BeginsAnywhere(fc.FedAvg):
    def round(self, state, schema, fleet, rng):
        yield {who: self.fit(start="x", seed=0) for who in fleet}
        return state

@dataclass(frozen=True, kw_only=True)
class AssignsAnywhere(fc.FedAvg):
    def round(self, state, schema, fleet, rng):
        yield {}
        return replace(state, assignment=dict.fromkeys(fleet, 7))

def needs(width):
    return 3

@dataclass(frozen=True, kw_only=True)
class KeepsNothing(fc.FedAvg):
    def round(self, state, schema, fleet, rng):
        yield {who: self.fit(start="own", seed=0) for who in fleet}
        return state

@dataclass(frozen=True, kw_only=True)
class ManySlots(fc.LocalSgd):
    def round(self, state, schema, fleet, rng):
        for n in range(65):
            yield {who: self.fit(start=state.centers[0], seed=0, slot=f"s{n}") for who in fleet}
        return state

@dataclass(frozen=True, kw_only=True)
class FromNothing:
    begin = round = predictor = lambda *parts: None

@dataclass(frozen=True, kw_only=True)
class NoSplit:
    def split(self, data, *, devices, seed):
        return [range(10)] * devices

from emulator.data.registry import DataSetEntry
PAIR = DataSetEntry(read=lambda folder, seed: ([0.0], [1]), model="digits-mlp", partition="iid", devices=3)
"""
HELPERS = """
def tasks(fleet):
    return {who: 1 / 0 for who in fleet}
"""
RUN = "from emulator.cli import main; main()"
CORRECT = "hint: correct that line"


WORDS = ("simulate", "--devices", "3", "--rounds", "2", "--out", "runs")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a user."""
    (tmp_path / "mymeth.py").write_text(MINE)
    (tmp_path / "helpers_of_mine.py").write_text(HELPERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("mymeth", "helpers_of_mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def said_of(*options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*WORDS, *options])
    return done.exit_code, done.stderr


@pytest.mark.parametrize(
    ("method", "said", "hint"),
    [
        ("Raises", "error: mymeth.py, line 9, in round: KeyError: 'oops'\n", CORRECT),
        ("Helped", "error: helpers_of_mine.py, line 3, in ", CORRECT),
        ("CallsFit", "TypeError: LocalSgd.fit() takes 1 positional argument but 3 were given\n", CORRECT),
        ("YieldsList", "error: mymeth.py, line 30, in round: YieldsList.round yields list\n", "yield a dict of tasks"),
        ("YieldsNumbers", "YieldsNumbers.round yields int for device-00\n", "yield a dict of tasks"),
        ("NoRound", "error: mymeth:NoRound is no method: it has no round\n", "write `round`"),
        ("FromNothing", "error: fromnothing has no setting batch-size\n", "extend fc.LocalSgd"),
        ("NoBegin", "error: NoBegin.begin returned NoneType\n", "return the next State"),
        ("ListOfCenters", "error: ListOfCenters.round returned centers of list\n", "give an array"),
        (
            "AssignsAnywhere",
            "error: AssignsAnywhere.round assigns a device to center 7\n",
            "hint: there are 1, from 0 on",
        ),
        ("BarePredictor", "error: BarePredictor.predictor returned ndarray\n", "pairs of a weight and a model"),
        ("ReadsFile", ", in __post_init__: FileNotFoundError: [Errno 2] No such file or directory", CORRECT),
    ],
)
def test_a_mistake_in_a_users_method_is_told_with_its_line_and_not_as_a_bug(method: str, said: str, hint: str) -> None:
    code, told = said_of("--method", f"mymeth:{method}")
    assert code == 2, told
    assert said in told
    assert hint in told.splitlines()[-1]
    assert "Traceback" not in told
    assert "bug" not in told


def test_a_start_that_is_no_model_is_told_with_its_line() -> None:
    """It ended at chance without a word: each text was taken for the device's own model, which a new device has not."""
    code, told = said_of("--method", "mymeth:BeginsAnywhere")
    assert code == 2
    assert "error: mymeth.py, line 71, in " in told
    assert ": ValueError: start must be one of ['own'], got 'x'" in told


def test_a_run_whose_devices_refuse_their_tasks_says_so_with_its_results() -> None:
    """A device that keeps no model cannot go on from it; the run ends where it began."""
    done = CliRunner().invoke(app, [*WORDS, "--method", "mymeth:KeepsNothing"])
    assert done.exit_code == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if "did not count" in line)
    assert row.split() == ["did", "not", "count", "in", "the", "last", "round", "3", "answers", "(no_own_model)"]


def test_more_models_than_a_device_keeps_are_refused_in_the_words_of_a_device() -> None:
    """The simulation played it to its end, and over MQTT each device refused the tasks."""
    code, told = said_of("--method", "mymeth:ManySlots", "-c", "local-steps=1")
    assert code == 3, told
    assert f"error: {TOO_MANY_SLOTS}\n" in told
    assert "hint: use fewer names" in told.splitlines()[-1]


def test_where_a_line_of_ours_raised_the_users_line_is_named_and_the_traceback_is_there_to_report() -> None:
    code, told = said_of("--method", "mymeth:CallsOurs")
    assert code == 2
    assert "Traceback" in told
    assert "error: mymeth.py, line 25, in round: TypeError: " in told
    assert "(raised in coordinator/strategies/" in told
    assert "report the lines above" in told.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--partition", "mymeth:NoSplit"), "NoSplit.split returned list\n\nhint: return make_fleet_data(data, "),
        (
            ("--data-set", "mymeth:PAIR"),
            "`read` of data set 'mymeth:PAIR' returned tuple\n\nhint: return DataSet",
        ),
    ],
)
def test_a_users_partition_or_data_set_that_returns_another_kind_is_no_bug_of_ours(
    options: tuple[str, ...], said: str
) -> None:
    code, told = said_of(*options)
    assert (code, told.count("Traceback")) == (2, 0)
    assert f"error: {said}" in told


def test_a_mistake_in_a_users_model_is_told_with_its_line() -> None:
    code, told = said_of("--model", "mymeth:make")
    assert code == 2
    assert "error: mymeth.py, line 63, in make: ZeroDivisionError: division by zero\n" in told
    assert "bug" not in told


def test_a_function_for_a_model_that_needs_arguments_is_told() -> None:
    code, told = said_of("--model", "mymeth:needs")
    assert code == 3
    assert "error: model 'mymeth:needs' is made without arguments: missing a required argument: 'width'\n" in told
    assert "ModelEntry(make=MyModule" in told.splitlines()[-1]


def test_a_command_in_a_process_of_its_own_tells_it_too(folder: Path) -> None:
    words = [sys.executable, "-c", RUN, *WORDS, "--method", "mymeth:Raises"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith(f"error: mymeth.py, line 9, in round: KeyError: 'oops'\n\n{CORRECT}\n")


def test_a_bug_of_ours_is_called_so_also_in_a_run_of_a_users_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.rounds.round.make_report", None)
    code, told = said_of("--method", "mymeth:Mine")
    assert code == 70
    assert "error: this is a bug of fedcenters" in told
