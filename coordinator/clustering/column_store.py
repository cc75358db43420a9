"""Rows [capacity, width] that are written one by one and read by blocks of columns, in memory or in a temporary file.

Up to MEMORY_BYTES are held in memory. More go into an unnamed file, which the system deletes when the process ends:
column block after column block, so that a block is read in one piece. The file is read and written, not mapped, so that
its pages do not count as memory of the process. TMPDIR is the folder of the file; a folder in memory saves nothing.
"""

from __future__ import annotations

import tempfile
import weakref
from typing import IO

import numpy as np

from edge_client.errors import ConfigError
from edge_client.protocol.task import Array

MEMORY_BYTES = 64 * 2**20
COLUMNS = 2_048  # of a block in the file


class ColumnStore:
    """One matrix; a row that was never `put` holds zeros."""

    def __init__(self, capacity: int, width: int, dtype: np.dtype[np.generic]) -> None:
        self.capacity, self.width, self.dtype = capacity, width, np.dtype(dtype)
        self.in_file = capacity * width * self.dtype.itemsize > MEMORY_BYTES
        self._rows = np.zeros((0 if self.in_file else capacity, width), dtype=dtype)  # pages are taken when written
        self._file: IO[bytes] | None = self._new_file() if self.in_file else None

    def put(self, index: int, row: Array) -> None:
        if self._file is None:
            self._rows[index] = row
            return
        values = np.ascontiguousarray(row, dtype=self.dtype)
        for start in range(0, self.width, COLUMNS):
            part = values[start : start + COLUMNS]
            self._write(self._file, self._offset(start, part.size, index), part)

    def columns(self, start: int, stop: int, *, first: int = 0, last: int | None = None) -> Array:
        """[last - first, stop - start] of the rows from `first` on; not to be written."""
        last = self.capacity if last is None else last
        if self._file is None:
            return self._rows[first:last, start:stop]
        out = np.empty((last - first, stop - start), self.dtype)
        for left in range(start - start % COLUMNS, stop, COLUMNS):
            size = min(COLUMNS, self.width - left)
            begin, end = max(left, start), min(left + size, stop)
            whole = size == end - begin == stop - start
            block = out if whole else np.empty((last - first, size), self.dtype)
            self._read(self._file, self._offset(left, size, first), block)
            if not whole:
                out[:, begin - start : end - start] = block[:, begin - left : end - left]
        return out

    def grown(self, capacity: int) -> ColumnStore:
        """A store of more rows with what is stored here."""
        more = ColumnStore(capacity, self.width, self.dtype)
        for index in range(self.capacity):
            more.put(index, self.columns(0, self.width, first=index, last=index + 1)[0])
        return more

    def _new_file(self) -> IO[bytes]:
        file = tempfile.TemporaryFile(prefix="fedcenters-", buffering=0)  # noqa: SIM115 - lives as long as this
        file.truncate(self.capacity * self.width * self.dtype.itemsize)
        weakref.finalize(self, file.close)
        return file

    def _offset(self, start: int, size: int, row: int) -> int:
        """Where row `row` of the block of `size` columns from `start` on begins."""
        return (start * self.capacity + row * size) * self.dtype.itemsize

    def _write(self, file: IO[bytes], offset: int, part: Array) -> None:
        file.seek(offset)
        view = part.data.cast("B")
        try:
            while view:
                view = view[file.write(view) :]
        except OSError as full:
            size = self.capacity * self.width * self.dtype.itemsize
            raise ConfigError(
                f"a temporary file of {size // 10**6} MB in {tempfile.gettempdir()}: {full.strerror}",
                hint="set TMPDIR to a folder on a disk with more room",
            ) from full

    def _read(self, file: IO[bytes], offset: int, into: Array) -> None:
        """Fill `into`, which is contiguous."""
        file.seek(offset)
        view = into.data.cast("B")
        while view:
            count = file.readinto(view)  # type: ignore[attr-defined]  # an unbuffered file
            if not count:
                raise OSError(f"a temporary file in {tempfile.gettempdir()} became shorter")
            view = view[count:]
