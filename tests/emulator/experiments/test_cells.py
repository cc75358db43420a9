"""A table of the digits from end to end: it runs, keeps what is finished, goes on, and says what could not be run."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from coordinator.strategies.registry import make_method, method_settings
from emulator.experiments import plan, progress
from emulator.experiments.cells import CellRun, CellStorage, cell_runs, kept_round, read_finished, run_cells
from emulator.experiments.command import ExperimentArgs, run_experiment, summarise_experiment
from emulator.run.holding import hold_folder
from emulator.run.summary import Record
from emulator.simulation import virtual_network
from tests.support.size_limit import files_of_at_most

TOML = """
title = "A table of digits"
source = "none"
metrics = ["accuracy", "f1-of-devices", "ari"]
rounds = 4
seeds = 1
[settings]
local-steps = 5
batch-size = 8
[[columns]]
name = "digits"
data-set = "digits"
partition = "label-permutations:groups=2"
model = "digits-mlp"
devices = 4
[[columns]]
name = "absent"
data-set = "mnist"
partition = "iid"
model = "mnist-mlp"
devices = 4
[[rows]]
name = "FedAvg"
method = "fedavg"
paper = ["1 2 -", "3 4 -"]
"""
RESULTS = Path(__file__).parents[3] / "docs" / "results"
STORED = sorted(path.name for path in RESULTS.iterdir() if path.is_dir())
WRONG_ROW = '[[rows]]\nname = "None"\nmethod = "fesem"\nsettings = { representation = "none*" }\n'
BROKEN = TOML[: TOML.index("[[rows]]")] + WRONG_ROW


def test_a_table_runs_keeps_its_cells_and_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits-table.toml").write_text(BROKEN + TOML[TOML.index("[[rows]]") :])
    monkeypatch.setattr(plan, "EXPERIMENTS_FOLDER", tmp_path)
    said: list[str] = []
    prepared = ExperimentArgs(name="digits-table", data=tmp_path, out=tmp_path / "out", write=tmp_path / "R.md")
    found = run_experiment(prepared, said.append)
    assert (found["finished"], found["of"]) == (1, 4)
    assert list(found["reasons"]) == ["None (K=3), digits", "absent"]  # and the method after the broken one ran
    assert "3 of 4 cells were not run" in found["table"]
    assert found["table"] in (tmp_path / "R.md").read_text()
    (path,) = (tmp_path / "out" / "digits-table").glob("*.json")
    cell = json.loads(path.read_text())
    np.testing.assert_allclose(cell["values"]["accuracy"], [100 * v for v in cell["curves"]["accuracy"][1:]])
    assert cell["local_steps"] == 4 * 4 * 5
    assert cell["refused"] == {}
    assert cell["versions"]["numpy"] == np.__version__
    assert any("round 4/4" in line for line in said)
    begun = [i for i, line in enumerate(said) if "FedAvg (K=1), digits, seed 0: the first round is running" in line]
    ended = [i for i, line in enumerate(said) if "round 4/4" in line]
    assert len(begun) == len(ended) == 1
    assert begun < ended

    stamp = path.stat().st_mtime_ns
    again = run_experiment(prepared, said.append)
    assert path.stat().st_mtime_ns == stamp
    assert again["table"] == found["table"]
    assert any("1 finished before" in line for line in said)


def test_every_cell_has_its_first_seed_before_any_has_its_second() -> None:
    cells = plan.parse_plan("t", TOML).cells
    assert [(job.seed, job.cell.column.name) for job in cell_runs(cells, 2)] == [
        (0, "digits"), (0, "absent"), (1, "digits"), (1, "absent"),
    ]  # fmt: skip


class ProcessStopped(Exception):
    """Somebody ends the process here."""


def test_a_stopped_cell_goes_on_and_ends_with_the_same_figures(tmp_path: Path) -> None:
    cell, heard = plan.parse_plan("t", TOML, rounds=8).cells[0], list[int]()
    job, whole, cut = (
        CellRun(cell=cell, seed=0),
        CellStorage(data=None, out=tmp_path / "w"),
        CellStorage(data=None, out=tmp_path / "c"),
    )

    def stop(_: CellRun, record: Record) -> None:
        if record["round"] == 7:
            raise ProcessStopped

    run_cells([job], whole, ["accuracy", "f1-of-devices"], lambda *_: None)
    with pytest.raises(ProcessStopped):
        run_cells([job], cut, ["accuracy", "f1-of-devices"], stop)
    assert read_finished(job, cut) is None
    run_cells([job], cut, ["accuracy", "f1-of-devices"], lambda _, record: heard.append(record["round"]))
    assert heard == [6, 7, 8]
    expected, found = read_finished(job, whole), read_finished(job, cut)
    assert expected is not None
    assert found is not None
    assert {**found, "seconds": 0} == {**expected, "seconds": 0}
    assert [path.name for path in cut.out.iterdir()] == [job.path(cut).name]


def test_a_cell_that_another_process_finished_while_the_data_were_read_is_not_run_again(tmp_path: Path) -> None:
    cell, heard = plan.parse_plan("t", TOML, rounds=2).cells[0], list[str]()
    place, job = CellStorage(data=None, out=tmp_path), CellRun(cell=cell, seed=0)

    def begin(_: CellRun, what: str) -> None:
        heard.append(what)
        if len(heard) == 1:
            run_cells([job], place, ["accuracy"], lambda *_: None)

    assert run_cells([job], place, ["accuracy"], lambda *_: None, begin) == {}
    assert heard == ["reading digits"]


def test_a_cell_that_another_process_runs_is_left_to_it(tmp_path: Path) -> None:
    """Two processes would go on from one checkpoint, and each remove the other's."""
    cell = plan.parse_plan("t", TOML, rounds=2).cells[0]
    place, job = CellStorage(data=None, out=tmp_path), CellRun(cell=cell, seed=0)
    reasons: list[Mapping[str, str]] = []

    def beside(*_: object) -> None:
        reasons.append(run_cells([job], place, ["accuracy"], lambda *_: None))

    assert run_cells([job], place, ["accuracy"], beside) == {}
    assert ["is in use by a run that has not ended" in told[job.name] for told in reasons] == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == [job.path(place).name]


