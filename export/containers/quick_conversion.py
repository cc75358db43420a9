"""A context in which torch's tracers and the converters take less time, with the same files."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch


@contextmanager
def quick_conversion() -> Iterator[None]:
    """With rare garbage collection, and one reading of torch's list of composite operators.

    Tracing allocates millions of small objects that live on; looking for cycles in them is a tenth of the time.
    torch reads the list again for each of its 34 namespaces and each of its tables of decompositions: a fifth of a
    second every time (torch 2.13).
    """
    from torch._export import utils

    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 100)
    try:
        with patch.object(utils, "_materialize_cpp_cia_ops", cache(utils._materialize_cpp_cia_ops)):  # noqa: SLF001 - torch has no setting
            yield
    finally:
        gc.set_threshold(*before)
