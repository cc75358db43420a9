from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.models.members import summed_name
from coordinator.models.registry import MODELS, build_model
from coordinator.strategies.baselines.fedavg import FedAvg
from coordinator.strategies.registry import make_method, summed_members
from edge_client.errors import ConfigError, FedcentersError, UsageError
from edge_client.protocol.task import Flat, Schema
from emulator.data import registry
from emulator.data.partition_schemes import parse_scheme
from emulator.experiments import plan
from emulator.experiments.measures import MEASURES
from export.compiler.program import schema_of, vector_of

every_experiment = pytest.mark.parametrize("name", plan.experiment_names())

TOML = """
title = "T"
source = "S"
metrics = ["accuracy", "f1-of-devices"]
rounds = 7
seeds = 2
[settings]
local-steps = 10
momentum = 0.9
[[columns]]
name = "A"
data-set = "digits"
partition = "iid"
model = "digits-mlp"
devices = 4
settings = { learning-rate = 0.2 }
[[rows]]
name = "FedAvg"
method = "fedavg"
paper = ["86.08±0.70 -"]
[[rows]]
name = "FedSGD"
method = "fedsgd"
settings = { batch-size = 3 }
"""

SECOND_COLUMN = """
[[columns]]
name = "B"
data-set = "digits"
partition = "iid"
model = "digits-mlp"
devices = 4
"""

OWN_METHOD = """
from dataclasses import dataclass

import fedcenters as fc


@dataclass(frozen=True, kw_only=True, repr=False)
class Own(fc.FedAvg):
    share: float = 0.5
"""


@every_experiment
def test_every_cell_can_be_made(name: str) -> None:
    read = plan.read_plan(name)
    assert len({cell.key(0) for cell in read.cells}) == len(read.cells)
    assert set(read.metrics) <= MEASURES.keys()
    for cell in read.cells:
        assert make_method(cell.row.method, **cell.settings)
        assert parse_scheme(cell.column.partition)
        assert cell.column.model in MODELS
        assert registry.find_data_set(cell.column.data_set)


@functools.cache
def begun_with(model: str) -> tuple[Flat, Schema]:
    module = build_model(model, seed=0).module
    schema = schema_of(module)
    return vector_of(module, schema), schema


REFUSED = {"fesem-table2": {("FedSGD", "CelebA")}}  # batch norm, which gradients do not train: a note says so


@every_experiment
def test_every_cell_can_begin_with_its_columns_model(name: str) -> None:
    refused = set[tuple[str, str]]()
    for cell in plan.read_plan(name).cells:
        method, fleet = make_method(cell.row.method, **cell.settings), {f"device-{i:02d}": 20 for i in range(20)}
        model = summed_name(cell.column.model, summed_members(cell.row.method))
        try:
            method.begin(*begun_with(model), fleet, np.random.default_rng(0))
        except ConfigError:
            refused.add((cell.row.name, cell.column.name))
    assert refused == REFUSED.get(name, set())
    assert all(any(row in note and column in note for note in plan.read_plan(name).notes) for row, column in refused)


def test_the_papers_tables_are_there_with_their_figures() -> None:
    assert set(plan.experiment_names()) >= {
        "wecfl-table2", "wecfl-table5", "fedsoft-table1", "fedsoft-table2", "fedsoft-table3", "fesem-table2",
    }  # fmt: skip
    cells = plan.read_plan("wecfl-table2").cells
    assert len(cells) == 84
    found = next(c for c in cells if (c.row.method, c.row.k, c.column.name) == ("wecfl", 10, "CIFAR-10 (0.1, 10)"))
    assert found.paper == {
        "accuracy": plan.PaperFigure(mean=70.95, deviation=3.57),
        "f1-of-devices": plan.PaperFigure(mean=40.19, deviation=2.88),
    }
    assert found.settings["local-steps"] == 10
    assert found.settings["clusters"] == 10


def test_shared_settings_reach_the_methods_that_have_them_and_figures_their_metrics() -> None:
    fedavg, fedsgd = plan.parse_plan("t", TOML).cells
    assert fedavg.settings == {"local-steps": 10, "momentum": 0.9, "learning-rate": 0.2}
    assert fedsgd.settings == {"learning-rate": 0.2, "batch-size": 3}
    assert fedavg.paper == {"accuracy": plan.PaperFigure(mean=86.08, deviation=0.7)}
    assert fedsgd.paper == {}


