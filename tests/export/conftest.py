"""Tests of the compiler compile: they read nothing from the cache, nor from that of another test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCENTERS_CACHE", "off")
