"""The packed words of a masked sum's uploads, as the server reads and adds them; devices pack them (masks.py)."""

from __future__ import annotations

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol.secure.masks import BLOCK_WORDS, GROUP_WORDS, check_bits, packed_size
from edge_client.protocol.secure.sum_messages import UPLOAD_HEADER, VERSION
from edge_client.protocol.summed_task import Words


def read_upload(data: bytes, *, roster: str, words: int, bits: int) -> memoryview:
    """The packed words of an upload of this sum. Raises Malformed for another sum, form or length."""
    if len(data) != UPLOAD_HEADER.size + packed_size(words, bits):
        raise Malformed("bad_schema", f"upload of {len(data)} bytes for {words} words of {bits} bits")
    version, *rest = UPLOAD_HEADER.unpack_from(data)
    if version != VERSION:
        raise Malformed("bad_version", f"upload of version {version}, this side reads {VERSION}")
    if rest != [bits, 0, words, bytes.fromhex(roster)]:
        raise Malformed("bad_schema", "the upload's header is not that of this sum")
    return memoryview(data)[UPLOAD_HEADER.size :]


def add_packed_into(total: Words, data: bytes | memoryview, bits: int) -> None:
    """Add packed words to `total` [d] in blocks. Raises Malformed for another length, or spare bits that are set."""
    check_packed(data, len(total), bits)
    for start in range(0, len(total), BLOCK_WORDS):
        part = total[start : start + BLOCK_WORDS]
        at = start * bits // 8  # BLOCK_WORDS is a multiple of 8, so a block begins at a byte
        part += _unpacked(data[at : at + packed_size(len(part), bits)], len(part), bits)


def check_packed(data: bytes | memoryview, words: int, bits: int) -> None:
    """Raises Malformed for another length, or spare bits that are set."""
    check_bits(bits)
    size = packed_size(words, bits)
    if len(data) != size:
        raise Malformed("bad_field", f"{len(data)} bytes of packed words, expected {size}")
    spare = 8 * size - words * bits
    if spare and data[-1] >> (8 - spare):
        raise Malformed("bad_field", "packed words with spare bits that are not zero")


def _unpacked(data: bytes | memoryview, count: int, bits: int) -> Words:
    groups = -(-count // GROUP_WORDS)
    packed = np.zeros((groups, bits), np.uint8)
    packed.reshape(-1)[: len(data)] = np.frombuffer(data, np.uint8)
    words = np.empty((groups, GROUP_WORDS), np.uint32)
    for word in range(GROUP_WORDS):
        first, shift = divmod(word * bits, 8)
        value = np.zeros(groups, np.uint64)
        for byte in range(-(-(shift + bits) // 8)):
            value |= packed[:, first + byte].astype(np.uint64) << np.uint64(8 * byte)
        words[:, word] = (value >> np.uint64(shift)) & np.uint64(2**bits - 1)
    return words.reshape(-1)[:count]
