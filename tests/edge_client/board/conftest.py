"""No test of `flash` asks a package index: what it needs is in the cache of `FlashSetup`."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
