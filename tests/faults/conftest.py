"""What the tests of faults share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.known_rounding import round_by_known_numbers


@pytest.fixture(scope="module")
def same_rounding() -> Iterator[None]:
    """The bits of two trainings on masked sums can be compared."""
    with pytest.MonkeyPatch.context() as patch:
        round_by_known_numbers(patch.setattr)
        yield
