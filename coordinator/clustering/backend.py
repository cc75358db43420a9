"""The device of the clustering's matrix products: numpy on the CPU, or torch on CUDA where available.

A `Backend` holds the two large arrays, points [n, d] and their Gram matrix [n, n], and returns arrays n times smaller
to numpy. numpy draws seeds and decides moves and labels, so both backends take the same decisions up to rounding. torch
is imported only when a CUDA driver is found.
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from typing import Protocol

import numpy as np

from edge_client.protocol.task import F64, I64, Array

CUDA_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


class PointMatrix(Protocol):
    """Rows [capacity, d], zeros until `put`. `together` is how many new ones are best multiplied at a time."""

    @property
    def together(self) -> int: ...

    def put(self, index: int, row: Array) -> None:
        """Store one row [d]."""

    def grow(self, capacity: int) -> None:
        """Raise the capacity to `capacity` rows; stored rows are kept."""

    def inner_products(self, start: int, stop: int) -> F64:
        """Inner products [stop - start, stop] of the rows start..stop with all rows before `stop`."""


class MatrixProducts(Protocol):
    """A symmetric matrix [n, n] that is multiplied many times."""

    def rows(self, index: I64) -> F64:
        """[q] indices -> those rows [q, n]."""

    def multiply(self, left: F64, index: I64 | None = None) -> F64:
        """[q, n] -> [q, n], left times the matrix; with `index` [m], a left [q, m] times those rows of the matrix."""


class Backend(Protocol):
    """Matrix products on one device."""

    def points(self, capacity: int, width: int, dtype: np.dtype[np.generic]) -> PointMatrix:
        """Zeroed storage for `capacity` rows of `width` numbers."""

    def products(self, matrix: F64) -> MatrixProducts:
        """The matrix [n, n], ready to be multiplied."""


def select_backend(device: str | None = None) -> Backend:
    """The backend of "cpu" (numpy), "cuda" or "torch-cpu" (for tests); None is "cuda" where available, else "cpu"."""
    name = default_device() if device is None else device
    if name == "cpu":
        from coordinator.clustering.numpy_backend import NumpyBackend

        return NumpyBackend()
    from coordinator.clustering.host_fallback import HostFallback
    from coordinator.clustering.torch_backend import TorchBackend

    return HostFallback(TorchBackend({"cuda": "cuda", "torch-cpu": "cpu"}[name]))


@lru_cache(maxsize=1)
def default_device() -> str:
    """Return "cuda" where a driver, torch and a CUDA device are found, else "cpu"; constant within a process."""
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return "cpu"
    from coordinator.clustering.torch_backend import has_cuda

    return "cuda" if has_cuda() else "cpu"
