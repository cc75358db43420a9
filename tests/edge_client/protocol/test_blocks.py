"""Blobs: every cut is put together again in any order, and every wrong block is refused."""

from __future__ import annotations

import base64
import hashlib
import random
import struct
import zlib
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.errors import Malformed
from edge_client.protocol.blocks import (
    HEADER,
    KIND_LIMITS,
    Bitmap,
    Manifest,
    body_range,
    decode_base64,
    manifest_of,
    pack_block,
    unpack_block,
)

DATA = bytes(range(256)) * 40  # three blocks of 4,096
M = manifest_of(DATA, "model", block=4096)
SIGNED = replace(M, kind="program", key="0" * 16, sig="0" * 128)


@given(st.integers(1, 20_000), st.sampled_from([4096, 8192, 65_536]), st.randoms(use_true_random=False))
def test_blocks_in_any_order_and_repeated_give_the_blob_back(size: int, block: int, rng: random.Random) -> None:
    data = rng.randbytes(size)
    manifest = manifest_of(data, "delta", block=block)
    bitmap, out = Bitmap(manifest.total), bytearray(size)
    order = [i for i in range(manifest.total) for _ in range(2)]
    rng.shuffle(order)
    for index in order:
        start, stop = body_range(manifest, index)
        out[start:stop] = unpack_block(pack_block(data[start:stop], index, manifest.total), manifest, index)
        bitmap.add(index)
    assert bitmap.complete
    assert hashlib.sha256(out).hexdigest() == manifest.sha256


@given(
    st.binary(max_size=64) | st.binary(max_size=32).map(lambda b: pack_block(DATA[:4096], 0, 3)[: -len(b) or None] + b)
)
def test_any_bytes_are_the_block_or_refused(message: bytes) -> None:
    with suppress(Malformed):
        assert unpack_block(message, M, 0) == DATA[:4096]


@given(st.integers(0, 16 + 4095), st.integers(0, 7))
def test_one_flipped_bit_anywhere_is_noticed(at: int, bit: int) -> None:
    message = bytearray(pack_block(DATA[:4096], 0, 3))
    message[at] ^= 1 << bit
    with pytest.raises(Malformed):
        unpack_block(bytes(message), M, 0)


def test_each_block_of_a_blob_has_its_place_and_there_is_none_beyond_the_last() -> None:
    for index, (start, stop) in enumerate([(0, 4_096), (4_096, 8_192), (8_192, 10_240)]):
        assert body_range(M, index) == (start, stop)
        assert unpack_block(pack_block(DATA[start:stop], index, 3), M, index) == DATA[start:stop]
    for index in (-1, 3, 4, True):
        with pytest.raises(Malformed, match=r"^bad_range: "):
            body_range(M, index)


def with_header(version: int, flags: int, zero: int) -> bytes:
    """Block 0 with a right checksum over a wrong header."""
    head = struct.pack("<BBHII", version, flags, zero, 0, 3)
    return head + struct.pack("<I", zlib.crc32(head + DATA[:4096])) + DATA[:4096]


@pytest.mark.parametrize(
    ("message", "index", "code"),
    [
        (pack_block(DATA[:4096], 0, 3), 1, "bad_range"),
        (pack_block(DATA[:4096], 0, 3), 3, "bad_range"),
        (pack_block(DATA[:4096], 0, 4), 0, "bad_range"),
        (pack_block(DATA[:4095], 0, 3), 0, "bad_field"),
        (pack_block(DATA[:2047], 2, 3), 2, "bad_field"),
        (b"\x02" + pack_block(DATA[:4096], 0, 3)[1:], 0, "bad_version"),
        (with_header(1, 1, 0), 0, "bad_field"),
        (with_header(1, 0, 1), 0, "bad_field"),
        (pack_block(DATA[:4096], 0, 3)[: HEADER.size - 1], 0, "bad_field"),
        (b"\x02" + bytes(HEADER.size - 1), 0, "bad_version"),
        (pack_block(DATA[1:4097], 0, 3)[:16] + DATA[:4096], 0, "bad_hash"),
    ],
)
def test_a_wrong_block_is_refused_by_name(message: bytes, index: int, code: str) -> None:
    with pytest.raises(Malformed, match=rf"^{code}: "):
        unpack_block(message, M, index)


