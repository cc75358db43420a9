"""Named arrays as bytes: the safetensors format with limits, and one metadata key `fc` that describes the arrays.

The library is laxer than a server can be (it takes duplicate names, zero-sized dimensions, a header of megabytes,
unknown fields), so the header is read and checked here before the library parses the file. codecs.py maps a
model's schema to these arrays.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from edge_client.errors import Malformed
from edge_client.protocol.blocks import is_count
from edge_client.protocol.message_schemas import CODECS
from edge_client.protocol.messages import canonical_json, parse_json
from edge_client.protocol.task import Array, Tensors
from edge_client.protocol.validators import MAX_SAFE_INTEGER

VERSION = 1
MAX_HEADER_BYTES = 1 << 20
MAX_TENSORS = 4_096
MAX_DIMS = 8
TENSOR_FILE_KINDS = ("model", "linear", "delta", "stats", "sketch", "frozen")
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
_SHA256 = "[0-9a-f]{64}"
Buffer = bytes | memoryview | mmap
_LENGTH = struct.Struct("<Q")  # of the header, at the start of the file
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I8": "i1", "U8": "u1"}
_DTYPES = frozenset(np.dtype(code).name for code in _NUMPY.values())


@dataclass(frozen=True, kw_only=True)
class TensorFileMeta:
    """What a tensor file is. `base`: from what a delta was taken, the sha256 of a blob or "zero"; only for deltas."""

    kind: str
    codec: str
    schema: str  # sha256 of the schema (Schema.sha256)
    base: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in TENSOR_FILE_KINDS:
            raise Malformed(
                "bad_schema", f"tensor file of kind {self.kind!r:.80}; expected one of {', '.join(TENSOR_FILE_KINDS)}"
            )
        if self.codec not in CODECS:
            raise Malformed("bad_codec", f"codec {self.codec!r:.80}; expected one of {', '.join(CODECS)}")
        if re.fullmatch(_SHA256, self.schema) is None:
            raise Malformed("bad_schema", f"schema {self.schema!r:.80} is no sha256")
        named = self.base is None or re.fullmatch(f"zero|{_SHA256}", self.base)
        if (self.kind == "delta") != (self.base is not None) or not named:
            raise Malformed(
                "bad_codec", f"a delta names its base and nothing else does; {self.kind} has {self.base!r:.80}"
            )

    def to_json(self) -> dict[str, Any]:
        """The object behind `fc`."""
        base = {} if self.base is None else {"base": self.base}
        return {"v": VERSION, "kind": self.kind, "codec": self.codec, "schema": self.schema} | base


def pack_tensors(tensors: Tensors, *, kind: str, codec: str, schema: str, base: str | None = None) -> bytes:
    """One tensor file. The same tensors give the same bytes in every process with the same library."""
    meta = TensorFileMeta(kind=kind, codec=codec, schema=schema, base=base)
    if not 1 <= len(tensors) <= MAX_TENSORS:
        raise Malformed("bad_schema", f"{len(tensors)} tensors, 1 to {MAX_TENSORS} are allowed")
    for name, array in tensors.items():
        if array.dtype.name not in _DTYPES:
            raise Malformed("bad_schema", f"tensor {name} is {array.dtype}; allowed are {', '.join(sorted(_DTYPES))}")
        if array.ndim > MAX_DIMS or array.size == 0:
            raise Malformed("bad_schema", f"tensor {name} of shape {array.shape}: {MAX_DIMS} dimensions, none empty")
    rows = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in tensors.items()}
    data: bytes = save(rows, metadata={"fc": canonical_json(meta.to_json()).decode("utf-8")})
    return data


def unpack_tensors(data: bytes) -> tuple[dict[str, Array], TensorFileMeta]:
    """Read a tensor file from anyone: name -> array, and what the file is. Malformed on anything out of order."""
    _, meta, _ = _checked_header(data)
    try:
        return dict(load(data)), meta
    except (SafetensorError, ValueError, TypeError, KeyError) as wrong:  # the two readers must agree
        raise Malformed("bad_schema", f"safetensors refuses the file: {wrong!s:.120}") from wrong


def view_tensors(data: Buffer) -> tuple[dict[str, Array], TensorFileMeta]:
    """`unpack_tensors` without copies: arrays that lie in `data`, for example in a file that is mapped into memory."""
    header, meta, body_bytes = _checked_header(data)
    body = len(data) - body_bytes
    found = {}
    for name, entry in header.items():
        begin, count = body + entry["data_offsets"][0], math.prod(entry["shape"])
        found[name] = np.frombuffer(data, _NUMPY[entry["dtype"]], count, begin).reshape(entry["shape"])
    return found, meta


def _checked_header(data: Buffer) -> tuple[dict[str, Any], TensorFileMeta, int]:
    """-> the entries of the tensors, what the file is, and the number of bytes after the header."""
    header, body_bytes = _header(data)
    meta = _meta(header.pop("__metadata__", None))
    if not 1 <= len(header) <= MAX_TENSORS:
        raise Malformed("bad_schema", f"{len(header)} tensors, 1 to {MAX_TENSORS} are allowed")
    _check_layout(header, body_bytes)
    return header, meta, body_bytes


def _header(data: Buffer) -> tuple[dict[str, Any], int]:
    """The parsed header and the number of bytes after it."""
    if len(data) < _LENGTH.size:
        raise Malformed("bad_schema", f"tensor file of {len(data)} bytes")
    (length,) = _LENGTH.unpack_from(data)
    body_bytes = len(data) - _LENGTH.size - length
    if length > MAX_HEADER_BYTES or body_bytes < 0 or length % _LENGTH.size:
        raise Malformed(
            "bad_schema", f"header of {length} bytes: a multiple of 8 up to {MAX_HEADER_BYTES}, in the file"
        )
    text = bytes(data[_LENGTH.size : _LENGTH.size + length])
    if text[:1] != b"{":
        raise Malformed("bad_schema", "the header does not start with '{'")
    try:
        return parse_json(text, MAX_HEADER_BYTES), body_bytes
    except Malformed as wrong:
        raise Malformed("bad_schema", f"header: {wrong}") from wrong


def _meta(metadata: object) -> TensorFileMeta:
    if not isinstance(metadata, dict) or set(metadata) != {"fc"} or not isinstance(metadata["fc"], str):
        raise Malformed("bad_schema", "__metadata__ must hold one text, fc")
    text = metadata["fc"].encode("utf-8")
    try:
        fc = parse_json(text)
    except Malformed as wrong:
        raise Malformed("bad_schema", f"fc: {wrong}") from wrong
    if not isinstance(fc, dict) or set(fc) - {"base"} != {"v", "kind", "codec", "schema"}:
        raise Malformed("bad_schema", "fc holds v, kind, codec, schema, and base for a delta")
    if not is_count(fc["v"], VERSION, VERSION):
        raise Malformed("bad_version", f"tensor file version {fc['v']!r:.80}, this side reads {VERSION}")
    if canonical_json(fc) != text or not all(isinstance(fc[k], str) for k in fc if k != "v"):
        raise Malformed("bad_schema", "fc is not canonical JSON of texts")
    return TensorFileMeta(kind=fc["kind"], codec=fc["codec"], schema=fc["schema"], base=fc.get("base"))


def _check_layout(header: Mapping[str, Any], body_bytes: int) -> None:
    """Every tensor is well formed, and together they cover the body without hole or overlap."""
    spans = sorted(_span(name, entry) for name, entry in header.items())
    at = 0
    for begin, end in spans:
        if begin != at:
            raise Malformed("bad_schema", f"tensor data has a hole or an overlap at byte {min(at, begin)}")
        at = end
    if at != body_bytes:
        raise Malformed("bad_schema", f"tensors cover {at} of {body_bytes} bytes")


def _span(name: str, entry: object) -> tuple[int, int]:
    """(begin, end) of one tensor's bytes; sizes are compared as Python integers before numpy sees them."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise Malformed("bad_schema", f"tensor {name!r:.80} needs dtype, shape and data_offsets, nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    item = ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
    if item is None:
        raise Malformed("bad_schema", f"tensor {name!r:.80} has dtype {json.dumps(dtype):.40}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(is_count(d, 1, MAX_SAFE_INTEGER) for d in shape):
        raise Malformed("bad_schema", f"tensor {name!r:.80} has shape {shape!r:.80}")
    match offsets:
        case [begin, end] if is_count(begin, 0, MAX_SAFE_INTEGER) and is_count(end, 0, MAX_SAFE_INTEGER):
            pass
        case _:
            raise Malformed("bad_schema", f"tensor {name!r:.80} has offsets {offsets!r:.80}")
    if end - begin != math.prod(shape) * item or begin % item:
        raise Malformed("bad_schema", f"tensor {name!r:.80} of {shape} {dtype} does not fit bytes {begin} to {end}")
    return begin, end
