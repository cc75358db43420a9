"""docs/train-your-own-model.md is right: its files and commands run as they stand, its tables fit the code."""

from __future__ import annotations

import json
import re

import pytest

from coordinator import config as coordinator_config
from coordinator.models.registry import build_model
from coordinator.strategies.registry import make_method
from edge_client.data.dataset import describe_misfit, load_folder
from tests.support import softmax_program
from tests.support.doc_pages import DOCS, PageReader, blocks

PAGE = "train-your-own-model.md"


def printed(reader: PageReader, words: str) -> str:
    return next(text for command, text in reader.printed.items() if words in command)


def test_compiling_prints_the_table_of_the_page(reader: PageReader) -> None:
    shown = next(block.text for block in blocks(DOCS / PAGE) if block.kind == "text" and block.text.startswith("file"))
    names = [line.split()[0] for line in shown.splitlines()]
    assert [line.split()[0] for line in printed(reader, "--out").splitlines()] == names


def test_the_check_compares_all_three_functions(reader: PageReader) -> None:
    assert [line.split()[0] for line in printed(reader, "--check").splitlines()] == ["ok"] * 3


def test_training_with_plain_onnxruntime_learns_and_needs_nothing_of_ours(reader: PageReader) -> None:
    losses = [float(line.split()[1]) for line in printed(reader, "train.py").splitlines()]
    assert len(losses) == 20
    assert losses[-1] < 0.2 * losses[0]
    imports = re.findall(r"^(?:import|from) (\w+)", (reader.folder / "train.py").read_text(), flags=re.MULTILINE)
    assert set(imports) == {"json", "numpy", "onnxruntime"}


def test_a_state_dict_goes_in_and_comes_out(reader: PageReader) -> None:
    words, _, far = printed(reader, "state.py").rstrip().rpartition(" ")
    assert words == "largest difference from torch"
    assert float(far) < 1e-5


def test_each_loss_of_the_page_falls_when_it_is_trained(reader: PageReader) -> None:
    lines = [line.rsplit(maxsplit=3) for line in printed(reader, "losses.py").splitlines()]
    assert [name.strip() for name, *_ in lines] == ["label smoothing", "BCE", "Huber", "Dice", "tokens"]
    assert all(float(after) < float(before) for _, before, _, after in lines)


def test_a_model_of_several_inputs_trains_predicts_and_writes_a_devices_file(reader: PageReader) -> None:
    first, second = printed(reader, "several.py").splitlines()
    assert first.startswith("loss ")
    assert first.endswith("outputs (60, 3)")
    assert len(second.strip("[]").split()) == 5
    misfit = describe_misfit(softmax_program.program(), load_folder(reader.folder).train)
    assert misfit.startswith("samples are the arrays x.ids, x.mask, x.meta, the model takes one")


def test_the_coordinators_configuration_and_factory_are_accepted(
    reader: PageReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(reader.folder)
    settings = coordinator_config.read_config(reader.folder / "coordinator.toml")
    for run in settings.runs:
        make_method(run.method, **run.settings)
    name = next(
        line.split('"')[1] for line in (reader.folder / "coordinator.toml").read_text().splitlines() if ":fac" in line
    )
    built = build_model(name, seed=0)
    program = json.loads((reader.folder / "program" / "program.json").read_text())
    assert (list(built.input), [built.classes]) == (program["input"], program["target"])
    assert {n for n, *_ in program["schema"]} <= set(built.module.state_dict())
