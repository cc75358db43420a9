"""A torch module whose weights lie in one flat buffer, so that an update of all of them is one operator.

Parameters come first, then buffers, in the schema's order, each a view. Weights of two-dimensional convolutions may lie
channels-last within their slice; `load`, `to_flat_order` and `to_schema_order` convert between that and the schema's
own order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from edge_client.protocol.task import Array, Flat, Schema, TensorSpec
from export.compiler.program_functions import with_complex_attributes
from export.compiler.signatures.module_copies import copied


def as_tensor(array: Array) -> Tensor:
    """A tensor that shares the array's memory; a copy where the array is read-only or not contiguous."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


class FlatModel:
    """A private copy of `module`; tensors outside of the schema keep their values and places.

    `weights` is [schema.size] and `gradient` [schema.n_params]; `state` has a tensor for every parameter and buffer,
    views of `weights` where the schema names them, `gradients` a view for every parameter that the schema names.
    """

    def __init__(self, module: nn.Module, schema: Schema, *, channels_last: bool) -> None:
        self.module, self.schema = with_complex_attributes(copied(module)), schema
        self._members: dict[str, Tensor] = dict([*self.module.named_parameters(), *self.module.named_buffers()])
        turned = _convolutions(self.module) if channels_last else set()
        self._turned = [t for t in schema.tensors if id(self._members[t.name]) in turned]
        dtype = self._members[schema.tensors[0].name].dtype
        self.weights, self.gradient = torch.empty(schema.size, dtype=dtype), torch.zeros(schema.n_params, dtype=dtype)
        for t in schema.tensors:
            view = self._view(self.weights, t)
            view.copy_(self._members[t.name].detach())
            self._members[t.name].data = view
        self.state = {name: member.detach() for name, member in self._members.items()}
        self.gradients = {t.name: self._view(self.gradient, t) for t in schema.tensors if t.role == "p"}
        buffers = {id(self._members[t.name]) for t in schema.tensors if t.role == "b"}
        self._places = [
            (layer, name, held)
            for layer in self.module.modules()
            for name, held in layer.named_buffers(recurse=False, remove_duplicate=False)
            if id(held) in buffers
        ]

    def load(self, vector: Flat) -> None:
        """Copy weights and buffers [schema.size], in the schema's order, into the module."""
        given = as_tensor(vector)
        self.weights.copy_(given)
        self._turn(given, self.weights)

    def with_gradients(self) -> None:
        for name, view in self.gradients.items():
            self._members[name].grad = view

    def restore_buffers(self) -> None:
        """Copy tensors that a forward put in the place of buffers into these buffers."""
        for layer, name, mine in self._places:
            held = layer._buffers[name]  # noqa: SLF001 - setattr costs a hundred times as much
            if held is not mine and held is not None:
                mine.copy_(held.detach())
                layer._buffers[name] = mine  # noqa: SLF001

    def to_flat_order(self, vector: Flat) -> Tensor:
        """[schema.size] in the schema's order -> a new tensor [schema.n_params] that lies like `gradient`."""
        given = as_tensor(vector)
        out = given[: self.schema.n_params].to(self.weights.dtype, copy=True)
        self._turn(given, out)
        return out

    def to_schema_order(self, flat: Tensor) -> Array:
        """`weights` or `gradient` as an array of the caller's own in the schema's order."""
        out = flat.clone()
        for t in self._turned:
            out[self.schema.slices[t.name]].view(t.shape).copy_(self._view(flat, t))
        return out.numpy()

    def _turn(self, given: Tensor, out: Tensor) -> None:
        for t in self._turned:
            self._view(out, t).copy_(given[self.schema.slices[t.name]].view(t.shape))

    def _view(self, flat: Tensor, tensor: TensorSpec) -> Tensor:
        part = flat[self.schema.slices[tensor.name]]
        if tensor not in self._turned:
            return part.view(tensor.shape)
        outs, ins, height, width = tensor.shape
        return part.view(outs, height, width, ins).permute(0, 3, 1, 2)


def _convolutions(module: nn.Module) -> set[int]:
    """The ids of the weights that are channels-last when the images are."""
    return {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Conv2d)}
