"""What belongs to one thread of those that use torch: functions that it replaces, random numbers, inference mode."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

from edge_client.rare_collection import rare_collection

Function = Callable[..., Any]
Kind = TypeVar("Kind", bound=Function)

ONE_AT_A_TIME = threading.RLock()  # over what is the whole process's in torch: its switches and its random numbers
_CHANGES = threading.Lock()  # over what is below


class _Replacements(threading.local):
    """Those of this thread that are in force; the innermost is the last one."""

    def __init__(self) -> None:
        self.held: dict[object, Function] = {}


class _ReplacedName:
    """A name that some threads have replaced, until the last of them puts it back; others call what was there."""

    def __init__(self, owner: object, name: str) -> None:
        own, here = getattr(owner, name), _Replacements()
        self.here, self.users = here, 0

        def chosen(*args: Any, **named: Any) -> Any:  # noqa: ANN401 - whatever the function takes and gives
            return next(reversed(here.held.values()), own)(*args, **named)

        self.patch: AbstractContextManager[Any] = patch.object(owner, name, chosen)


_REPLACED: dict[tuple[object, str], _ReplacedName] = {}


@contextmanager
def replaced_here(owner: object, name: str, replacement: Function) -> Iterator[None]:
    """`owner.name` is the replacement for this thread; the replacement itself must not call it by this name.

    Several threads may replace one name at once, and begin and end in any order.
    """
    key, mine = (owner, name), object()
    with _CHANGES:
        if key not in _REPLACED:
            _REPLACED[key] = _ReplacedName(owner, name)
            _REPLACED[key].patch.__enter__()
        replaced = _REPLACED[key]
        replaced.users += 1
    held = replaced.here.held  # this thread's: the number of a thread that died may be a later one's
    held[mine] = replacement
    try:
        yield
    finally:
        del held[mine]
        with _CHANGES:
            replaced.users -= 1
            if not replaced.users:
                _REPLACED.pop(key).patch.__exit__(None, None, None)


@contextmanager
def own_random(seed: int | None = None) -> Iterator[None]:
    """Torch's random numbers as if no other thread of ours drew some: they begin at `seed`, and then go on as before.

    torch has one generator for all threads. Of two that set it at once, each would draw from the other's seed.
    """
    with rare_collection():
        import torch

    with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def outside_inference_mode(function: Kind) -> Kind:
    """The function, or generator function, for a caller in torch's inference mode, whose tensors cannot be trained."""
    with rare_collection():
        import torch

    return torch.inference_mode(mode=False)(function) if torch.is_inference_mode_enabled() else function
