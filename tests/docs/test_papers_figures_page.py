"""docs/papers-figures.md shows what its command draws, and the curves on it are those of the kept cells."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import numpy as np
import pytest

from tests.figures.papers import fedsoft, fesem, wecfl
from tests.figures.papers.__main__ import PAPERS
from tests.figures.papers.runs import Drawn
from tests.support.doc_pages import DOCS

PAGE = DOCS / "papers-figures.md"


def test_the_page_shows_every_picture_and_has_the_numbers_of_every_paper() -> None:
    text = PAGE.read_text(encoding="utf-8")
    shown = re.findall(r"!\[[^]]+\]\(papers/([\w-]+\.svg)\)", text)
    assert sorted(shown) == sorted(path.name for path in (DOCS / "papers").iterdir())
    for paper in PAPERS:
        assert f"<!-- {paper}-figures -->\n| in the pictures above | ours |" in text
        assert any(name.startswith(f"{paper}-") for name in shown)


@pytest.mark.parametrize(
    ("draw", "picture", "kept", "panel", "line"),
    [
        (fesem.accuracy, "fesem-accuracy", "fesem-table2/mnist-writers-fesem-k4-r30-s0-c87df40833", 0, 2),
        (wecfl.curves, "wecfl-methods", "wecfl-table2/cifar10-wecfl-k10-r100-s0-b47947053a", 0, 3),
        (wecfl.curves, "wecfl-counts", "wecfl-table2/fashion-mnist-wecfl-k5-r100-s0-066553b91c", 1, 1),
    ],
    ids=["FeSEM(4)", "WeCFL on CIFAR-10", "WeCFL with five centers"],
)
def test_a_curve_is_that_of_its_kept_cell(
    draw: Callable[[], Drawn], picture: str, kept: str, panel: int, line: int
) -> None:
    cell = json.loads((DOCS / "results" / f"{kept}.json").read_text(encoding="utf-8"))
    drawn = draw().pictures[picture].axes[panel].get_lines()[line]
    assert np.asarray(drawn.get_ydata()).tolist() == cell["curves"]["accuracy"]


def test_the_errors_of_fedsofts_centers_and_the_weights_of_its_devices_are_drawn_for_every_round() -> None:
    drawn = fedsoft.by_round(None, rounds=3, devices=8)
    lines = drawn.pictures["fedsoft-rounds"].axes[0].get_lines()
    assert [line.get_label() for line in lines] == [f"center {k} on regression {s}" for k in (0, 1) for s in (0, 1)]
    heights = np.array([line.get_ydata() for line in lines])
    assert heights.shape == (4, 3)
    assert heights.min() > 1
    assert len(drawn.facts) == 4
