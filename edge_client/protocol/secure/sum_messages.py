"""The messages of one masked sum: strict canonical JSON, and the header of the upload.

Each names its sum by `roster`, the sha256 of the whole roster. Lists are sorted by device id and name no device twice.
Bytes are base64. A reader refuses what breaks a rule (Malformed) and allocates nothing from a received number.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from edge_client.errors import Malformed
from edge_client.protocol.blocks import decode_base64, is_count
from edge_client.protocol.messages import canonical_json, parse_json
from edge_client.protocol.secure.keys import (
    COMMITMENT_BYTES,
    DIGEST_BYTES,
    KEY_BYTES,
    SEALED_BYTES,
    PublicPrekey,
    SumContext,
)
from edge_client.protocol.secure.parameters import LEAST_COHORT, MAX_COHORT, MAX_NEIGHBOURS, SumParameters
from edge_client.protocol.secure.shamir import SHARE_BYTES
from edge_client.protocol.summed_task import MAX_BITS, MIN_BITS
from edge_client.protocol.topics import check_cid, check_run, check_sha256
from edge_client.protocol.validators import (
    MAX_SAFE_INTEGER,
    Check,
    FieldTable,
    checked,
    field_error,
    integer,
    list_of,
    record,
    required,
)

VERSION = 1
MAX_SUM_MESSAGE_BYTES = 65_536  # 255 neighbours with the longest ids and what each is sent
MAX_PREKEYS = 16
MAX_WORDS = 1 << 30
ENVELOPE_BYTES = SEALED_BYTES + 2 * DIGEST_BYTES  # both shares sealed, and the digest of each (mask, self)
UPLOAD_HEADER = struct.Struct("<BBHI32s")  # version, bits, 0, words, roster
_U32 = integer(0, 2**32 - 1)
_cid, _run, _sha256 = checked(check_cid), checked(check_run), checked(check_sha256)


def _bytes_of(size: int) -> Check:
    """Exactly `size` bytes in base64; the result is bytes."""

    def check(value: Any, name: str) -> bytes:  # noqa: ANN401
        data = decode_base64(value, size)
        if len(data) != size:
            raise field_error(name, value, f"{size} bytes in base64")
        return data

    return check


def _cids(value: Any, name: str) -> tuple[str, ...]:  # noqa: ANN401
    cids = list_of(_cid, 0, MAX_NEIGHBOURS)(value, name)
    if any(one >= other for one, other in pairwise(cids)):
        raise Malformed("bad_field", f"{name} is not sorted, or names a device twice")
    return tuple(cids)


def _by_device(size: int) -> Check:
    """`[[cid, base64 of size bytes], ...]`; the result is a dict."""

    def check(value: Any, name: str) -> dict[str, bytes]:  # noqa: ANN401
        rows = list_of(list_of(lambda v, _: v, 2, 2), 0, MAX_NEIGHBOURS)(value, name)
        cids = _cids([row[0] for row in rows], name)
        return {cid: _bytes_of(size)(row[1], f"{name} of {cid}") for cid, row in zip(cids, rows, strict=True)}

    return check


def _read(data: bytes, table: FieldTable, name: str) -> dict[str, Any]:
    message = parse_json(data, MAX_SUM_MESSAGE_BYTES)
    if not isinstance(message, dict):
        raise Malformed("bad_json", f"{name} is a JSON object")
    if not is_count(message.get("v"), VERSION, VERSION):
        raise Malformed("bad_version", f"{name} of version {message.get('v')!r:.80}, this side reads {VERSION}")
    fields: dict[str, Any] = record(table)(message, name)
    return fields


def _write(**fields: Any) -> bytes:  # noqa: ANN401
    return canonical_json({"v": VERSION, **fields})


def _rows(values: Mapping[str, bytes]) -> list[list[str]]:
    return [[cid, _base64(values[cid])] for cid in sorted(values)]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


@dataclass(frozen=True, kw_only=True)
class PrekeyBatch:
    """The unused prekeys that a device offers, at most 16, by rising number. A number is used in one sum, ever."""

    keys: tuple[PublicPrekey, ...]

    def to_bytes(self) -> bytes:
        return _write(keys=[[key.number, _base64(key.keys)] for key in self.keys])

    @staticmethod
    def from_bytes(data: bytes) -> PrekeyBatch:
        """Read what `to_bytes` wrote. Raises Malformed."""
        table = required(keys=list_of(list_of(lambda v, _: v, 2, 2), 0, MAX_PREKEYS))
        rows = _read(data, table, "prekeys")["keys"]
        numbers = [integer(0, MAX_SAFE_INTEGER)(number, "prekey number") for number, _ in rows]
        if any(one >= other for one, other in pairwise(numbers)):
            raise Malformed("bad_field", "the numbers of prekeys do not rise")
        keys = (_bytes_of(2 * KEY_BYTES)(keys, "prekey") for _, keys in rows)
        return PrekeyBatch(keys=tuple(PublicPrekey.of(number, key) for key, number in zip(keys, numbers, strict=True)))


@dataclass(frozen=True, kw_only=True)
class SumRoster:
    """What one device is told of a sum: its own prekey, its neighbours and their keys, and the vector's form."""

    run: str
    round: int
    exchange: int
    roster: str  # sha256 of the whole roster, `roster_digest`
    cid: str
    number: int  # of the device's own prekey
    devices: int  # n
    threshold: int
    words: int
    bits: int
    neighbours: Mapping[str, PublicPrekey]  # their numbers are not told: 0

    def to_bytes(self) -> bytes:
        fields = {name: getattr(self, name) for name in _ROSTER if name != "neighbours"}
        return _write(**fields, neighbours=_rows({cid: k.keys for cid, k in self.neighbours.items()}))

    @staticmethod
    def from_bytes(data: bytes) -> SumRoster:
        """Read what `to_bytes` wrote. Raises Malformed."""
        fields = _read(data, _ROSTER, "roster")
        near = {cid: PublicPrekey.of(0, keys) for cid, keys in fields["neighbours"].items()}
        if fields["cid"] in near or not fields["threshold"] <= len(near) < fields["devices"]:
            raise Malformed("bad_field", f"threshold {fields['threshold']} of {len(near)} neighbours")
        return SumRoster(**(fields | {"neighbours": near}))

    def context(self, federation: str) -> SumContext:
        """The name that keys and digests are bound to."""
        return SumContext(
            federation=federation, run=self.run, round=self.round, exchange=self.exchange, roster=self.roster
        )


