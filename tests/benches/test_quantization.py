from __future__ import annotations

from typing import Any

import pytest

from tests.benches.quantization import table


def row(center: int, tool: str, accuracy: float | None) -> dict[str, Any]:
    found: dict[str, Any] = {"center": center, "format": "onnx", "tool": tool, "size": 10, "ms": 1.0}
    return found | {"accuracy": None if accuracy is None else {f"d{center}": accuracy}}


@pytest.mark.parametrize("failed", [0, 1])
def test_a_tool_that_fails_for_one_center_has_no_figures_of_the_others(failed: int) -> None:
    rows = [row(k, "float32", 0.9) for k in range(2)] + [row(k, "int8", None if k == failed else 0.8) for k in range(2)]
    *_, whole, small = table(rows).splitlines()
    assert whole.startswith("| onnx | float32 | 10 | 90.00% |")
    assert small == "| onnx | int8 | failed | | | | | |"


def test_where_the_float32_file_of_a_center_fails_no_tool_has_a_loss() -> None:
    rows = [row(0, "float32", None), row(0, "int8", 0.8)]
    assert [line.split(" | ")[2] for line in table(rows).splitlines()[2:]] == ["failed", "failed"]
