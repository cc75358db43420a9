"""What a device is told of a sum has numbers within their limits."""

from __future__ import annotations

import pytest

from edge_client.errors import Malformed
from edge_client.protocol.messages import canonical_json, parse_json
from edge_client.protocol.secure.sum_messages import SumRoster
from tests.support.secure_cohort import SecureCohort

ROSTER = SecureCohort.of(6).sent["roster"]["dev-000"]


def read_with(field: str, number: int) -> SumRoster:
    return SumRoster.from_bytes(canonical_json({**parse_json(ROSTER, 1 << 16), field: number}))


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [
        ("round", 0, 2**32 - 1),
        ("exchange", 0, 2**32 - 1),
        ("number", 0, 2**53 - 1),
        ("devices", 6, 100_000),
        ("threshold", 2, 5),
        ("bits", 16, 32),
    ],
)
def test_each_number_of_a_roster_is_read_up_to_its_limits_and_refused_beyond(field: str, least: int, most: int) -> None:
    assert [getattr(read_with(field, number), field) for number in (least, most)] == [least, most]
    for beyond in (least - 1, most + 1):
        with pytest.raises(Malformed):
            read_with(field, beyond)
