"""docs/bring-your-own-data.md is right: its scripts run, its table names every data set."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.data.dataset import load_folder
from edge_client.errors import ConfigError
from emulator.data.registry import DATA_SETS, load_data_set
from tests.support.doc_pages import DOCS, PageReader, blocks

PAGE = "bring-your-own-data.md"
TEXT = (DOCS / PAGE).read_text(encoding="utf-8")


def test_the_client_reads_what_the_script_wrote(reader: PageReader) -> None:
    assert reader.printed["python look.py"].startswith("160 to train on, 40 to test on; one sample is (2,)")


def test_a_device_that_was_left_out_gets_the_center_of_its_make(reader: PageReader) -> None:
    found, before, after = reader.printed["python left_out.py"].splitlines()[-3:]
    assert found.endswith("True")
    assert all(float(line.split()[-1]) > 0.7 for line in (before, after))


def test_a_search_finds_the_number_of_makes(reader: PageReader) -> None:
    assert reader.printed["python search.py"].splitlines()[0] == "{'multicenter__centers': 2} True"


def test_what_the_page_calls_refused_is_refused(reader: PageReader) -> None:
    wrong = reader.folder / "wrong"
    wrong.mkdir()
    for x, y in (([[np.nan]], [0]), ([[0.5]], [-1]), ([[0.5]], [0, 1])):
        np.savez(wrong / "train.npz", x=np.array(x, np.float32), y=np.array(y))
        with pytest.raises(ConfigError, match=r"train\.npz"):
            load_folder(wrong)


def test_the_data_set_of_the_page_is_clustered_by_make(reader: PageReader) -> None:
    printed = next(text for command, text in reader.printed.items() if "pumps:PUMPS" in command)
    assert "30 devices" in printed
    assert "Rand index 1.000" in printed
    assert float(re.findall(r"accuracy \(micro, macro\) +([\d.]+)%", printed)[0]) > 90


def test_a_missing_file_is_named_in_these_words(tmp_path: Path) -> None:
    told = next(block.text for block in blocks(DOCS / PAGE) if block.text.startswith("error: "))
    error, hint = told.replace("DIR", str(tmp_path)).strip().split("\n\nhint: ")
    with pytest.raises(ConfigError) as refused:
        load_data_set("fashion-mnist", tmp_path)
    assert (f"error: {refused.value.message}", refused.value.hint) == (error, hint)


def test_every_data_set_is_listed() -> None:
    rows = [line.split("|")[1] for line in TEXT.splitlines() if line.startswith("| `")]
    assert set(DATA_SETS) <= {name for row in rows for name in re.findall(r"`([\w-]+)`", row)}


def test_the_fleets_of_the_page_have_a_device_for_each_pump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made: dict[str, Any] = {}
    (code,) = (block.text for block in blocks(DOCS / PAGE) if block.text.startswith("# fleets.py"))
    exec(code, made)  # noqa: S102 - our page
    assert list(made["arrays"]) == list(made["table"]) == list(made["torch_data"])[:30]
    assert len(made["arrays"]) == 30
    assert len(made["cut"]) == 10