@pytest.mark.parametrize(("body", "index", "total"), [(b"", 0, 1), (b"x", 1, 1), (b"x", 0, 65_537), (b"x", -1, 2)])
def test_no_impossible_block_is_packed(body: bytes, index: int, total: int) -> None:
    with pytest.raises(Malformed):
        pack_block(body, index, total)


def test_a_block_has_1_mib_at_most() -> None:
    assert len(pack_block(bytes(1 << 20), 0, 1)) == HEADER.size + (1 << 20)
    with pytest.raises(Malformed, match=r"^bad_field: "):
        pack_block(bytes((1 << 20) + 1), 0, 1)


@pytest.mark.parametrize("manifest", [M, SIGNED, manifest_of(b"small", "stats", inline=True)])
def test_a_manifest_survives_json(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_an_inline_blob_of_the_right_size_is_hashed_all_the_same() -> None:
    with pytest.raises(Malformed, match=r"^bad_hash: "):
        Manifest.from_json(manifest_of(b"small", "stats", inline=True).to_json() | {"inline": "c21hbEw="})


def test_only_small_blobs_travel_inline() -> None:
    assert manifest_of(b"x" * 2048, "stats", inline=True).inline == b"x" * 2048
    assert manifest_of(b"x" * 2049, "stats", inline=True).inline is None


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"sha256": "E" * 64}, "bad_field"),
        ({"sha256": None}, "bad_field"),
        ({"size": 0}, "bad_field"),
        ({"size": True}, "bad_field"),
        ({"size": 1.0}, "bad_field"),
        ({"size": 2**53}, "bad_field"),
        ({"size": 2**53 - 1}, "too_big"),
        ({"size": 4096 * 65_537}, "bad_field"),
        ({"block": 0}, "bad_field"),
        ({"block": 1}, "bad_field"),
        ({"block": 4097}, "bad_field"),
        ({"block": 2 << 20}, "bad_field"),
        ({"kind": "pickle"}, "bad_field"),
        ({"kind": ["model"]}, "bad_field"),
        ({"kind": "program"}, "bad_signature"),
        ({"key": "0" * 16}, "bad_signature"),
        ({"key": "0" * 16, "sig": "x" * 128}, "bad_signature"),
        ({"key": 1, "sig": "0" * 128}, "bad_signature"),
        ({"inline": "not base64"}, "bad_field"),
        ({"inline": "aGVsbG8="}, "bad_hash"),
        ({"inline": "A" * 2740}, "too_big"),
        ({"inline": 5}, "bad_field"),
    ],
)
def test_a_manifest_that_no_one_could_serve_is_refused_by_name(change: dict[str, Any], code: str) -> None:
    with pytest.raises(Malformed, match=rf"^{code}: "):
        Manifest.from_json(M.to_json() | change)


def test_a_blob_has_65536_blocks_at_most() -> None:
    assert Manifest.from_json(M.to_json() | {"size": 4_096 * 65_536}).total == 65_536


@pytest.mark.parametrize("other", [None, 5, "model", [M.to_json()]])
def test_a_manifest_is_an_object(other: object) -> None:
    with pytest.raises(Malformed, match=r"^bad_field: a manifest is an object"):
        Manifest.from_json(other)


GREATEST = dict.fromkeys(KIND_LIMITS, 4 << 30) | {
    "program": 1 << 20,
    "container": 256 << 20,
    "catalog": 1 << 20,
    "release": 64 << 20,
    "router": 8 << 20,
    "sum": 65_536,
    "points": 1 << 30,
}


@pytest.mark.parametrize(("kind", "most"), GREATEST.items())
def test_a_blob_of_each_kind_has_a_greatest_size(kind: str, most: int) -> None:
    fields = SIGNED.to_json() | {"kind": kind, "block": 1 << 20}
    assert Manifest.from_json(fields | {"size": most}).size == most
    with pytest.raises(Malformed, match=r"^too_big: "):
        Manifest.from_json(fields | {"size": most + 1})


