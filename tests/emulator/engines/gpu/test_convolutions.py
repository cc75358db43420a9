"""Convolutions by products are torch's, with their gradients, alone and for stacked clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F  # noqa: N812 - torch's custom

from emulator.engines.gpu.convolutions import ProductConvolutions

CASES: list[dict[str, Any]] = [
    {},
    {"padding": 2},
    {"stride": 2, "padding": 1},
    {"stride": (1, 3), "padding": (0, 2)},
    {"dilation": 2},  # what follows is left to torch
    {"padding": "same"},
    {"groups": 2},
]


def parts(settings: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Of three clients: samples, weights, biases."""
    torch.manual_seed(0)
    x = torch.randn(3, 5, 2, 9, 8, dtype=torch.float64)
    weight = torch.randn(3, 4, 2 // settings.get("groups", 1), 3, 2, dtype=torch.float64)
    return x, weight, torch.randn(3, 4, dtype=torch.float64)


def squared(settings: dict[str, Any], *, bias: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda x, w, b: F.conv2d(x, w, b if bias else None, **settings).sin().sum()


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("settings", CASES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_stacked_clients_are_torchs(settings: dict[str, Any], *, bias: bool) -> None:
    each = vmap(grad(squared(settings, bias=bias), argnums=(0, 1, 2)))
    expected = each(*parts(settings))
    with ProductConvolutions():
        found = each(*parts(settings))
    for ours, torchs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-12)


def test_samples_without_a_batch_are_left_to_torch() -> None:
    x, weight, bias = (part[0] for part in parts({}))
    with ProductConvolutions():
        torch.testing.assert_close(F.conv2d(x[0], weight, bias), F.conv2d(x, weight, bias)[0], rtol=1e-12, atol=1e-12)


def test_gradients_of_gradients_are_torchs() -> None:
    x, weight, bias = (part[0] for part in parts({}))

    def length(w: Tensor) -> Tensor:
        found: Tensor = grad(squared({"padding": 1}, bias=True), argnums=0)(x, w, bias)
        return found.square().sum()

    expected = grad(length)(weight)
    with ProductConvolutions():
        torch.testing.assert_close(grad(length)(weight), expected, rtol=1e-10, atol=1e-10)