def test_a_cell_that_another_process_ends_meanwhile_is_not_told_as_one_that_was_not_run(tmp_path: Path) -> None:
    """The table had its figures, and below them the note that it was not run."""
    place, cell = CellStorage(data=None, out=tmp_path), plan.parse_plan("t", TOML, rounds=2).cells[0]
    job, later = (CellRun(cell=cell, seed=seed) for seed in range(2))
    job.started(place).mkdir()
    with ExitStack() as elsewhere:
        elsewhere.enter_context(hold_folder(job.started(place), hint=""))

        def begin(which: CellRun, what: str) -> None:
            if which is later and what.startswith("reading"):
                elsewhere.close()
                assert run_cells([job], place, ["accuracy"], lambda *_: None) == {}

        assert run_cells([job, later], place, ["accuracy"], lambda *_: None, begin) == {}


@pytest.mark.parametrize(
    ("ending", "words"), [(KeyboardInterrupt, "interrupted"), (OSError, "ended by an error")], ids=["stopped", "full"]
)
def test_a_table_that_ends_early_says_what_is_kept_what_is_left_and_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: type[BaseException], words: str
) -> None:
    """By Ctrl-C, or because the disk takes no more: then only the error was said."""
    text = TOML
    for old, new in (('"absent"', '"again"'), ('"mnist"', '"digits"'), ('"mnist-mlp"', '"digits-mlp"')):
        text = text.replace(old, new)
    (tmp_path / "two.toml").write_text(text)
    monkeypatch.setattr(plan, "EXPERIMENTS_FOLDER", tmp_path)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if "again" in line and "round 7/8" in line and threading.current_thread() is threading.main_thread():
            if ending is KeyboardInterrupt:
                raise KeyboardInterrupt  # not in the thread of the reporter, which tells of a slow round
            disk.enter_context(files_of_at_most(100))

    monkeypatch.setattr(progress, "SILENCE_S", 0.0)
    prepared = ExperimentArgs(name="two", out=tmp_path / "my out", rounds=8, only=["FedAvg"])
    with pytest.raises(ending), ExitStack() as disk:
        run_experiment(prepared, say)
    assert said[-1].startswith(f"{words}; {tmp_path / 'my out'}")
    assert "keeps 1 of 2 runs, and round 5 of 8 of FedAvg (K=1), again, seed 0. Left: 1. " in said[-1]
    command = shlex.split(said[-1].partition("Go on with: ")[2])
    assert command[:3] == ["fedcenters-emulator", "experiment", "two"]
    assert command[3:] == ["--rounds", "8", "--out", str(tmp_path / "my out"), "--only", "FedAvg"]
    told = summarise_experiment(prepared)
    assert [one["under_way"] for one in told["cells"]] == [{}, {"0": 5}]
    assert "| again | - | FedAvg, seed 0: round 5 of 8 kept | - |" in told["table"].splitlines()


def stopped_after_six_rounds(job: CellRun, place: CellStorage) -> None:
    """A process plays the cell, and is stopped after round 6, of which there is a checkpoint."""

    def stop(_: CellRun, record: Record) -> None:
        if record["round"] == 6:
            raise ProcessStopped

    with pytest.raises(ProcessStopped):
        run_cells([job], place, ["accuracy"], stop)


