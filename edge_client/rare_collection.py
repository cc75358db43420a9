"""A context in which the garbage collector seldom runs, for work whose objects stay: large imports, and conversions."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARE = (200_000, 50, 100)


@contextmanager
def rare_collection() -> Iterator[None]:
    """Importing torch and tracing make millions of small objects that live on.

    Looking for cycles in them is a tenth of the time. Within another such context, of any thread, nothing changes.
    """
    before = gc.get_threshold()
    if before == RARE:
        yield
        return
    gc.set_threshold(*RARE)
    try:
        yield
    finally:
        gc.set_threshold(*before)
