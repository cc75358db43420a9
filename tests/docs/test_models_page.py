"""docs/models.md has the kept results of `make models`, and none is wrong; its module around a text model works."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from export.compiler.forward_pass import ForwardPasses
from export.compiler.program import make_source
from export.compiler.tracing import trace_function
from tests.support.doc_pages import DOCS, blocks
from tests.zoo.report import BEGIN, END, report
from tests.zoo.rows import rows

PATH = DOCS / "models.md"
PAGE = PATH.read_text(encoding="utf-8")
KEPT: dict[str, dict[str, Any]] = json.loads((DOCS / "results" / "models.json").read_text(encoding="utf-8"))


def test_the_table_is_that_of_the_kept_results() -> None:
    assert PAGE.split(BEGIN)[1].split(END)[0].strip() == report(KEPT)


def test_no_model_is_wrong_and_no_refusal_is_without_a_reason() -> None:
    assert not [key for key, found in KEPT.items() if found["verdict"] == "wrong"]
    assert all(found["said"] for found in KEPT.values() if found["verdict"] == "refused")


def test_every_kept_result_is_one_of_a_row() -> None:
    assert KEPT.keys() <= {f"{row.library}/{row.name}" for row in rows()}


class Body(nn.Module):
    """As a text model of transformers: whole numbers in, a record out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.tokens(tokens).mean(1)))


def test_the_pages_module_around_a_text_model_becomes_a_program() -> None:
    (block,) = [block for block in blocks(PATH) if block.kind == "python"]
    names: dict[str, Any] = {"nn": nn}
    exec(block.text, names)  # noqa: S102 - the page's code
    source = make_source(names["Text"](Body()), input=(5,))
    trace_function(ForwardPasses(source), "step", batch=2, dynamic=True)
    assert source.target == (3,)
