"""A function of torch replaced for one thread: another one, which trains meanwhile, has torch's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

Function = Callable[..., Any]

_CHANGES = threading.Lock()  # over what is below


class _ReplacedName:
    """A name that some threads have replaced, until the last of them puts it back; others call what was there."""

    def __init__(self, owner: object, name: str) -> None:
        own = getattr(owner, name)
        self.by_thread: dict[int, list[Function]] = {}  # the innermost replacement is the last one

        def chosen(*args: Any, **named: Any) -> Any:  # noqa: ANN401 - whatever the function takes and gives
            mine = self.by_thread.get(threading.get_ident())
            return (mine[-1] if mine else own)(*args, **named)

        self.patch: AbstractContextManager[Any] = patch.object(owner, name, chosen)


_REPLACED: dict[tuple[object, str], _ReplacedName] = {}


@contextmanager
def replaced_here(owner: object, name: str, replacement: Function) -> Iterator[None]:
    """`owner.name` is the replacement for this thread; the replacement itself must not call it by this name.

    Several threads may replace one name at once, and begin and end in any order.
    """
    key, here = (owner, name), threading.get_ident()
    with _CHANGES:
        if key not in _REPLACED:
            _REPLACED[key] = _ReplacedName(owner, name)
            _REPLACED[key].patch.__enter__()
        threads = _REPLACED[key].by_thread
        threads.setdefault(here, []).append(replacement)
    try:
        yield
    finally:
        with _CHANGES:
            threads[here].pop()
            if not threads[here]:
                del threads[here]
            if not threads:
                _REPLACED.pop(key).patch.__exit__(None, None, None)
