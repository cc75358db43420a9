"""A context in which torch's tracers and the converters take less time, with the same files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

from edge_client.rare_collection import rare_collection


@contextmanager
def quick_conversion() -> Iterator[None]:
    """With rare garbage collection, and one reading of torch's list of composite operators.

    torch reads the list again for each of its 34 namespaces and each of its tables of decompositions: a fifth of a
    second every time (torch 2.13).
    """
    with rare_collection():
        from torch._export import utils

        once = cache(utils._materialize_cpp_cia_ops)  # noqa: SLF001 - torch has no setting
        with patch.object(utils, "_materialize_cpp_cia_ops", once):
            yield