@pytest.mark.parametrize(
    ("setting", "then", "heard"),
    [
        ("fraction-train", 0.5, [1, 2, 3, 4, 5, 6]),
        ("server-momentum", None, [6]),  # of a version without it: it has its default, as in a run that is resumed
    ],
)
def test_a_cell_that_was_begun_with_another_default_begins_anew_and_one_without_a_later_setting_goes_on(
    tmp_path: Path, setting: str, then: float | None, heard: list[int]
) -> None:
    job, place, rounds = (
        CellRun(cell=plan.parse_plan("t", TOML, rounds=6).cells[0], seed=0),
        CellStorage(data=None, out=tmp_path),
        [],
    )
    stopped_after_six_rounds(job, place)
    (told,) = job.started(place).rglob("run.json")
    begun = json.loads(told.read_text())
    begun["lesson"]["settings"] |= {setting: then}
    if then is None:
        del begun["lesson"]["settings"][setting]
    told.write_text(json.dumps(begun))
    assert kept_round(job, place) == 6 - len(heard)
    assert run_cells([job], place, ["accuracy"], lambda _, record: rounds.append(record["round"])) == {}
    assert rounds == heard


def test_a_cell_whose_devices_models_are_damaged_begins_anew(tmp_path: Path) -> None:
    """It was named as one that could not be run, at each start, and a cell with another damaged file began anew."""
    cell, heard = plan.parse_plan("t", TOML.replace('"fedavg"', '"ditto"'), rounds=6).cells[0], list[int]()
    job, place = CellRun(cell=cell, seed=0), CellStorage(data=None, out=tmp_path)
    stopped_after_six_rounds(job, place)
    (models,) = job.started(place).rglob("own.npz")
    models.write_bytes(models.read_bytes()[:-100])
    assert run_cells([job], place, ["accuracy"], lambda _, record: heard.append(record["round"])) == {}
    assert heard == [1, 2, 3, 4, 5, 6]


def test_a_cell_that_was_run_with_another_default_is_not_finished(tmp_path: Path) -> None:
    job, place = CellRun(cell=plan.parse_plan("t", TOML).cells[0], seed=0), CellStorage(data=None, out=tmp_path)
    now = method_settings(make_method("fedavg", **job.cell.settings))
    later = {name: value for name, value in now.items() if name != "server-momentum"}
    kept = {**now, "gone": 1}
    for then, counts in ((now, True), (later, True), (kept, True), ({**now, "fraction-train": 0.5}, False)):
        job.path(place).write_text(json.dumps({"settings": then, "values": {}, "curves": {}}))
        assert (read_finished(job, place) is not None) == counts


@pytest.mark.parametrize("name", STORED)
def test_every_stored_result_is_a_finished_cell_of_its_table(name: str) -> None:
    folder = RESULTS / name
    for path in sorted(folder.glob("*.json")):
        told = json.loads(path.read_text())
        table = plan.read_plan(name, rounds=told["rounds"])
        found = [cell for cell in table.cells if cell.key(told["seed"]) == path.stem]
        assert [cell.row.method for cell in found] == [told["method"]], f"{path.name} is no cell of {name}"
        for kept in (told["values"], told["curves"]):
            if "f1" in kept:  # the name of an older version
                kept["f1-of-devices"] = kept.pop("f1")
        assert read_finished(CellRun(cell=found[0], seed=told["seed"]), CellStorage(data=None, out=folder)) == told
        assert set(table.metrics) <= told["values"].keys()


def test_a_cell_says_how_many_updates_were_refused_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_network, "MAX_UPDATE_RMS", 1e-9)
    job, place = (
        CellRun(cell=plan.parse_plan("t", TOML, rounds=2).cells[0], seed=0),
        CellStorage(data=None, out=tmp_path),
    )
    run_cells([job], place, ["accuracy"], lambda *_: None)
    found = read_finished(job, place)
    assert found is not None
    assert found["refused"] == {"rejected": 2 * 4}


def test_half_a_file_is_no_finished_cell(tmp_path: Path) -> None:
    job, place = CellRun(cell=plan.parse_plan("t", TOML).cells[0], seed=0), CellStorage(data=None, out=tmp_path)
    job.path(place).write_text('{"values": {')
    assert read_finished(job, place) is None


def test_a_table_of_mixtures_is_measured_on_pure_distributions(tmp_path: Path) -> None:
    read = plan.read_plan("fedsoft-table1", rounds=1)
    cell = next(c for c in read.cells if c.row.method == "fedsoft" and c.column.name == "10:90")
    place = CellStorage(data=None, out=tmp_path)
    assert run_cells([CellRun(cell=cell, seed=0)], place, read.metrics, lambda *_: None) == {}
    found = read_finished(CellRun(cell=cell, seed=0), place)
    assert found is not None
    matrix = np.array(found["holdout_loss"])
    assert matrix.shape == (2, 2)
    assert found["values"]["own-error"] == [pytest.approx(matrix.min(axis=0).mean())]
    assert found["values"]["other-error"] == [pytest.approx(matrix.max(axis=0).mean())]
