"""Matrix products on a GPU while its memory suffices, else on the host: a fleet may be larger than the memory.

What is stored on the GPU is copied to the host, and what found no memory is done there. New points and products begin
on the GPU again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import numpy as np

from coordinator.clustering.numpy_backend import NumpyBackend, NumpyPoints, NumpyProducts
from coordinator.clustering.torch_backend import TorchBackend, TorchPoints, TorchProducts, is_out_of_memory
from edge_client.protocol.task import F64, I64, Array

Done = TypeVar("Done")
log = logging.getLogger(__name__)


class HostFallback:
    """The backend of a GPU, with numpy's behind it."""

    def __init__(self, gpu: TorchBackend) -> None:
        self._gpu, self._host = gpu, NumpyBackend()

    def points(self, capacity: int, width: int, dtype: np.dtype[np.generic]) -> HostFallbackPoints | NumpyPoints:
        held = _or_none(lambda: self._gpu.points(capacity, width, dtype))
        return HostFallbackPoints(held[0]) if held else self._host.points(capacity, width, dtype)

    def products(self, matrix: F64) -> HostFallbackProducts | NumpyProducts:
        held = _or_none(lambda: self._gpu.products(matrix))
        return HostFallbackProducts(held[0]) if held else self._host.products(matrix)


class HostFallbackPoints:
    """Points [capacity, d] on the GPU until its memory ends."""

    def __init__(self, held: TorchPoints) -> None:
        self._held: TorchPoints | NumpyPoints = held

    @property
    def together(self) -> int:
        return self._held.together

    def put(self, index: int, row: Array) -> None:
        self._run(lambda held: held.put(index, row))

    def grow(self, capacity: int) -> None:
        self._run(lambda held: held.grow(capacity))

    def inner_products(self, start: int, stop: int) -> F64:
        return self._run(lambda held: held.inner_products(start, stop))

    def _run(self, work: Callable[[TorchPoints | NumpyPoints], Done]) -> Done:
        found = _or_none(lambda: work(self._held))
        if found:
            return found[0]
        if isinstance(self._held, TorchPoints):
            rows = self._held.to_host()
            self._held = NumpyPoints(len(rows), rows.shape[1], rows.dtype)
            for index, row in enumerate(rows):
                self._held.put(index, row)
        return work(self._held)


class HostFallbackProducts:
    """A matrix [n, n] on the GPU until its memory ends."""

    def __init__(self, held: TorchProducts) -> None:
        self._held: TorchProducts | NumpyProducts = held

    def rows(self, index: I64) -> F64:
        return self._run(lambda held: held.rows(index))

    def multiply(self, left: F64, index: I64 | None = None) -> F64:
        return self._run(lambda held: held.multiply(left, index))

    def _run(self, work: Callable[[TorchProducts | NumpyProducts], F64]) -> F64:
        found = _or_none(lambda: work(self._held))
        if found:
            return found[0]
        if isinstance(self._held, TorchProducts):
            self._held = NumpyProducts(self._held.to_host())
        return work(self._held)


def _or_none(work: Callable[[], Done]) -> tuple[Done] | None:
    """The result, or None for want of memory. The error, whose frames hold tensors, is gone when this returns."""
    try:
        return (work(),)
    except RuntimeError as wrong:
        if not is_out_of_memory(wrong):
            raise
        _tell_once()
        return None


@cache
def _tell_once() -> None:
    """Blocks of columns and rounds would repeat it."""
    log.warning("the GPU has no memory for the clustering: the host does it")
