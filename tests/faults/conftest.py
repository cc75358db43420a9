"""Processes die in these tests, machines do not: waiting for the disk would only cost time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def no_waiting_for_the_disk() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr("os.fsync", lambda _descriptor: None)
    yield
    patch.undo()
