"""One row per architecture: the library, a name, how to make it, and the shape of one sample.

Makers import their library themselves, so that a missing one costs its own rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class ZooRow:
    """`make` gives a module from samples of `input` to one row of outputs per sample."""

    library: str
    name: str
    make: Callable[[], nn.Module]
    input: tuple[int, ...]


def rows() -> list[ZooRow]:
    """Every row, library by library."""
    from tests.zoo import graphs, tables, texts, visions, waves

    return [row for part in (texts, visions, tables, waves, graphs) for row in part.rows()]


def table(library: str, shape: tuple[int, ...], makers: Mapping[str, Callable[[], nn.Module]]) -> list[ZooRow]:
    """Rows of one library that take samples of one shape."""
    return [ZooRow(library=library, name=name, make=make, input=shape) for name, make in makers.items()]


def without_torchvisions_own_operators() -> None:
    """torchvision's classifiers are plain torch; its wheel from PyPI does not load beside torch's CPU build."""
    known = torch.library.register_fake

    def register(name: Any, *rest: Any, **named: Any) -> Any:  # noqa: ANN401 - torch's own
        if isinstance(name, str) and name.startswith("torchvision::"):
            return lambda function: function
        return known(name, *rest, **named)

    torch.library.register_fake = register