_ROSTER = required(
    run=_run,
    round=_U32,
    exchange=_U32,
    roster=_sha256,
    cid=_cid,
    number=integer(0, MAX_SAFE_INTEGER),
    devices=integer(LEAST_COHORT, MAX_COHORT),
    threshold=integer(2, MAX_NEIGHBOURS),
    words=integer(1, MAX_WORDS),
    bits=integer(MIN_BITS, MAX_BITS),
    neighbours=_by_device(2 * KEY_BYTES),
)


@dataclass(frozen=True, kw_only=True)
class SumForm:
    """What is summed: the exchange, and vectors of `words` words of `bits` bits."""

    federation: str
    run: str
    round: int
    exchange: int
    words: int
    bits: int


def roster_digest(form: SumForm, parameters: SumParameters, devices: Mapping[str, PublicPrekey]) -> str:
    """sha256 of the whole roster in canonical JSON; it names the sum, and is the seed of its graph."""
    rows = [[cid, devices[cid].number, _base64(devices[cid].keys)] for cid in sorted(devices)]
    whole = _write(
        federation=form.federation,
        run=form.run,
        round=form.round,
        exchange=form.exchange,
        words=form.words,
        bits=form.bits,
        neighbours=parameters.neighbours,
        threshold=parameters.threshold,
        devices=rows,
    )
    return hashlib.sha256(whole).hexdigest()


@dataclass(frozen=True, kw_only=True)
class DealtShares:
    """From a device: an envelope [112 bytes] for each neighbour, and the commitment [32 bytes] to its self secret."""

    roster: str
    commitment: bytes
    envelopes: Mapping[str, bytes]

    def to_bytes(self) -> bytes:
        return _write(roster=self.roster, commitment=_base64(self.commitment), envelopes=_rows(self.envelopes))

    @staticmethod
    def from_bytes(data: bytes) -> DealtShares:
        """Read what `to_bytes` wrote. Raises Malformed."""
        table = required(roster=_sha256, commitment=_bytes_of(COMMITMENT_BYTES), envelopes=_by_device(ENVELOPE_BYTES))
        return DealtShares(**_read(data, table, "shares"))


@dataclass(frozen=True, kw_only=True)
class RelayedShares:
    """To a device: the envelopes of those neighbours that take part, by sender."""

    roster: str
    envelopes: Mapping[str, bytes]

    def to_bytes(self) -> bytes:
        return _write(roster=self.roster, envelopes=_rows(self.envelopes))

    @staticmethod
    def from_bytes(data: bytes) -> RelayedShares:
        """Read what `to_bytes` wrote. Raises Malformed."""
        return RelayedShares(**_read(data, required(roster=_sha256, envelopes=_by_device(ENVELOPE_BYTES)), "relay"))


@dataclass(frozen=True, kw_only=True)
class UnmaskRequest:
    """To a device: which of its neighbours that took part have survived, and which have dropped out."""

    roster: str
    survivors: tuple[str, ...]
    dropped: tuple[str, ...]

    def to_bytes(self) -> bytes:
        return _write(roster=self.roster, survivors=sorted(self.survivors), dropped=sorted(self.dropped))

    @staticmethod
    def from_bytes(data: bytes) -> UnmaskRequest:
        """Read what `to_bytes` wrote. Raises Malformed, also where a device has both survived and dropped out."""
        fields = _read(data, required(roster=_sha256, survivors=_cids, dropped=_cids), "unmask")
        _check_disjoint(fields["survivors"], fields["dropped"])
        return UnmaskRequest(**fields)


@dataclass(frozen=True, kw_only=True)
class RevealedShares:
    """From a device: its shares [32 bytes] of the self secrets of survivors, of the mask secrets of dropped ones."""

    roster: str
    self_shares: Mapping[str, bytes]
    mask_shares: Mapping[str, bytes]

    def to_bytes(self) -> bytes:
        return _write(roster=self.roster, self=_rows(self.self_shares), mask=_rows(self.mask_shares))

    @staticmethod
    def from_bytes(data: bytes) -> RevealedShares:
        """Read what `to_bytes` wrote. Raises Malformed, also where both kinds of share of one device are shown."""
        table = required(roster=_sha256, self=_by_device(SHARE_BYTES), mask=_by_device(SHARE_BYTES))
        fields = _read(data, table, "reveal")
        _check_disjoint(tuple(fields["self"]), tuple(fields["mask"]))
        return RevealedShares(roster=fields["roster"], self_shares=fields["self"], mask_shares=fields["mask"])


def _check_disjoint(one: Sequence[str], other: Sequence[str]) -> None:
    both = set(one) & set(other)
    if both:
        raise Malformed("bad_task", f"{', '.join(sorted(both)):.120} cannot both survive and drop out")


def write_upload(roster: str, words: int, bits: int, packed: bytes) -> bytes:
    """A masked vector as a blob: 40 bytes of header, then the packed words."""
    return UPLOAD_HEADER.pack(VERSION, bits, 0, words, bytes.fromhex(roster)) + packed
