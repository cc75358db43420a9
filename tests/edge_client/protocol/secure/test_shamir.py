"""Shares: any t give the secret, fewer say nothing, and numbers outside the field are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds.secure_recovery import combine_shares
from edge_client.errors import Malformed
from edge_client.protocol.secure.shamir import COEFFICIENT_BYTES, PRIME, split_secret

SECRETS = st.binary(min_size=31, max_size=31) | st.sampled_from([bytes(31), b"\xff" * 31])


@given(SECRETS, st.integers(1, 12), st.integers(0, 8), st.randoms(use_true_random=False))
def test_any_t_shares_give_the_secret(secret: bytes, threshold: int, more: int, rng: object) -> None:
    random = rng.randbytes(COEFFICIENT_BYTES * (threshold - 1))  # type: ignore[attr-defined]
    shares = split_secret(secret, random, threshold=threshold, count=threshold + more)
    chosen = rng.sample(range(1, threshold + more + 1), threshold)  # type: ignore[attr-defined]
    assert combine_shares({x: shares[x - 1] for x in chosen}) == secret


def test_t_minus_1_shares_fit_every_secret() -> None:
    """For each other secret there is a polynomial through the same two shares: they do not tell which one it was."""
    shares = split_secret(b"\x07" * 31, bytes(range(96)), threshold=3, count=3)
    for other in (bytes(31), b"\xff" * 31):
        third = 3 * (int.from_bytes(shares[1], "little") - int.from_bytes(shares[0], "little"))
        third = (third + int.from_bytes(other, "little")) % PRIME  # the value at 3 of the parabola through 0, 1 and 2
        guessed = {1: shares[0], 2: shares[1], 3: third.to_bytes(32, "little")}
        assert combine_shares(guessed) == other


@pytest.mark.parametrize("share", [PRIME.to_bytes(32, "little"), b"\xff" * 32, bytes(31), bytes(33)])
def test_a_share_outside_the_field_is_refused(share: bytes) -> None:
    with pytest.raises(Malformed, match="below 2\\^255 - 19"):
        combine_shares({1: share})


def test_shares_of_no_secret_are_refused() -> None:
    with pytest.raises(Malformed, match=r"^bad_field: .*31 bytes"):
        combine_shares({1: (PRIME - 1).to_bytes(32, "little")})


@pytest.mark.parametrize("xs", [[], [0], [256], [1, 256], [0, 1]])
def test_an_x_out_of_range_is_refused(xs: list[int]) -> None:
    with pytest.raises(Malformed, match="shares of x"):
        combine_shares({x: bytes(32) for x in xs})


@pytest.mark.parametrize(
    ("threshold", "count", "size", "random"),
    [(0, 3, 31, 0), (4, 3, 31, 144), (2, 256, 31, 48), (2, 3, 32, 48), (2, 3, 31, 47)],
)
def test_a_split_that_would_not_be_secret_is_refused(threshold: int, count: int, size: int, random: int) -> None:
    with pytest.raises(Malformed, match="bad_field"):
        split_secret(bytes(size), bytes(random), threshold=threshold, count=count)


def test_the_255th_share_is_one() -> None:
    secret = bytes(range(31))
    shares = split_secret(secret, bytes(range(48)), threshold=2, count=255)
    assert combine_shares({254: shares[253], 255: shares[254]}) == secret
