"""A cache of data sets on the device, in the program's dtype, since a fleet trains on the same samples each round.

A data set is moved once, as a whole; beyond the limit the least recently used is dropped.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from edge_client.data.dataset import Dataset
from edge_client.engines.targets import port_targets
from edge_client.protocol.task import I64
from emulator.engines.gpu.objective import Objective

MAX_CPU_BYTES = 1 << 29  # bytes
MAX_CUDA_SHARE = 0.25  # of the device's memory
Pair = tuple[Tensor, Tensor]


class DeviceDataCache:
    """`tensors_of` gives x [n, *input] and y [n, *target], one-hot for labels.

    The arrays of a data set must not change.
    """

    def __init__(self, objective: Objective, *, limit: int | None = None) -> None:
        self._objective = objective
        self._limit = _limit(objective.device) if limit is None else limit
        self._kept: OrderedDict[int, tuple[weakref.ref[Dataset], Pair]] = OrderedDict()
        self._dead: list[tuple[int, weakref.ref[Dataset]]] = []
        self.nbytes = 0

    @property
    def free_bytes(self) -> int:
        return max(0, self._limit - self.nbytes)

    def tensors_of(self, data: Dataset) -> Pair:
        """The tensors of a data set, the same ones while cached."""
        self._forget_the_dead()
        key = id(data)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][1]
        pair = self._moved(data)
        self._kept[key] = weakref.ref(data, lambda gone: self._dead.append((key, gone))), pair
        self.nbytes += _nbytes(pair)
        while self.nbytes > self._limit and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))
        return pair

    def gather(self, parts: Sequence[tuple[Dataset, I64]]) -> Pair:
        """The samples at these indices of several data sets, one after the other."""
        index = torch.cat([torch.from_numpy(rows) for _, rows in parts]).to(self._objective.device)
        xs, ys = [], []
        for (data, _), rows in zip(parts, torch.split(index, [len(rows) for _, rows in parts]), strict=True):
            x, y = self.tensors_of(data)
            xs.append(x.index_select(0, rows))
            ys.append(y.index_select(0, rows))
        return torch.cat(xs), torch.cat(ys)

    def clear(self) -> None:
        """Drop every data set; each is moved again when it is used."""
        for key in list(self._kept):
            self._drop(key)

    def _moved(self, data: Dataset) -> Pair:
        pair = self._objective.tensor(data.x), self._objective.tensor(port_targets(self._objective.program, data.y))
        self._wait()  # other streams will read it
        return pair

    def _forget_the_dead(self) -> None:
        """Drop data sets that no other object refers to; a new data set may get their identity."""
        while self._dead:
            key, gone = self._dead.pop()
            if key in self._kept and self._kept[key][0] is gone:
                self._drop(key)

    def _drop(self, key: int) -> None:
        self._wait()  # another stream may still read the memory that is freed here
        self.nbytes -= _nbytes(self._kept.pop(key)[1])

    def _wait(self) -> None:
        if self._objective.device.type == "cuda":
            torch.cuda.synchronize(self._objective.device)


def _nbytes(pair: Pair) -> int:
    return sum(part.nbytes for part in pair)


def _limit(device: torch.device) -> int:
    if device.type != "cuda":
        return MAX_CPU_BYTES
    return int(MAX_CUDA_SHARE * torch.cuda.mem_get_info(device)[1])
