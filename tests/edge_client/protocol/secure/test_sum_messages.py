"""What a device is told of a sum has numbers within their limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.aggregation.packed_words import read_upload
from edge_client.errors import Malformed
from edge_client.protocol.messages import canonical_json, parse_json
from edge_client.protocol.secure.keys import PublicPrekey
from edge_client.protocol.secure.sum_messages import (
    PrekeyBatch,
    RelayedShares,
    RevealedShares,
    SumRoster,
    UnmaskRequest,
    write_upload,
)
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
        ("words", 1, 2**30),
        ("bits", 16, 32),
    ],
)
def test_each_number_of_a_roster_is_read_up_to_its_limits_and_refused_beyond(field: str, least: int, most: int) -> None:
    assert [getattr(read_with(field, number), field) for number in (least, most)] == [least, most]
    for beyond in (least - 1, most + 1):
        with pytest.raises(Malformed):
            read_with(field, beyond)


def roster_of(neighbours: int, **changes: Any) -> SumRoster:  # noqa: ANN401 - numbers of a roster
    near = {f"n{i:04}": PublicPrekey(number=0, seal=bytes(32), mask=bytes(32)) for i in range(neighbours)}
    whole = replace(SumRoster.from_bytes(ROSTER), devices=1_000, threshold=2, neighbours=near)
    return replace(whole, **changes)


def test_a_roster_has_fewer_neighbours_than_devices_and_no_fewer_than_the_threshold() -> None:
    for right in (roster_of(255), roster_of(6, threshold=6, devices=7)):
        assert SumRoster.from_bytes(right.to_bytes()) == right
    for wrong in (roster_of(256), roster_of(6, threshold=7), roster_of(6, devices=6)):
        with pytest.raises(Malformed):
            SumRoster.from_bytes(wrong.to_bytes())
    itself = parse_json(roster_of(3).to_bytes(), 1 << 20)
    itself["neighbours"].insert(0, ["dev-000", itself["neighbours"][0][1]])
    with pytest.raises(Malformed, match="neighbours"):
        SumRoster.from_bytes(canonical_json(itself))


def batch_of(*numbers: int) -> bytes:
    return PrekeyBatch(keys=tuple(PublicPrekey(number=n, seal=bytes(32), mask=b"m" * 32) for n in numbers)).to_bytes()


def test_prekeys_are_at_most_sixteen_with_numbers_that_rise_from_nothing_to_what_json_holds() -> None:
    for numbers in ((), (0,), (2**53 - 1,), tuple(range(16)), (3, 7)):
        read = PrekeyBatch.from_bytes(batch_of(*numbers))
        assert tuple(key.number for key in read.keys) == numbers
        assert {(key.seal, key.mask) for key in read.keys} <= {(bytes(32), b"m" * 32)}
    for numbers in (tuple(range(17)), (3, 3), (4, 3), (-1,), (2**53,)):
        with pytest.raises(Malformed):
            PrekeyBatch.from_bytes(batch_of(*numbers))
    short = canonical_json({"v": 1, "keys": [[0, "AAAA"]]})
    with pytest.raises(Malformed, match="64 bytes in base64"):
        PrekeyBatch.from_bytes(short)


@pytest.mark.parametrize("size", [0, 111, 112, 113])
def test_an_envelope_has_112_bytes(size: int) -> None:
    relay = RelayedShares(roster="ab" * 32, envelopes={"a": bytes(size)}).to_bytes()
    if size == 112:
        assert RelayedShares.from_bytes(relay).envelopes == {"a": bytes(112)}
    else:
        with pytest.raises(Malformed):
            RelayedShares.from_bytes(relay)


def test_a_message_has_at_most_64_kibibytes_which_is_enough_for_the_most_neighbours() -> None:
    longest = {f"{i:064}": bytes(112) for i in range(255)}
    relay = RelayedShares(roster="ab" * 32, envelopes=longest)
    assert len(relay.to_bytes()) <= 65_536
    assert RelayedShares.from_bytes(relay.to_bytes()) == relay
    pad = b" " * (65_536 - len(relay.to_bytes()))
    for data in (b"", b"7", b"[]", relay.to_bytes() + pad + b" "):
        with pytest.raises(Malformed):
            RelayedShares.from_bytes(data)


@pytest.mark.parametrize("version", [0, 2, True, None, "1"])
def test_a_message_of_another_version_is_refused_as_that(version: object) -> None:
    with pytest.raises(Malformed) as refused:
        SumRoster.from_bytes(canonical_json({**parse_json(ROSTER, 1 << 16), "v": version}))
    assert refused.value.code == "bad_version"


def test_an_upload_is_a_header_of_forty_bytes_and_the_words_of_its_sum() -> None:
    packed = bytes(range(13))  # five words of 20 bits
    data = write_upload("ab" * 32, 5, 20, packed)
    assert (len(data), data[:4], data[4:8]) == (53, b"\x01\x14\0\0", b"\5\0\0\0")
    assert bytes(read_upload(data, roster="ab" * 32, words=5, bits=20)) == packed
    for form in ({"words": 4}, {"bits": 21}, {"roster": "cd" * 32}):
        with pytest.raises(Malformed, match="bad_schema"):
            read_upload(data, **({"roster": "ab" * 32, "words": 5, "bits": 20} | form))  # type: ignore[arg-type]
    with pytest.raises(Malformed, match="bad_version"):
        read_upload(b"\x02" + data[1:], roster="ab" * 32, words=5, bits=20)


def test_no_device_both_survives_and_drops_out_in_a_question_or_an_answer() -> None:
    asked = UnmaskRequest(roster="ab" * 32, survivors=("b", "a"), dropped=("c",))
    assert UnmaskRequest.from_bytes(asked.to_bytes()) == replace(asked, survivors=("a", "b"))
    shown = RevealedShares(roster="ab" * 32, self_shares={"a": bytes(32)}, mask_shares={"c": bytes(32)})
    assert RevealedShares.from_bytes(shown.to_bytes()) == shown
    with pytest.raises(Malformed, match=r"^bad_task: c cannot both survive and drop out"):
        UnmaskRequest.from_bytes(replace(asked, survivors=("a", "c")).to_bytes())
    with pytest.raises(Malformed, match=r"^bad_task: c cannot both survive and drop out"):
        RevealedShares.from_bytes(replace(shown, self_shares={"c": bytes(32)}).to_bytes())


@pytest.mark.parametrize("cids", [["a", "a"], ["b", "a"]])
def test_lists_are_sorted_and_name_no_device_twice(cids: list[str]) -> None:
    asked = {"v": 1, "roster": "ab" * 32, "survivors": cids, "dropped": []}
    told = {"v": 1, "roster": "ab" * 32, "envelopes": [[cid, ""] for cid in cids]}
    with pytest.raises(Malformed, match=r"^bad_field: .* is not sorted, or names a device twice"):
        UnmaskRequest.from_bytes(canonical_json(asked))
    with pytest.raises(Malformed, match=r"^bad_field: .* is not sorted, or names a device twice"):
        RelayedShares.from_bytes(canonical_json(told))
