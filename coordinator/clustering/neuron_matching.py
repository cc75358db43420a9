"""Matching of hidden units between two networks of one architecture: Hungarian matching, layer by layer from the input.

Two networks that differ by an order of hidden units compute the same function, but their mean does not (Wang 2020,
FedMA). A unit is compared by its incoming weights, its bias, and batch norm's weight and bias. Its outgoing weights
move with it; behind a flatten they move as blocks of height x width. Widths do not change.

The network is known by its schema only: tensor names and shapes, as nn.Sequential gives them. A branch or a residual is
invisible there, so other names are refused, and so is a norm without running statistics, whose groups are unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.clustering.label_matching import match_labels
from edge_client.errors import ConfigError
from edge_client.protocol.task import F64, I64, Array, Flat, Schema, TensorSpec

UNSUPPORTED_MODEL_HINT = (
    "matched averaging needs an nn.Sequential of linear, convolution and batch norm layers; use fesem for this model"
)
MATRIX_DIMENSIONS = 2  # dimensions from which on a tensor is a layer's weight: outputs, inputs, and the kernel's sides


@dataclass(frozen=True, kw_only=True)
class ChainLayer:
    """One layer of a chain by tensor names: its weight [out, in, ...], and what has one value per output [out].

    `compared` are parameters; `carried` are the buffers that go along. `block` is how many neighbouring inputs of this
    layer come from one output of the layer before.
    """

    weight: str
    compared: tuple[str, ...]
    carried: tuple[str, ...]
    width: int
    block: int = 1


def layer_chain(schema: Schema) -> tuple[ChainLayer, ...]:
    """The layers from input to output. Raises ConfigError for a model that is no plain chain."""
    modules: dict[str, list[TensorSpec]] = {}
    for tensor in schema.tensors:
        modules.setdefault(tensor.name.rpartition(".")[0], []).append(tensor)
    layers: list[ChainLayer] = []
    for name, tensors in modules.items():
        own = {t.name.rpartition(".")[2]: t for t in tensors}
        weight = own.get("weight")
        if weight is not None and len(weight.shape) >= MATRIX_DIMENSIONS and set(own) <= {"weight", "bias"}:
            layers.append(_layer(weight, [t for t in tensors if t is not weight], layers))
        elif layers and _is_batch_norm(own, layers[-1].width):
            layers[-1] = _with(layers[-1], tensors)
        else:
            raise ConfigError(
                f"layer {name!r} with {', '.join(own)} is no link of a plain chain", hint=UNSUPPORTED_MODEL_HINT
            )
    hidden = [name for name in modules if len(layers) > 1 and not name.replace(".", "").isdecimal()]
    if hidden:
        raise ConfigError(
            f"layer {hidden[0]!r} has a name of its own, so layers may branch", hint=UNSUPPORTED_MODEL_HINT
        )
    return tuple(layers)


def align_neurons(rows: Array, center: Flat, schema: Schema) -> Array:
    """[m, size] models -> the same models with the hidden units of each in the order of `center` [size]."""
    layers = layer_chain(schema)
    return np.stack([permute_units(row, schema, match_units(row, center, schema, layers), layers) for row in rows])


def match_units(row: Flat, center: Flat, schema: Schema, layers: Sequence[ChainLayer]) -> list[I64]:
    """For each hidden layer: unit j of the center is unit order[j] of the row. The output layer keeps its order."""
    mine, theirs = schema.split(row), schema.split(center)
    found: list[I64] = []
    for layer in layers[:-1]:
        weight = _take(mine[layer.weight], found[-1], layer.block) if found else mine[layer.weight]
        ours = _features(weight, [mine[name] for name in layer.compared])
        wanted = _features(theirs[layer.weight], [theirs[name] for name in layer.compared])
        found.append(match_labels(-(ours @ wanted.T)))  # squared lengths are the same in every matching
    return found


def permute_units(row: Flat, schema: Schema, found: Sequence[I64], layers: Sequence[ChainLayer]) -> Flat:
    """A model that computes the same function, whose unit j of hidden layer l is unit found[l][j] of `row`."""
    tensors = dict(schema.split(row))
    for number, layer in enumerate(layers):
        if number > 0:
            tensors[layer.weight] = _take(tensors[layer.weight], found[number - 1], layer.block)
        if number < len(found):
            for name in (layer.weight, *layer.compared, *layer.carried):
                tensors[name] = tensors[name][found[number]]
    return schema.join(tensors)


def _layer(weight: TensorSpec, rest: Sequence[TensorSpec], before: Sequence[ChainLayer]) -> ChainLayer:
    inputs = weight.shape[1]
    width = before[-1].width if before else inputs
    flattened = len(weight.shape) == MATRIX_DIMENSIONS
    if inputs % width or (inputs != width and not flattened):
        raise ConfigError(
            f"{weight.name} has {inputs} inputs, the layer before it {width} outputs", hint=UNSUPPORTED_MODEL_HINT
        )
    names = tuple(t.name for t in rest)
    return ChainLayer(weight=weight.name, compared=names, carried=(), width=weight.shape[0], block=inputs // width)


def _is_batch_norm(own: dict[str, TensorSpec], width: int) -> bool:
    return own.keys() >= {"weight", "running_mean"} and all(t.shape == (width,) for t in own.values())


def _with(layer: ChainLayer, norm: Sequence[TensorSpec]) -> ChainLayer:
    return ChainLayer(
        weight=layer.weight,
        compared=(*layer.compared, *(t.name for t in norm if t.role == "p")),
        carried=(*layer.carried, *(t.name for t in norm if t.role == "b")),
        width=layer.width,
        block=layer.block,
    )


def _take(weight: Array, order: I64, block: int) -> Array:
    """The weight [out, in, ...] with its inputs, in blocks, in this order."""
    out, inputs = weight.shape[:2]
    grouped = weight.reshape(out, inputs // block, block, *weight.shape[2:])[:, order]
    return grouped.reshape(weight.shape)


def _features(weight: Array, per_unit: Sequence[Array]) -> F64:
    """The features of each unit [out, in * kernel + ...]: its incoming weights and its values of `per_unit`."""
    flat = weight.reshape(len(weight), -1).astype(np.float64)
    return np.concatenate([flat, *(values.astype(np.float64)[:, None] for values in per_unit)], axis=1)
