"""The clustering's matrix products by torch, on a CUDA device; on the CPU for tests of equality.

Products are computed in float64, column block by column block, so that rounding depends on shapes to about 1e-14 only.
Points are stored in their own precision.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from edge_client.protocol.task import F64, I64, Array

MAX_FLOAT64_VALUES = 2**27  # 1 GiB of float64: so much of the points is raised to float64 at a time


def _torch() -> Any:  # noqa: ANN401 - a module
    """Import torch by name, so that importing the clustering does not load torch."""
    return importlib.import_module("torch")


def has_cuda() -> bool:
    """Whether torch is installed and sees a CUDA device."""
    try:
        return bool(_torch().cuda.is_available())
    except ImportError:
        return False


def is_out_of_memory(wrong: RuntimeError) -> bool:
    """Whether torch found no memory on the device."""
    return isinstance(wrong, _torch().OutOfMemoryError)


class TorchBackend:
    """The backend of one torch device: "cuda" or "cpu"."""

    def __init__(self, device: str) -> None:
        self.device = device

    def points(self, capacity: int, width: int, dtype: np.dtype[np.generic]) -> TorchPoints:
        return TorchPoints(_torch().zeros((max(capacity, 1), width), dtype=_dtype(dtype), device=self.device))

    def products(self, matrix: F64) -> TorchProducts:
        return TorchProducts(_on(matrix, self.device))


class TorchPoints:
    """Rows [capacity, d] on the device."""

    together = 16

    def __init__(self, rows: Any) -> None:  # noqa: ANN401 - a tensor
        self._rows = rows

    def put(self, index: int, row: Array) -> None:
        self._rows[index] = _on(row, self._rows.device)

    def grow(self, capacity: int) -> None:
        rows = self._rows.new_zeros((capacity, self._rows.shape[1]))
        rows[: len(self._rows)] = self._rows
        self._rows = rows

    def to_host(self) -> Array:
        """The rows [capacity, d] in their own precision."""
        return _back(self._rows)

    def inner_products(self, start: int, stop: int) -> F64:
        width = self._rows.shape[1]
        step = max(1, MAX_FLOAT64_VALUES // max(stop, 1))
        total = 0.0
        for first in range(0, width, step):
            block = self._rows[:stop, first : first + step].double()
            total = total + block[start:] @ block.T
        return _back(total) if width else np.zeros((stop - start, stop))


class TorchProducts:
    """A matrix [n, n] on the device."""

    def __init__(self, matrix: Any) -> None:  # noqa: ANN401 - a tensor
        self._matrix = matrix

    def to_host(self) -> F64:
        """The matrix [n, n]."""
        return _back(self._matrix)

    def rows(self, index: I64) -> F64:
        return _back(self._matrix[_on(index, self._matrix.device)])

    def multiply(self, left: F64, index: I64 | None = None) -> F64:
        right = self._matrix if index is None else self._matrix[_on(index, self._matrix.device)]
        return _back(_on(left, self._matrix.device) @ right)


def _on(array: Array, device: Any) -> Any:  # noqa: ANN401 - a tensor, on a device
    """A tensor that shares no memory with the array."""
    return _torch().tensor(np.ascontiguousarray(array), device=device)


def _back(tensor: Any) -> F64:  # noqa: ANN401 - a tensor
    array: F64 = tensor.cpu().numpy()
    return array


def _dtype(dtype: np.dtype[np.generic]) -> Any:  # noqa: ANN401 - torch's
    return getattr(_torch(), dtype.name)
