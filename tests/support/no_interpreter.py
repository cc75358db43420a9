"""LiteRT without its deprecated Interpreter: `pytest -p tests.support.no_interpreter tests/conformance`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edge_client.engines import litert


def hide_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """No runtime has an Interpreter, so that the engine takes CompiledModel."""
    monkeypatch.setattr(litert, "RUNTIMES", {})


@pytest.fixture(autouse=True)
def without_interpreter() -> Iterator[None]:
    """For every test, where this file is a plugin of pytest."""
    with pytest.MonkeyPatch.context() as patch:
        hide_interpreter(patch)
        yield
