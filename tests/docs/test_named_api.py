"""What a page names in backticks of the Python API exists: `fc.X`, methods of the classes, and keyword arguments."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedcenters as fc
from tests.support.doc_pages import DOCS, FENCE, ROOT

PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
LAYERS = {"fc.weight", "fc.bias"}  # tensors of a model whose layer is called fc
INLINE = re.compile(r"`([^`\n]+)`")
CHAIN = re.compile(r"\bfc(?:\.[A-Za-z_]\w*)+")
CLASSES = {name for name in fc.__all__ if inspect.isclass(getattr(fc, name))}


def spans(text: str) -> list[str]:
    """The words in backticks, and the blocks of Python, which other tests run where they can."""
    blocks = [block for kind, block in FENCE.findall(text) if kind == "python"]
    return [*INLINE.findall(FENCE.sub("", text)), *blocks]


def unknown(span: str) -> Iterator[str]:
    """What a span names that is not there."""
    for chain in CHAIN.findall(span):
        if chain not in LAYERS and found(chain.split(".")[1:]) is None:
            yield chain
    try:
        tree = ast.parse(span)
    except SyntaxError:  # words, a command, or a part of a line
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in CLASSES:
            kind = getattr(fc, node.value.id)
            if not hasattr(kind, node.attr) and node.attr not in getattr(kind, "__annotations__", {}):
                yield f"{node.value.id}.{node.attr}"
        if isinstance(node, ast.Call) and CHAIN.fullmatch(name := ast.unparse(node.func)):
            yield from (f"{name}({key}=)" for key in _strange(found(name.split(".")[1:]), node))


def found(names: list[str]) -> Any:  # noqa: ANN401 - whatever is there
    """The object of a chain of names below `fc`, or None."""
    it: Any = fc
    for name in names:
        it = getattr(it, name, None)
    return it


def _strange(called: Any, call: ast.Call) -> list[str]:  # noqa: ANN401 - whatever is called
    if not callable(called):
        return []
    taken = inspect.signature(called).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values()):
        return []
    return [each.arg for each in call.keywords if each.arg is not None and each.arg not in taken]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_of_the_python_api_in_a_page_exists(page: Path) -> None:
    assert [name for span in spans(page.read_text(encoding="utf-8")) for name in unknown(span)] == []


def test_a_name_that_is_not_there_is_found() -> None:
    page = "`fc.simulat`, `fc.FeSEM(cluster=3)` and `Result.modul(0)`; `fc.FeSEM(clusters=3)`, `Result.module`\n"
    page += "```python\nfc.fleets.digit(devices=12)\n```\n"
    assert [name for span in spans(page) for name in unknown(span)] == [
        "fc.simulat",
        "fc.FeSEM(cluster=)",
        "Result.modul",
        "fc.fleets.digit",
    ]
