"""Processes die in these tests, machines do not: waiting for the disk would only cost time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.known_rounding import round_by_known_numbers


@pytest.fixture(autouse=True, scope="package")
def no_waiting_for_the_disk() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr("os.fsync", lambda _descriptor: None)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def same_rounding() -> Iterator[None]:
    """The bits of two trainings on masked sums can be compared."""
    with pytest.MonkeyPatch.context() as patch:
        round_by_known_numbers(patch.setattr)
        yield
