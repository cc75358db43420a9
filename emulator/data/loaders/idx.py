"""The IDX format of MNIST and its kin: two zero bytes, a type, a number of dimensions, big-endian sizes, the values.

The number of bytes must agree with the header.
"""

from __future__ import annotations

import math
import struct

import numpy as np

from edge_client.protocol.task import Array

DTYPE_CODES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
MAX_DIMS = 4


def parse_idx(data: bytes) -> Array:
    """The array, in native byte order. Raises ValueError for anything but exactly one well-formed array."""
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in DTYPE_CODES:  # noqa: PLR2004 - the magic number
        raise ValueError(f"no IDX file: it begins with {data[:4].hex() or 'nothing'}")
    dims = data[3]
    begins = 4 + 4 * dims
    if not 1 <= dims <= MAX_DIMS or len(data) < begins:
        raise ValueError(f"{dims} dimensions in a header of {len(data)} bytes")
    shape = struct.unpack_from(f">{dims}I", data, 4)
    kind = np.dtype(DTYPE_CODES[data[2]])
    expected = begins + math.prod(shape) * kind.itemsize  # whole numbers of any size: nothing overflows
    if len(data) != expected:
        raise ValueError(f"{len(data)} bytes, but shape {shape} needs {expected}")
    return np.frombuffer(data, kind, offset=begins).reshape(shape).astype(kind.newbyteorder("="), copy=False)
