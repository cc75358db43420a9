"""Which operators are rewritten before a graph is exported: backward ones become forward ones that every runtime has.

A table for make_fx: operator -> Python function over tensors of any float dtype. Torch's own formulas where they stay
within export/operators.py, ours where they do not. Nothing here knows a model, a file or a runtime.
"""

# ruff: noqa: SLF001 - torch writes several public operators with a leading underscore

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions

from export.convolutions import convolution_backward
from export.norms import (
    batch_norm_backward,
    batch_norm_inference,
    batch_norm_training,
    group_norm,
    group_norm_backward,
    var_mean,
)
from export.pools import avg_pool2d_backward, max_pool2d_backward

aten = torch.ops.aten
Decomposition = Callable[..., Any]

# Torch's own formulas; core_aten_decompositions leaves these operators whole.
FROM_TORCH = (
    aten._log_softmax_backward_data,
    aten._softmax_backward_data,
    aten.elu_backward,
    aten.gelu_backward,
    aten.hardsigmoid_backward,
    aten.hardswish_backward,
    aten.hardtanh_backward,
    aten.leaky_relu_backward,
    aten.native_layer_norm,
    aten.native_layer_norm_backward,
    aten.sigmoid_backward,
    aten.silu_backward,
    aten.softplus_backward,
    aten.tanh_backward,
)


def zeros(size: Sequence[int], *_: object, dtype: torch.dtype | None = None, **__: object) -> Tensor:
    """Uninitialised memory means nothing in a graph."""
    return torch.zeros(list(size), dtype=dtype)


def threshold_backward(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    """A product, not torch's `where`: runtimes choose value by value far more slowly than they multiply."""
    return grad * (x > threshold).to(grad.dtype)


OURS: Mapping[Any, Decomposition] = {
    aten.convolution_backward.default: convolution_backward,
    aten.max_pool2d_with_indices_backward.default: max_pool2d_backward,
    aten.avg_pool2d_backward.default: avg_pool2d_backward,
    aten._native_batch_norm_legit_functional.default: batch_norm_training,
    aten._native_batch_norm_legit_no_training.default: batch_norm_inference,
    aten.native_batch_norm_backward.default: batch_norm_backward,
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
    aten.threshold_backward.default: threshold_backward,
    aten.var_mean.correction: var_mean,
    aten.empty.memory_format: zeros,
    aten.empty_permuted.default: zeros,
}


def table() -> Mapping[Any, Decomposition]:
    """Every rewriting, torch's and ours; ours win."""
    return {**core_aten_decompositions(), **get_decompositions(list(FROM_TORCH)), **OURS}
