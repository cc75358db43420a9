"""A center's TFLite file with the weights of another one: milliseconds, where a conversion takes seconds.

A converter writes a weight as it is, with its axes in another order, or computes constants from it. A file can be
refilled where each weight is in it as it is, and no constant of many numbers may come from one. Such a file has the
bytes that a conversion of the other center gives, unless that finds numbers to simplify by, as a bias of zeros. A
single number or a mask that comes from a weight looks like any other: compare the file with the other center.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np

from edge_client.protocol.task import Array

MAX_AXES = 5  # of a weight; they have 120 orders
FIRST = 64  # values that are compared before all of them
LARGE = 1e4  # a mask's numbers are larger, or 0 and 1
Place = tuple[int, tuple[int, ...]]  # which weight, and the order of its axes that are longer than 1


@dataclass(frozen=True, kw_only=True)
class RefillableFile:
    """A file, and where its weights are: buffer -> place."""

    file: bytes = field(repr=False)
    places: dict[int, Place]

    def refilled(self, weights: Sequence[Array]) -> bytes:
        """The file with other weights, float32 in the order and the shapes of those that `refillable` was given."""
        data = bytearray(self.file)
        held = _constants(data)
        for number, (which, order) in self.places.items():
            held[number][:] = np.transpose(weights[which].squeeze(), order).reshape(-1)
        return bytes(data)


def refillable(file: bytes, weights: Sequence[Array]) -> RefillableFile | None:
    """The file of a center with these weights, ready for those of others; None where that is not certain.

    So it is where a weight is not in the file as it is, where two are alike, or where one may be taken for a constant:
    it has one value throughout, as a bias that never trained.
    """
    vary = all((w != w.reshape(-1)[:1]).any() for w in weights)
    if not vary or any(w.dtype != np.float32 or w.squeeze().ndim > MAX_AXES for w in weights):
        return None
    bits = [int(w.view(np.uint32).sum(dtype=np.uint64)) for w in weights]  # the same in any order
    places = dict[int, Place]()
    for number, held in _constants(bytearray(file)).items():
        same = int(held.view(np.uint32).sum(dtype=np.uint64))
        alike = [which for which, w in enumerate(weights) if w.size == held.size and bits[which] == same]
        found = [(which, order) for which in alike for order in _orders(weights[which].squeeze(), held)]
        if len(found) > 1 or not (found or _is_plain(held)):
            return None
        places.update((number, place) for place in found)
    missing = set(range(len(weights))) - {which for which, _ in places.values()}
    return None if missing else RefillableFile(file=file, places=places)


def _orders(weight: Array, held: Array) -> Iterator[tuple[int, ...]]:
    """The orders of axes in which a weight has the values that are held."""
    for order in permutations(range(weight.ndim)):
        turned = np.transpose(weight, order)
        if np.array_equal(turned.flat[:FIRST], held[:FIRST]) and np.array_equal(turned.reshape(-1), held):
            yield order


def _is_plain(held: Array) -> bool:
    """Whether a constant is one number, or those of a mask: nothing that comes from the values of a weight."""
    size = np.abs(held)
    return bool((held == held[:1]).all() or ((size == 0) | (size == 1) | (size >= LARGE)).all())


def _constants(data: bytearray) -> dict[int, Any]:
    """The float32 values of each buffer that has some, as views of `data`, by the buffer's number."""
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAs(data)
    graphs = [model.Subgraphs(i) for i in range(model.SubgraphsLength())]
    tensors = [graph.Tensors(i) for graph in graphs for i in range(graph.TensorsLength())]
    numbers = {tensor.Buffer() for tensor in tensors if tensor.Type() == schema.TensorType.FLOAT32}
    held = {number: model.Buffers(number).DataAsNumpy() for number in sorted(numbers)}
    return {number: data.view(np.float32) for number, data in held.items() if isinstance(data, np.ndarray)}
