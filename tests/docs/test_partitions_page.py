"""docs/partitions.md is right: its table has every scheme, and its Python runs."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import fedcenters as fc
from emulator.data.partition_schemes import PARTITION_SCHEMES, describe_scheme, parse_scheme
from tests.support.doc_pages import DOCS, PageReader, blocks

PAGE = DOCS / "partitions.md"  # its blocks are "console" and "python"


TEXT = PAGE.read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([^`]+)` \| `([A-Z][^`]+)` \|", TEXT, flags=re.MULTILINE)  # a scheme in two notations
SETTINGS = re.findall(r"^\| `([\w-]+)` \| ((?:`[\w-]+` ?)+)\| (\d+) \|", TEXT, flags=re.MULTILINE)


def test_each_row_of_the_table_is_one_scheme_in_two_notations() -> None:
    for text, value in ROWS:
        assert eval(f"partitions.{value}", {"partitions": fc.partitions}) == parse_scheme(text)  # noqa: S307 - our page
    assert {text.partition(":")[0] for text, _ in ROWS} == set(PARTITION_SCHEMES)


def test_each_setting_of_a_scheme_is_on_the_page_with_its_default() -> None:
    for text, _ in ROWS:
        name, _, pairs = text.partition(":")
        usual: Any = PARTITION_SCHEMES[name]()
        further = {key: default for key, names, default in SETTINGS if f"`{name}`" in names}
        assert parse_scheme(text) == usual
        assert {key: int(getattr(usual, key.replace("-", "_"))) for key in further} == {
            key: int(default) for key, default in further.items()
        }
        told = {pair.partition("=")[0] for pair in pairs.split(",") if pair} | set(further)
        assert told == {f.name.replace("_", "-") for f in fields(usual)}


def test_the_examples_in_python_make_the_fleets_that_they_say() -> None:
    made: dict[str, Any] = {}
    for block in blocks(PAGE):
        if block.kind == "python":
            exec(block.text, made)  # noqa: S102 - our page
    assert describe_scheme(made["fleet"].scheme) == "dirichlet:alpha=0.5"
    assert [len(made[name]) for name in ("fleet", "lists", "named", "folds", "halves")] == [10, 2, 2, 5, 2]
    assert list(made["named"]) == ["left", "right"]
    assert {int(label) for label in made["halves"]["device-00"].train.y} == {0, 2, 4, 6, 8}


def test_the_command_cuts_as_its_text_says(tmp_path: Path) -> None:
    reader = PageReader(folder=tmp_path, here={})
    (command,) = (c.removeprefix("$ ") for block in blocks(PAGE) if block.kind == "console" for c in block.commands)
    reader.run(command)
    assert "10 devices" in reader.printed[command]
