"""Shamir's secret sharing over the prime 2^255 - 19: any t of k shares give a 31-byte secret, fewer say nothing of it.

A secret has 31 bytes because each such number is below the prime: every secret has one encoding, and none is drawn
again. 248 bits are more than the 128 of the keys that are derived from it. A share is the value of a polynomial of
degree t - 1 at x = 1 to 255, in 32 bytes, little-endian, below the prime.
"""

from __future__ import annotations

from edge_client.errors import Malformed

PRIME = 2**255 - 19
SECRET_BYTES = 31
SHARE_BYTES = 32
COEFFICIENT_BYTES = 48  # random bytes of one coefficient: reduced by the prime, they are uniform up to 2^-129
MAX_SHARES = 255


def split_secret(secret: bytes, random: bytes, *, threshold: int, count: int) -> list[bytes]:
    """The shares of `secret` [31 bytes] for x = 1 to `count`; any `threshold` of them give it back.

    `random` has 48 (threshold - 1) bytes, secret and used once: the coefficients of x, x^2, ...
    """
    if not 1 <= threshold <= count <= MAX_SHARES:
        raise Malformed("bad_field", f"{threshold} of {count} shares: 1 <= threshold <= count <= {MAX_SHARES}")
    if len(secret) != SECRET_BYTES or len(random) != COEFFICIENT_BYTES * (threshold - 1):
        raise Malformed("bad_field", f"secret of {len(secret)} bytes with {len(random)} random bytes")
    parts = [secret, *(random[at : at + COEFFICIENT_BYTES] for at in range(0, len(random), COEFFICIENT_BYTES))]
    coefficients = [int.from_bytes(part, "little") % PRIME for part in parts]
    shares = []
    for x in range(1, count + 1):
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * x + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "little"))
    return shares


def read_share(share: bytes) -> int:
    """The number of a share [32 bytes]; Malformed for another size, or a number that is not below the prime."""
    value = int.from_bytes(share, "little")
    if len(share) != SHARE_BYTES or value >= PRIME:
        raise Malformed("bad_field", f"a share has {SHARE_BYTES} bytes and is below 2^255 - 19")
    return value
