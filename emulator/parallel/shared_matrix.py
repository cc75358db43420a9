"""A matrix in memory that this process shares with its workers. Each worker writes its own rows.

The memory has no name; the system frees it with the last array that uses it, even where a process was killed.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

import numpy as np

from edge_client.protocol.task import Array

ROW_DTYPE = np.dtype(np.float32)  # of what travels (emulator/simulation/emulated_devices.py, round_through_f32_delta)


class SharedMatrix:
    """[count, width] float32, zeros at first; `matrix` and what is cut from it may outlive this object."""

    def __init__(self, count: int, width: int) -> None:
        self.shape = count, width
        self._file = _unnamed(count * width * ROW_DTYPE.itemsize)
        self.matrix = _mapped(self._file, self.shape)

    def share_with(self, to: Connection, process: int) -> None:
        """Another process may write it; `open_shared_matrix` is called at the other end. Raises BrokenPipeError."""
        send_handle(to, self._file, process)

    def close(self) -> None:
        os.close(self._file)


@contextmanager
def open_shared_matrix(connection: Connection) -> Iterator[Callable[[int, Array], None]]:
    """-> the function that writes a row [width] of the matrix that `share_with` sent.

    Written like a file: a page that is new costs three times as much when it is touched through a mapping.
    """
    file = recv_handle(connection)

    def put(index: int, row: Array) -> None:
        left = np.ascontiguousarray(row, ROW_DTYPE).data.cast("B")
        at = index * len(left)
        while len(left):
            done = os.pwrite(file, left, at)
            left, at = left[done:], at + done

    try:
        yield put
    finally:
        os.close(file)


def _unnamed(size: int) -> int:
    """A file descriptor of so many bytes in memory, or on disk where the system has no memory files."""
    if sys.platform == "linux":
        file = os.memfd_create("fedcenters-rows")
    else:
        with tempfile.TemporaryFile() as held:
            file = os.dup(held.fileno())
    os.truncate(file, size)
    return file


def _mapped(file: int, shape: tuple[int, int]) -> Array:
    memory = mmap.mmap(file, shape[0] * shape[1] * ROW_DTYPE.itemsize)
    return np.frombuffer(memory, ROW_DTYPE).reshape(shape)
