"""A cache of data sets as torch tensors, since a simulation's devices train on the same samples each round.

Images may be stored channels-last.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edge_client.data.dataset import Dataset
from edge_client.protocol.task import F64, I64
from emulator.engines.cpu.flat import as_tensor

MAX_CACHE_BYTES = 1 << 29
MAX_GATHERED_BYTES = 1 << 24  # of samples that one gather copies for the next steps
Batch = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class TorchSamples:
    """`x` [n, ...], channels last in memory where `turned`, and `y` [n] int64 labels or [n, ...] targets."""

    x: Tensor
    y: Tensor
    turned: bool

    def slices(self, width: int, grain: int) -> Iterator[Tensor]:
        """All of x in its order, `width` samples at a time; zeros fill the last ones up to a multiple of `grain`."""
        for x in torch.split(self.x, width):
            missing = -len(x) % grain
            yield self._seen(torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x)

    def batches(self, indices: Sequence[I64], weights: F64) -> Iterator[Batch]:
        """x, y and the samples' weights [n] over the batch's size; one gather serves several batches."""
        widest = max(map(len, indices), default=1)
        at_once = max(1, MAX_GATHERED_BYTES // max(1, self.x[:1].nbytes * widest))
        for first in range(0, len(indices), at_once):
            some = indices[first : first + at_once]
            index, sizes = np.concatenate(some), list(map(len, some))
            q = as_tensor(weights[index] / np.repeat(sizes, sizes)).to(self.x.dtype)
            picked = as_tensor(index)
            xs, ys, qs = (
                torch.split(t, sizes) for t in (self.x.index_select(0, picked), self.y.index_select(0, picked), q)
            )
            yield from zip(map(self._seen, xs), ys, qs, strict=True)

    def _seen(self, x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2) if self.turned else x

    @property
    def nbytes(self) -> int:
        return self.x.nbytes + self.y.nbytes


class SampleCache:
    """Data sets in `dtype`; beyond `limit` bytes the least recently used are dropped."""

    def __init__(self, dtype: str, *, turned: bool, limit: int = MAX_CACHE_BYTES) -> None:
        self._dtype, self._turned, self._limit = dtype, turned, limit
        self._kept: OrderedDict[int, tuple[weakref.ref[Dataset], TorchSamples]] = OrderedDict()
        self._bytes = 0

    def tensors_of(self, data: Dataset) -> TorchSamples:
        """The tensors of `data`, converted once while cached. The arrays of `data` must not change."""
        key = id(data)
        if key not in self._kept:
            held = self._converted(data)
            self._kept[key] = weakref.ref(data, lambda _: self._forget(key)), held
            self._bytes += held.nbytes
        self._kept.move_to_end(key)
        while self._bytes > self._limit and len(self._kept) > 1:
            self._forget(next(iter(self._kept)))
        return self._kept[key][1]

    def _forget(self, key: int) -> None:
        _, held = self._kept.pop(key)
        self._bytes -= held.nbytes

    def _converted(self, data: Dataset) -> TorchSamples:
        labels = np.issubdtype(data.y.dtype, np.integer)
        x = as_tensor(data.x.astype(self._dtype, copy=False))
        x = x.permute(0, 2, 3, 1).contiguous() if self._turned else x
        y = as_tensor(data.y.astype(np.int64 if labels else self._dtype, copy=False))
        return TorchSamples(x=x, y=y, turned=self._turned)
