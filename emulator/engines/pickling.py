"""Pickle recipes with a torch module by value.

By default multiprocessing moves tensors, the sender's own included, into shared memory segments, of which a machine has
few.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields
from typing import Any


def pickle_by_value(recipe: Any) -> tuple[Callable[[type, bytes], Any], tuple[type, bytes]]:  # noqa: ANN401 - any dataclass
    """The return value of `__reduce__` for a frozen dataclass."""
    return _made, (type(recipe), pickle.dumps({f.name: getattr(recipe, f.name) for f in fields(recipe)}))


def _made(kind: type, data: bytes) -> Any:  # noqa: ANN401
    return kind(**pickle.loads(data))  # noqa: S301 - written by this run, see `pickle_by_value`
