"""Blobs: the manifest that names one, the blocks that carry it, and the bitmap of what has arrived.

A blob is any bytes, named by its SHA-256 and cut into blocks of one size; the last block may be shorter. Everything
about a block is checked against the manifest before its bytes are used, and nothing is allocated from a received number
alone.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import struct
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from edge_client.errors import Malformed

VERSION = 1
HEADER = struct.Struct("<BBHIII")  # version, flags, mark, index, total, crc32 of the 12 bytes before it and the body
_HEAD = struct.Struct("<BBHII")  # the same without the checksum

MAX_INTEGER = 2**53 - 1  # a double holds each integer up to here, and no other integer reads as one of them
BLOCK_BYTES_STEP = 4_096
MAX_BLOCK_BYTES = 1 << 20
DEFAULT_BLOCK_BYTES = 65_536
MAX_BLOCKS = 65_536
MAX_MARK = 65_535  # of the blocks that one `get` is answered with
MAX_INLINE_BYTES = 2_048
MAX_BLOB_BYTES = 4 << 30
_FULL = 0xFF
MAX_BITMAP_BYTES = 4_096  # a bitmap above this is left out of `go`

KIND_LIMITS = {  # the most bytes of a blob of each kind
    "model": MAX_BLOB_BYTES,
    "linear": MAX_BLOB_BYTES,
    "delta": MAX_BLOB_BYTES,
    "stats": MAX_BLOB_BYTES,
    "program": 1 << 20,
    "container": 256 << 20,
    "frozen": MAX_BLOB_BYTES,
    "catalog": 1 << 20,
    "release": 64 << 20,
    "router": 8 << 20,
    "sketch": MAX_BLOB_BYTES,
    "sum": 65_536,
    "masked": MAX_BLOB_BYTES,
    "points": 1 << 30,
}

_SHA256 = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"[0-9a-f]{16}")
_SIG = re.compile(r"[0-9a-f]{128}")


def is_count(value: object, low: int, high: int = MAX_INTEGER) -> bool:
    """True for an int (not a bool) from `low` to `high`."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The name of a blob. `inline` is the blob itself when it is small; `key` and `sig` sign it (kind "program")."""

    sha256: str
    size: int  # bytes of the whole blob
    block: int  # bytes of every block but the last
    kind: str
    inline: bytes | None = None
    key: str | None = None
    sig: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.sha256, str) or _SHA256.fullmatch(self.sha256) is None:
            raise Malformed("bad_field", f"sha256 {self.sha256!r:.80} is not 64 lower-case hex digits")
        if not isinstance(self.kind, str) or self.kind not in KIND_LIMITS:
            raise Malformed("bad_field", f"kind {self.kind!r:.80} is none of {', '.join(KIND_LIMITS)}")
        if not is_count(self.block, BLOCK_BYTES_STEP, MAX_BLOCK_BYTES) or self.block % BLOCK_BYTES_STEP:
            raise Malformed(
                "bad_field", f"block {self.block!r:.80}: a multiple of {BLOCK_BYTES_STEP} up to {MAX_BLOCK_BYTES}"
            )
        if not is_count(self.size, 1):
            raise Malformed("bad_field", f"size {self.size!r:.80} is not a positive integer")
        if self.size > KIND_LIMITS[self.kind]:
            raise Malformed("too_big", f"{self.kind} of {self.size} bytes, at most {KIND_LIMITS[self.kind]}")
        if self.total > MAX_BLOCKS:
            raise Malformed("bad_field", f"{self.total} blocks of {self.block} bytes, at most {MAX_BLOCKS}")
        self._check_signature_form()
        if self.inline is not None:
            self._check_inline(self.inline)

    @property
    def total(self) -> int:
        return -(-self.size // self.block)

    def to_json(self) -> dict[str, Any]:
        """The JSON object of PROTOCOL.md; absent fields are left out."""
        out: dict[str, Any] = {"sha256": self.sha256, "size": self.size, "block": self.block, "kind": self.kind}
        if self.inline is not None:
            out["inline"] = base64.b64encode(self.inline).decode("ascii")
        if self.sig is not None:  # then there is a key
            out |= {"key": self.key, "sig": self.sig}
        return out

    @staticmethod
    def from_json(obj: object) -> Manifest:
        """Read a received manifest. Raises Malformed.

        A program must carry a signature; whether it is a right one is for signing.py to say.
        """
        if not isinstance(obj, dict):
            raise Malformed("bad_field", f"a manifest is an object, got {obj!r:.80}")
        missing = {"sha256", "size", "block", "kind"} - set(obj)
        if missing:
            raise Malformed("bad_field", f"manifest without {', '.join(sorted(missing))}")
        inline = None if "inline" not in obj else decode_base64(obj["inline"], MAX_INLINE_BYTES)
        manifest = Manifest(
            sha256=obj["sha256"],
            size=obj["size"],
            block=obj["block"],
            kind=obj["kind"],
            inline=inline,
            key=(obj["key"] or "") if "key" in obj else None,  # null is no absent one
            sig=(obj["sig"] or "") if "sig" in obj else None,
        )
        if manifest.kind == "program" and manifest.sig is None:
            raise Malformed("bad_signature", "a program's manifest must be signed")
        return manifest

    def _check_signature_form(self) -> None:
        if (self.key is None) != (self.sig is None):
            raise Malformed("bad_signature", "key and sig come together")
        for value, pattern in ((self.key, _KEY), (self.sig, _SIG)):
            if value is not None and not (isinstance(value, str) and pattern.fullmatch(value)):
                raise Malformed("bad_signature", f"{value!r:.80} is not of the form {pattern.pattern}")

    def _check_inline(self, data: bytes) -> None:
        if len(data) != self.size or hashlib.sha256(data).hexdigest() != self.sha256:
            raise Malformed("bad_hash", "the inline blob is not the one that its manifest names")


def manifest_of(data: bytes, kind: str, *, block: int = DEFAULT_BLOCK_BYTES, inline: bool = False) -> Manifest:
    """Name `data`; with `inline` it travels in the manifest itself if it has at most INLINE_MAX bytes."""
    return Manifest(
        sha256=hashlib.sha256(data).hexdigest(),
        size=len(data),
        block=block,
        kind=kind,
        inline=bytes(data) if inline and len(data) <= MAX_INLINE_BYTES else None,
    )


def body_range(manifest: Manifest, index: int) -> tuple[int, int]:
    """Where block `index` lies in the blob: (start, stop) in bytes. Malformed("bad_range") if there is none."""
    if not is_count(index, 0, manifest.total - 1):
        raise Malformed("bad_range", f"block {index!r:.80} of a blob of {manifest.total} blocks")
    start = index * manifest.block
    return start, min(start + manifest.block, manifest.size)


def pack_block(body: bytes, index: int, total: int, mark: int = 0) -> bytes:
    """The message that carries one block; a `mark` of 1 to MAX_MARK is for a device that names it in its next `get`."""
    if not 1 <= len(body) <= MAX_BLOCK_BYTES:
        raise Malformed("bad_field", f"block body of {len(body)} bytes, 1 to {MAX_BLOCK_BYTES}")
    if not (is_count(total, 1, MAX_BLOCKS) and is_count(index, 0, total - 1)):
        raise Malformed("bad_range", f"block {index} of {total}, at most {MAX_BLOCKS} blocks")
    head = _HEAD.pack(VERSION, 0, mark, index, total)
    return HEADER.pack(VERSION, 0, mark, index, total, zlib.crc32(body, zlib.crc32(head))) + body


def unpack_block(message: bytes, manifest: Manifest, index: int) -> bytes:
    """The body of block `index` (from the topic) of the blob `manifest`. Raises Malformed unless everything fits.

    A mark is refused: only a device that asked for marks reads them.
    """
    body, mark = unpack_marked_block(message, manifest, index)
    if mark:
        raise Malformed("bad_field", f"block mark {mark:#x}, where none belongs")
    return body


def unpack_marked_block(message: bytes, manifest: Manifest, index: int) -> tuple[bytes, int]:
    """-> the body of block `index` and its mark, 0 without one. Raises Malformed as `unpack_block`.

    Wrong lengths are refused before the checksum is computed; the whole blob's hash remains to be checked at the end.
    """
    start, stop = body_range(manifest, index)
    if len(message) < HEADER.size:
        raise Malformed("bad_field", f"block message of {len(message)} bytes, at least {HEADER.size + 1}")
    version, flags, mark, said_index, said_total, crc = HEADER.unpack_from(message)
    if version != VERSION:
        raise Malformed("bad_version", f"block version {version}, this side reads {VERSION}")
    if flags:
        raise Malformed("bad_field", f"block flags {flags:#x}; none is defined")
    if (said_index, said_total) != (index, manifest.total):
        raise Malformed("bad_range", f"block {said_index} of {said_total}, expected {index} of {manifest.total}")
    if len(message) - HEADER.size != stop - start:
        raise Malformed("bad_field", f"block body of {len(message) - HEADER.size} bytes, expected {stop - start}")
    body = bytes(message[HEADER.size :])
    if zlib.crc32(body, zlib.crc32(message[: _HEAD.size])) != crc:
        raise Malformed("bad_hash", f"block {index} of {manifest.total}: checksum differs")
    return body, mark


def read_mark(message: bytes) -> int:
    """The mark of a block that is no longer wanted, unchecked; 0 without one."""
    return int.from_bytes(message[2:4], "little")


class Bitmap:
    """Which of `total` blocks have arrived: block i is bit i mod 8, least significant first, of byte i div 8."""

    def __init__(self, total: int) -> None:
        if not is_count(total, 1, MAX_BLOCKS):
            raise Malformed("bad_field", f"a bitmap holds 1 to {MAX_BLOCKS} blocks, got {total!r:.80}")
        self.total = total
        self.count = 0  # blocks that have arrived
        self._bits = bytearray((total + 7) // 8)

    def add(self, index: int) -> bool:
        """Note block `index`; True if it is new."""
        if self.has(index):
            return False
        self._bits[index >> 3] |= 1 << (index & 7)
        self.count += 1
        return True

    def has(self, index: int) -> bool:
        """True if block `index` has arrived. Malformed("bad_range") if there is no such block."""
        if not is_count(index, 0, self.total - 1):
            raise Malformed("bad_range", f"block {index!r:.80} of {self.total}")
        return bool(self._bits[index >> 3] >> (index & 7) & 1)

    @property
    def complete(self) -> bool:
        return self.count == self.total

    def missing(self, limit: int, *, skip: Collection[int] = ()) -> list[list[int]]:
        """The first `limit` missing blocks that are not in `skip`, as runs [first, count]: the `at` of a `get`."""
        runs: list[list[int]] = []
        found = 0
        for byte, bits in enumerate(self._bits):
            if bits == _FULL:  # most of a long transfer: nothing to look at
                continue
            for index in range(8 * byte, min(8 * byte + 8, self.total)):
                if found == limit:
                    return runs
                if bits >> (index & 7) & 1 or index in skip:
                    continue
                found += 1
                if runs and sum(runs[-1]) == index:
                    runs[-1][1] += 1
                else:
                    runs.append([index, 1])
        return runs

    def to_bytes(self) -> bytes:
        """ceil(total / 8) bytes; unused bits are zero."""
        return bytes(self._bits)

    @classmethod
    def from_bytes(cls, total: int, data: bytes) -> Bitmap:
        """Read what `to_bytes` wrote. Malformed on another length or a bit beyond `total`."""
        bitmap = cls(total)
        if len(data) != len(bitmap._bits):
            raise Malformed("bad_field", f"bitmap of {len(data)} bytes for {total} blocks")
        if total % 8 and data[-1] >> (total % 8):
            raise Malformed("bad_field", f"bitmap has bits beyond its {total} blocks")
        bitmap._bits[:] = data
        bitmap.count = sum(byte.bit_count() for byte in data)
        return bitmap

    def to_base64(self) -> str:
        """The `have` of a `go`."""
        return base64.b64encode(self._bits).decode("ascii")

    @classmethod
    def from_base64(cls, total: int, text: str) -> Bitmap:
        """Read what `to_base64` wrote; Malformed on anything else."""
        return cls.from_bytes(total, decode_base64(text, MAX_BLOCKS // 8))


def decode_base64(text: object, limit_bytes: int) -> bytes:
    """Strict base64: the standard alphabet, padded, no spare bits, at most `limit_bytes` decoded bytes."""
    if not isinstance(text, str) or not text.isascii():
        raise Malformed("bad_field", f"expected base64 text, got {text!r:.80}")
    if (size := len(text) // 4 * 3 - text[-2:].count("=")) > limit_bytes:
        raise Malformed("too_big", f"base64 of {size} bytes, at most {limit_bytes} are allowed")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as wrong:
        raise Malformed("bad_field", f"not base64: {wrong}") from wrong
    if base64.b64encode(data).decode("ascii") != text:
        raise Malformed("bad_field", "base64 with spare bits")
    return data