def test_shared_settings_reach_a_method_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_row.py").write_text(OWN_METHOD)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.toml").write_text(TOML.replace('"fedsgd"', '"own_row:Own"'))
    read = plan.read_plan(str(tmp_path / "mine.toml"))
    fedavg, own = read.cells
    assert read.name == "mine"
    assert own.settings == {**fedavg.settings, "batch-size": 3}
    assert make_method(own.row.method, **own.settings) == make_method("own_row:Own", **own.settings)
    assert re.fullmatch(r"[\w-]+", own.key(0))


def test_a_table_of_the_users_own_that_cannot_be_read_or_names_no_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml cannot be read"):
        plan.read_plan(str(tmp_path / "missing.toml"))
    (tmp_path / "mine.toml").write_text(TOML.replace('"fedsgd"', '"fedsgdd"'))
    with pytest.raises(UsageError, match="unknown method 'fedsgdd'"):
        plan.read_plan(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"accuracy", ', '"accuracie", ', "no measure is called 'accuracie'; there are accuracy, "),
        ('["accuracy", "f1-of-devices"]', "[]", "metrics names no measure"),
        ("rounds = 7", "rounds = 0", "at least 1"),
        ("seeds = 2", "seeds = -1", "at least 1"),
        ("batch-size = 3", "batch-size = 2026-01-01", "not JSON serializable"),
        (
            '[[rows]]\nname = "FedAvg"',
            f'{SECOND_COLUMN}[[rows]]\nname = "FedAvg"',
            "FedAvg: paper has 1 texts for 2 columns",
        ),
        ("[settings]", "also = 3\n[settings]", "also is 3: write a table, { ... }"),
        ("seeds = 2", "seed = 2", "unknown key 'seed': did you mean 'seeds'?"),
        ("seeds = 2", "", "'seeds' is missing"),
        ("seeds = 2", "seeds = 2.5", "seeds is 2.5: write a whole number"),
        ("rounds = 7", "rounds = true", "rounds is True: write a whole number"),
        ("[settings]", "[setting]", "unknown key 'setting': did you mean 'settings'?"),
        (
            "[settings]\nlocal-steps",
            "[settings]\nlocal-step",
            "no row has the setting 'local-step': did you mean 'local-steps'?",
        ),
        ("learning-rate", "learning-rat", "no row has the setting 'learning-rat': did you mean 'learning-rate'?"),
        ("batch-size = 3", "batch-sise = 3", "FedSGD: fedsgd has no setting 'batch-sise': did you mean 'batch-size'?"),
        ('"digits"', '"digit"', "A: unknown data set 'digit': did you mean 'digits'?"),
        ('"digits-mlp"', '"digits-mpl"', "A: unknown model 'digits-mpl': did you mean 'digits-mlp'?"),
        ('"digits-mlp"', '"digits-mlp+mlp"', "A: unknown model 'mlp'"),
        ('"digits-mlp"', '""', "A: unknown model ''"),
        ('"digits-mlp"', '"pathlib:Net"', "A: module 'pathlib' has no 'Net'"),
        ('"iid"', '"n-class:class=2"', "A: 'class=2' is no setting of partition 'n-class': did you mean 'classes'?"),
        ('"fedsgd"\n', '"fedsgd"\nagainst = "Fedavg"\n', "no row is called 'Fedavg': did you mean 'FedAvg'?"),
        ("devices = 4", 'devices = "4"', "columns, number 1: devices is '4': write a whole number"),
        ("devices = 4", "devices = -4", "A: -4 devices"),
        ("devices = 4", "device = 4", "columns, number 1: unknown key 'device': did you mean 'devices'?"),
        ('method = "fedsgd"', "", "rows, number 2: 'method' is missing"),
        ('method = "fedsgd"', "method = 3", "rows, number 2: method is 3: write a text"),
        ('["86.08±0.70 -"]', '"86.08±0.70 -"', "paper is '86.08±0.70 -': write a list of texts"),
        ('["86.08±0.70 -"]', '["1 2", "3 4"]', "FedAvg: paper has 2 texts for 1 columns"),
        ('["accuracy", "f1-of-devices"]', '"accuracy"', "metrics is 'accuracy': write a list of texts"),
        ('["accuracy", "f1-of-devices"]', '["accuracy", "accuracy"]', "two metrics are called 'accuracy'"),
        ("[[columns]]", "[columns]", "columns is {"),
        ('name = "A"', 'name = "A | B"', "'A | B': a name that stands in a table has no |"),
        ('"FedSGD"', '"FedAvg"', "two rows are called 'FedAvg'"),
        ('"FedSGD"\nmethod = "fedsgd"', '"FedAvg"\nmethod = "ifca"\nk = 1', "two rows are called 'FedAvg'"),
        ('[[rows]]\nname = "FedAvg"', f'{SECOND_COLUMN}[[rows]]\nname = "FedAvg"'.replace('"B"', '"A"'), "two columns"),
    ],
)
def test_a_table_of_the_users_own_with_a_fault_is_refused_before_a_run(
    old: str, new: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text(TOML.replace(old, new))
    with pytest.raises(ConfigError, match="experiment mine: ") as refused:
        plan.read_plan(str(tmp_path / "mine.toml"))
    assert told in refused.value.message
    assert str(plan.EXPERIMENTS_FOLDER) in refused.value.hint


@pytest.mark.parametrize(
    ("setting", "told"),
    [("batch-sise = 3", "fedsgd has no setting 'batch-sise'"), ("batch-size = 0", "batch-size is 0")],
)
def test_a_wrong_setting_of_a_row_is_told_before_any_cell_runs(setting: str, told: str) -> None:
    with pytest.raises(FedcentersError, match=told):
        plan.parse_plan("t", TOML.replace("batch-size = 3", setting))


class BareMethod(FedAvg):
    share: float = 0.5


def test_a_row_of_a_class_that_lacks_its_decorator_is_told_which() -> None:
    row = TOML.replace("batch-size = 3", "share = 1")
    mine = row.replace('method = "fedsgd"', f'method = "{__name__}:BareMethod"')
    with pytest.raises(ConfigError, match=r"has no setting 'share': write @dataclass\(.*above class BareMethod"):
        plan.parse_plan("t", mine)


def test_rows_of_one_name_differ_in_their_centers_but_not_where_each_is_a_column() -> None:
    several = TOML.replace('"FedSGD"\nmethod = "fedsgd"', '"FedAvg"\nmethod = "ifca"\nk = 2')
    assert [cell.row.k for cell in plan.parse_plan("t", several).cells] == [1, 2]
    with pytest.raises(ConfigError, match=r"^experiment t: two rows are called 'FedAvg'"):
        plan.parse_plan("t", several.replace("seeds = 2", 'seeds = 2\njudged = "FedAvg"'))


def test_the_file_of_a_cell_lies_in_the_tables_folder_whatever_its_data_set_is_called() -> None:
    cell = plan.parse_plan("x", TOML).cells[0]
    cell = replace(cell, column=replace(cell.column, data_set="own:Rows:at=../rows 1.csv"))
    assert re.fullmatch(r"own-Rows-at-..-rows-1.csv-fedavg-k1-r7-s0-\w{10}", cell.key(0))


def test_the_name_of_a_finished_cell_changes_with_whatever_changes_its_result() -> None:
    other = TOML.replace("learning-rate = 0.2", "learning-rate = 0.3")
    keys = {
        plan.parse_plan("t", TOML).cells[0].key(0),
        plan.parse_plan("t", TOML).cells[0].key(1),
        plan.parse_plan("t", TOML, rounds=8).cells[0].key(0),
        plan.parse_plan("t", other).cells[0].key(0),
    }
    assert len(keys) == 4
    assert all(re.fullmatch(r"[\w-]+", key) for key in keys)
    renamed = TOML.replace('name = "A"', 'name = "B"')
    assert plan.parse_plan("t", renamed).cells[0].key(0) == plan.parse_plan("t", TOML).cells[0].key(0)


@pytest.mark.parametrize(
    ("old", "new"),
    [('title = "T"', ""), ("86.08±0.70 -", "86.08"), ("86.08±0.70", "x"), ("86.08±0.70", "nan"), ("devices = 4", "")],
)
def test_a_file_that_describes_no_table_is_refused(old: str, new: str) -> None:
    with pytest.raises(ConfigError, match="experiment t"):
        plan.parse_plan("t", TOML.replace(old, new))


def test_an_unknown_table_or_method_lists_what_there_is() -> None:
    with pytest.raises(UsageError) as wrong:
        plan.read_plan("wecfl")
    assert "wecfl-table2" in wrong.value.hint
    with pytest.raises(UsageError) as wrong:
        plan.read_plan("wecfl-table2").only(["fedsgd"])
    assert "fedavg" in wrong.value.hint
    table = plan.read_plan("wecfl-table2")
    assert {c.row.method for c in table.only(["wecfl", "ifca"])} == {"wecfl", "ifca"}
    chosen = table.only(["wecfl,fesem", "K=10", "F-MNIST (3, 2)"])
    assert {(c.row.method, c.row.k, c.column.name) for c in chosen} == {
        ("wecfl", 10, "F-MNIST (3, 2)"),
        ("fesem", 10, "F-MNIST (3, 2)"),
    }
    assert {c.row.name for c in table.only(["FedAvg, label prior"])} == {"FedAvg, label prior"}
    assert table.only([]) == table.cells
    with pytest.raises(UsageError, match="no cell with FedAvg and K=10"):
        table.only(["FedAvg", "K=10"])


def test_a_row_without_k_has_the_centers_that_its_method_begins_with() -> None:
    said = TOML.replace('"fedsgd"', '"fesem"').replace("batch-size = 3", "clusters = 2")
    by_default = said.replace("clusters = 2", "lam = 0.5")
    for text, centers in ((said, 2), (by_default, 3)):
        table = plan.parse_plan("t", text)
        mine = [cell for cell in table.cells if cell.row.method == "fesem"]
        assert mine
        assert {cell.centers for cell in mine} == {centers}
        assert f"(K={centers})" in mine[0].name
        assert list(table.only([f"K={centers}"])) == mine


def test_names_with_commas_stand_beside_others_and_the_longest_is_taken() -> None:
    known = ["FedAvg", "FedSoft", "FedSoft, everybody", "F-MNIST (0.1, 10)"]
    for text, words in {
        "FedAvg,F-MNIST (0.1, 10)": ["FedAvg", "F-MNIST (0.1, 10)"],
        "FedSoft,FedSoft, everybody": ["FedSoft", "FedSoft, everybody"],
        "FedSoft,everybody": ["FedSoft, everybody"],
        " f-mnist (0.1,10) , fedavg,": ["F-MNIST (0.1, 10)", "fedavg"],
        "FedAvg, absent": ["FedAvg", "absent"],
        "": [],
    }.items():
        assert plan.split_words(text, known) == words
    table = plan.read_plan("wecfl-table2")
    chosen = table.only(["FedAvg,F-MNIST (0.1, 10)"])
    assert {(c.row.name, c.column.name) for c in chosen} == {("FedAvg", "F-MNIST (0.1, 10)")}


@pytest.mark.parametrize("name", plan.experiment_names())
def test_each_row_and_column_of_a_table_can_be_named_as_the_table_prints_it(name: str) -> None:
    """`WeCFL, K = 10` was unknown, and the hint joined names that hold commas with commas."""
    table = plan.read_plan(name)
    for label in {cell.row.label for cell in table.cells}:
        assert {cell.row.label for cell in table.only([label])} >= {label}
    for column in {cell.column.name for cell in table.cells}:
        assert {cell.column.name for cell in table.only([column])} == {column}
    with pytest.raises(UsageError) as unknown:
        table.only(["nope"])
    assert all(f"{cell.row.name};" in unknown.value.hint for cell in table.cells)


def test_a_row_with_the_name_of_its_method_stands_beside_other_rows() -> None:
    chosen = plan.read_plan("fesem-dirichlet").only(["WeCFL,fedcenters", "MNIST"])
    assert [c.row.name for c in chosen] == ["WeCFL", "fedcenters"]


def test_a_method_is_all_its_rows_and_the_name_of_a_row_is_that_row() -> None:
    table = plan.read_plan("wecfl-table2")
    assert {c.row.name for c in table.only(["FedAvg"])} == {"FedAvg"}
    assert {c.row.name for c in table.only(["fedavg"])} > {"FedAvg", "FedAvg, label prior"}


def test_a_cell_is_called_by_the_number_of_centers_that_its_method_is_told() -> None:
    named = {cell.name for cell in plan.read_plan("default-method").cells}
    assert {"FeSEM (K=3), digits, all alike", "WeCFL (K=10), F-MNIST (3, 2)"} <= named
