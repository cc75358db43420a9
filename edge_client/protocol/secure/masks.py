"""Masks over vectors of words modulo 2^b, and the words as bytes.

A vector is a numpy array of uint32 [d]; sums wrap at 2^32 and are cut to b bits (16 to 32) when they are packed, which
is the same as a sum modulo 2^b. A mask is the stream of AES-128 in counter mode from zero, four bytes a word,
little-endian. It is added in blocks of 256 KiB, so memory does not grow with the number of masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from edge_client.errors import Malformed
from edge_client.protocol.summed_task import MAX_BITS, MIN_BITS, Words

BLOCK_WORDS = 1 << 16  # 256 KiB: it stays in a core's cache while it is encrypted and added
GROUP_WORDS = 8  # they fill b bytes exactly
_ZEROS = bytes(4 * BLOCK_WORDS)


def stream_bytes(key: bytes, size: int) -> bytes:
    """The first `size` bytes of the stream of this key [16 bytes]."""
    return Cipher(AES(key), CTR(bytes(16))).encryptor().update(bytes(size))


def add_masks_into(words: Words, keys: Iterable[tuple[bytes, int]], between: Callable[[], None] = lambda: None) -> None:
    """Add to `words` [d] the masks of `keys`: a key [16 bytes] and a sign (1 or -1). `between` blocks is called."""
    buffer = bytearray(4 * BLOCK_WORDS + 15)  # update_into asks for a block's room beyond what it writes
    for key, sign in keys:
        stream = Cipher(AES(key), CTR(bytes(16))).encryptor()
        for start in range(0, len(words), BLOCK_WORDS):
            between()
            part = words[start : start + BLOCK_WORDS]
            stream.update_into(memoryview(_ZEROS)[: 4 * len(part)], buffer)
            mask = np.frombuffer(buffer, "<u4", len(part))
            (np.add if sign > 0 else np.subtract)(part, mask, out=part)


def pair_sign(own: str, other: str) -> int:
    """The sign of a pair mask in the vector of `own`: 1 where its id comes before the other's, else -1."""
    return 1 if own < other else -1


def packed_size(words: int, bits: int) -> int:
    """Bytes of `words` words of `bits` bits."""
    return -(-words * bits // 8)


def pack_words(words: Words, bits: int) -> bytes:
    """The lower `bits` bits of each word, one after the other, least significant bit first; spare bits are zero."""
    check_bits(bits)
    groups = -(-len(words) // GROUP_WORDS)
    padded = np.zeros((groups, GROUP_WORDS), np.uint32)
    padded.reshape(-1)[: len(words)] = words
    padded &= np.uint32(2**bits - 1)
    packed = np.zeros((groups, bits), np.uint8)
    for word in range(GROUP_WORDS):
        first, shift = divmod(word * bits, 8)
        value = padded[:, word].astype(np.uint64) << np.uint64(shift)
        for byte in range(-(-(shift + bits) // 8)):
            packed[:, first + byte] |= (value >> np.uint64(8 * byte)).astype(np.uint8)
    return packed.tobytes()[: packed_size(len(words), bits)]


def check_bits(bits: int) -> None:
    """Refuse a word of fewer than 16 or more than 32 bits."""
    if not MIN_BITS <= bits <= MAX_BITS:
        raise Malformed("bad_field", f"words of {bits} bits: {MIN_BITS} to {MAX_BITS}")
