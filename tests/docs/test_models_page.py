"""docs/models.md has the kept results of `make models`, and none of them is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.zoo.report import BEGIN, END, report
from tests.zoo.rows import rows

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
KEPT: dict[str, dict[str, Any]] = json.loads((ROOT / "docs" / "results" / "models.json").read_text(encoding="utf-8"))


def test_the_table_is_that_of_the_kept_results() -> None:
    assert PAGE.split(BEGIN)[1].split(END)[0].strip() == report(KEPT)


def test_no_model_is_wrong_and_no_refusal_is_without_a_reason() -> None:
    assert not [key for key, found in KEPT.items() if found["verdict"] == "wrong"]
    assert all(found["said"] for found in KEPT.values() if found["verdict"] == "refused")


def test_every_kept_result_is_one_of_a_row() -> None:
    assert KEPT.keys() <= {f"{row.library}/{row.name}" for row in rows()}
