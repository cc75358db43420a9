"""Masks cancel, words survive packing, and keys are the same from either side."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.aggregation.packed_words import add_packed_into
from edge_client.errors import Malformed
from edge_client.protocol.secure import keys, masks
from edge_client.protocol.secure.keys import SumContext

CONTEXT = SumContext(federation="demo", run="r1", round=3, exchange=1, roster="ab" * 32)
ONE, OTHER = bytes(range(32)), bytes(range(32, 64))


@given(st.integers(16, 32), st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_words_are_packed_and_read_back(bits: int, values: list[int]) -> None:
    words = np.array(values, np.uint32)
    packed = masks.pack_words(words, bits)
    low = [value % 2**bits for value in values]
    assert len(packed) == masks.packed_size(len(values), bits)
    assert int.from_bytes(packed, "little") == sum(value << (bits * i) for i, value in enumerate(low))
    total = np.zeros(len(values), np.uint32)
    add_packed_into(total, packed, bits)
    assert total.tolist() == low


def test_a_mask_is_one_stream_whatever_the_blocks() -> None:
    words = np.zeros(2 * masks.BLOCK_WORDS + 5, np.uint32)
    masks.add_masks_into(words, [(bytes(16), 1)])
    assert words.astype("<u4").tobytes() == masks.stream_bytes(bytes(16), 4 * len(words))
    seen = list[int]()
    masks.add_masks_into(words, [(bytes(16), -1)], lambda: seen.append(int(words[-1])))
    assert not words.any()
    assert len(seen) == 3  # a sign of life before each block


def test_packed_words_are_added_block_by_block_modulo_2_to_the_bits() -> None:
    words = np.random.default_rng(1).integers(0, 2**20, masks.BLOCK_WORDS + 3, np.uint32)
    total = np.full(len(words), 2**32 - 1, np.uint32)
    add_packed_into(total, masks.pack_words(words, 20), 20)
    assert np.array_equal(total, words - np.uint32(1))


@pytest.mark.parametrize(
    ("data", "count", "bits"),
    [(bytes(5), 2, 16), (bytes(3), 2, 16), (b"\0\0\x02", 1, 17), (b"\0", 1, 15), (bytes(5), 1, 33)],
)
def test_packed_words_of_another_form_are_refused(data: bytes, count: int, bits: int) -> None:
    with pytest.raises(Malformed, match="bad_field"):
        add_packed_into(np.zeros(count, np.uint32), data, bits)


@pytest.mark.parametrize("bits", [15, 33])
def test_words_of_fewer_than_16_or_more_than_32_bits_are_neither_packed_nor_read(bits: int) -> None:
    with pytest.raises(Malformed, match=f"words of {bits} bits: 16 to 32"):
        masks.pack_words(np.zeros(8, np.uint32), bits)
    with pytest.raises(Malformed, match=f"words of {bits} bits: 16 to 32"):
        add_packed_into(np.zeros(8, np.uint32), bytes(bits), bits)


def test_words_are_read_back_whole_where_a_block_ends() -> None:
    for count in (1, 7, 8, masks.BLOCK_WORDS, masks.BLOCK_WORDS + 1):
        words = np.arange(count, dtype=np.uint32)
        total = np.zeros(count, np.uint32)
        add_packed_into(total, masks.pack_words(words, 17), 17)
        assert np.array_equal(total, words)


def test_both_sides_of_a_pair_have_one_key_and_opposite_signs() -> None:
    one, other = (keys.public_prekey(0, root) for root in (ONE, OTHER))
    mine, yours = (keys.mask_private(keys.mask_secret(root)) for root in (ONE, OTHER))
    key = keys.pair_mask_key(mine, other.mask, CONTEXT, "a", "b")
    assert key == keys.pair_mask_key(yours, one.mask, CONTEXT, "b", "a")
    assert (masks.pair_sign("a", "b"), masks.pair_sign("b", "a")) == (1, -1)


def test_every_key_of_a_sum_is_another_one() -> None:
    later = SumContext(federation="demo", run="r1", round=3, exchange=2, roster="ab" * 32)
    mine, yours = keys.mask_private(keys.mask_secret(ONE)), keys.public_prekey(0, OTHER)
    found = [
        keys.pair_mask_key(mine, yours.mask, context, "a", cid) for context in (CONTEXT, later) for cid in ("b", "c")
    ]
    found += [keys.self_mask_key(keys.self_secret(ONE, context), context) for context in (CONTEXT, later)]
    assert len(set(found)) == len(found)
    assert keys.seal_private(ONE) != mine


def test_sealed_shares_open_for_their_receiver_sender_and_sum_alone() -> None:
    later = SumContext(federation="demo", run="r1", round=3, exchange=2, roster="ab" * 32)
    mine, yours = keys.seal_private(ONE), keys.seal_private(OTHER)
    my_public, your_public = keys.public_of(mine), keys.public_of(yours)
    sealed = keys.seal(mine, your_public, CONTEXT, "a", "b", b"s" * 64)
    assert len(sealed) == keys.SEALED_BYTES
    assert keys.unseal(yours, my_public, CONTEXT, "a", "b", sealed) == b"s" * 64
    for context, sender, receiver, data in [
        (later, "a", "b", sealed),
        (CONTEXT, "b", "a", sealed),
        (CONTEXT, "a", "c", sealed),
        (CONTEXT, "a", "b", sealed[:-1] + bytes([sealed[-1] ^ 1])),
        (CONTEXT, "a", "b", b""),
    ]:
        with pytest.raises(Malformed, match="do not open"):
            keys.unseal(yours, my_public, context, sender, receiver, data)


@pytest.mark.parametrize("public", [bytes(32), b"\x01" + bytes(31), bytes(31)])
def test_a_public_key_of_small_order_or_size_is_refused(public: bytes) -> None:
    with pytest.raises(Malformed, match="X25519 refuses"):
        keys.agree(ONE, public)


def test_a_dealt_secret_is_recovered_from_t_shares_and_the_same_shares_are_dealt_again() -> None:
    from coordinator.rounds.secure_recovery import combine_shares

    dealt = keys.deal_shares(ONE, CONTEXT, threshold=3, count=5)
    assert dealt == keys.deal_shares(ONE, CONTEXT, threshold=3, count=5)
    assert combine_shares({x: dealt["mask"][x - 1] for x in (1, 3, 5)}) == keys.mask_secret(ONE)
    assert combine_shares({x: dealt["self"][x - 1] for x in (2, 3, 4)}) == keys.self_secret(ONE, CONTEXT)
