"""A center's file runs on a board's samples, however many there are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_client.engines import center_file
from edge_client.engines.center_file import run_file
from edge_client.protocol.task import Array


def test_samples_go_through_a_file_in_batches_that_a_board_has_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Session:
        def get_inputs(self) -> list[Any]:
            return [SimpleNamespace(name="x")]

        def run(self, _outputs: None, feeds: dict[str, Array]) -> list[Array]:
            seen.append(len(feeds["x"]))
            return [2 * feeds["x"]]

    monkeypatch.setattr(center_file, "session", lambda *_args, **_named: Session())
    x = np.arange(700, dtype=np.float32).reshape(350, 2)
    np.testing.assert_array_equal(run_file("onnx", b"", x), 2 * x)
    assert max(seen) <= 64
