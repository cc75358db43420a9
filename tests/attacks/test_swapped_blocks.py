"""Tries to pass one block for another: a block with a right checksum of another index, another blob, or another cut."""

from __future__ import annotations

import hashlib

import pytest

from edge_client.errors import Malformed
from edge_client.protocol.blocks import body_range, manifest_of, pack_block, unpack_block

DATA, OTHER = bytes(10_000), b"\1" * 10_000
M = manifest_of(DATA, "model", block=4096)


@pytest.mark.parametrize(
    "message",
    [
        pack_block(DATA[4096:8192], 1, 3),
        pack_block(DATA[:4096], 0, 2),
        pack_block(DATA[:8192], 0, 3),
        pack_block(DATA[:100], 0, 3),
        pack_block(DATA[:4096], 0, 3) + b"\0",
        pack_block(DATA[:4096], 0, 3)[16:],
    ],
)
def test_a_block_that_belongs_elsewhere_is_refused(message: bytes) -> None:
    with pytest.raises(Malformed):
        unpack_block(message, M, 0)


def test_a_block_of_another_blob_with_the_same_cut_is_found_by_the_whole_hash() -> None:
    bodies = [(OTHER if i == 1 else DATA)[slice(*body_range(M, i))] for i in range(3)]
    whole = b"".join(unpack_block(pack_block(body, i, 3), M, i) for i, body in enumerate(bodies))
    assert len(whole) == M.size
    assert hashlib.sha256(whole).hexdigest() != M.sha256
