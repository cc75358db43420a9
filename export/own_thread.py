"""A function of torch replaced for one thread: another one, which trains meanwhile, has torch's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def replaced_here(owner: object, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """`owner.name` is the replacement for this thread.

    One thread at a time may replace a name: the lock of `tracing_context` is held, or there is one thread.
    """
    own, here = getattr(owner, name), threading.get_ident()

    def chosen(*args: Any, **named: Any) -> Any:  # noqa: ANN401 - whatever the function takes and gives
        return (replacement if threading.get_ident() == here else own)(*args, **named)

    with patch.object(owner, name, chosen):
        yield
