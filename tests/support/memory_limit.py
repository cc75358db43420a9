"""How much memory a refusal may cost."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from edge_client.errors import Malformed


def refused_within(limit_bytes: int, attempt: Callable[[], object]) -> str:
    """The code of the refusal; fails if `attempt` succeeds or allocates more than `limit_bytes` at its peak."""
    tracemalloc.start()
    try:
        with pytest.raises(Malformed) as refused:
            attempt()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < limit_bytes
    return refused.value.code
