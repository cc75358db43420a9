"""docs/what-compiles.md is right: its example is torch's own gradient, and its operators are supported."""

from __future__ import annotations

import re

from export.compiler.decompositions.supported_ops import SUPPORTED
from tests.support.doc_pages import DOCS, PageReader

PAGE = "what-compiles.md"


def test_the_decomposition_of_the_page_is_torchs_own(reader: PageReader) -> None:
    assert float(reader.printed["python hardshrink.py"].split()[1]) == 0.0


def test_each_operator_that_the_page_lists_is_supported() -> None:
    section = (DOCS / PAGE).read_text(encoding="utf-8").split("may hold these operators")[1].split("\n## ")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ") and "`" in line]
    listed = {f"aten.{name}" for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(listed) > 50
    assert listed <= SUPPORTED
