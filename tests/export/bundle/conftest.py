"""Bundles hold programs that the tests of the compiler compile anew: here they come from the test runs' cache."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_cache() -> None:
    """Of tests/export, but for these tests."""
