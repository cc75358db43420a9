"""Pickle recipes with a torch module by value.

By default multiprocessing moves tensors, the sender's own included, into shared memory segments, of which a machine has
few. And by default a class is pickled by its name: one that was written in a notebook has no module that a worker could
import, so cloudpickle sends the class itself.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import cloudpickle


def pickle_by_value(recipe: Any) -> tuple[Callable[[type, bytes], Any], tuple[type, bytes]]:  # noqa: ANN401 - any dataclass
    """The return value of `__reduce__` for a frozen dataclass."""
    return _made, (type(recipe), cloudpickle.dumps({f.name: getattr(recipe, f.name) for f in fields(recipe)}))


def _made(kind: type, data: bytes) -> Any:  # noqa: ANN401
    return kind(**pickle.loads(data))  # noqa: S301 - written by this run, see `pickle_by_value`