@pytest.mark.parametrize("missing", ["sha256", "size", "block", "kind"])
def test_every_field_of_a_manifest_is_needed(missing: str) -> None:
    with pytest.raises(Malformed):
        Manifest.from_json({k: v for k, v in M.to_json().items() if k != missing})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=70),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(["sha256", "size", "block", "kind", "inline", "key", "sig"]), JSON))
def test_any_object_is_a_manifest_or_refused(change: dict[str, Any]) -> None:
    try:
        manifest = Manifest.from_json(M.to_json() | change)
    except Malformed:
        return
    assert 1 <= manifest.size <= KIND_LIMITS[manifest.kind]
    assert manifest.total <= 65_536


@given(st.integers(1, 300), st.data())
def test_a_bitmap_is_a_set_of_block_numbers(total: int, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, total - 1)))
    bitmap = Bitmap(total)
    assert sum(bitmap.add(i) for i in indices) == len(set(indices)) == bitmap.count
    assert [i for i in range(total) if bitmap.has(i)] == sorted(set(indices))
    assert bitmap.complete == (len(set(indices)) == total)
    again = Bitmap.from_base64(total, bitmap.to_base64())
    assert again.to_bytes() == bitmap.to_bytes()
    assert again.count == bitmap.count


@given(st.integers(1, 300), st.integers(0, 20), st.data())
def test_missing_runs_are_the_first_blocks_that_are_neither_here_nor_asked_for(
    total: int, limit: int, data: st.DataObject
) -> None:
    here = data.draw(st.sets(st.integers(0, total - 1)))
    asked = data.draw(st.sets(st.integers(0, total - 1), max_size=16))
    bitmap = Bitmap(total)
    for index in here:
        bitmap.add(index)
    runs = bitmap.missing(limit, skip=asked)
    listed = [i for first, count in runs for i in range(first, first + count)]
    assert listed == [i for i in range(total) if i not in here | asked][:limit]
    assert all(a + n < b for (a, n), (b, _) in pairwise(runs))


@pytest.mark.parametrize(
    ("total", "text"), [(10, "CQ=="), (10, "CQL/"), (10, "CQI"), (10, "CQQ="), (8, "/w==x"), (1, "")]
)
def test_a_bitmap_of_the_wrong_length_or_with_spare_bits_is_refused(total: int, text: str) -> None:
    with pytest.raises(Malformed):
        Bitmap.from_base64(total, text)


@pytest.mark.parametrize(("total", "size"), [(1, 1), (8, 1), (9, 2), (65_536, 8_192)])
def test_a_bitmap_has_a_byte_for_eight_blocks(total: int, size: int) -> None:
    assert len(Bitmap(total).to_bytes()) == size


@pytest.mark.parametrize("index", [-1, 10, True])
def test_a_bitmap_knows_its_last_block(index: int) -> None:
    with pytest.raises(Malformed):
        Bitmap(10).add(index)


@pytest.mark.parametrize("total", [0, 65_537, 2**32 - 1])
def test_no_bitmap_is_sized_from_a_wild_number(total: int) -> None:
    with pytest.raises(Malformed):
        Bitmap(total)


@pytest.mark.parametrize("text", ["aGk", "aGk=\n", "aGl=", "aG-_", "ä", b"aGk=", None])
def test_base64_has_one_spelling(text: object) -> None:
    with pytest.raises(Malformed):
        decode_base64(text, 100)


@pytest.mark.parametrize("limit", [100, 101, 102])
def test_base64_holds_no_byte_more_than_its_limit(limit: int) -> None:
    """The last four characters stand for one, two or three bytes."""
    most = bytes(limit)
    assert decode_base64(base64.b64encode(most).decode(), limit) == most
    with pytest.raises(Malformed, match=r"^too_big: "):
        decode_base64(base64.b64encode(most + b"x").decode(), limit)
