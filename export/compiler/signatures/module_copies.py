"""Copies of a user's module whose own functions belong to the copy.

`copy.deepcopy` leaves functions as they are: a hook, or a lambda in an attribute, that names `self` would go on to call
the layers of the original, whose weights no step moves. Here each such function is made again, with the copy in the
place of what it holds of the original: in its closure and in the defaults of its arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from types import CellType, FunctionType
from typing import Any

from torch import nn


def copied(module: nn.Module, memo: Mapping[int, Any] | None = None) -> nn.Module:
    """A copy of the module. `memo`: id of an object -> what stands for it in the copy, as `copy.deepcopy` takes it."""
    known = dict(memo or {})
    mine = copy.deepcopy(module, known)
    _Functions(known).replace_in(vars(mine))
    return mine


class _Functions:
    """Functions of a module -> those of its copy. `copies`: id of a part of the module -> its copy."""

    def __init__(self, copies: Mapping[int, Any]) -> None:
        self._copies = copies
        self._seen: dict[int, Any] = {}  # functions that are made again, and containers, which are changed in place

    def replace_in(self, held: dict[Any, Any] | list[Any]) -> None:
        """Of a dict's or a list's values, and of those of containers in it."""
        if id(held) in self._seen:
            return
        self._seen[id(held)] = held
        for place, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
            if (new := self._own(value)) is not value:
                held[place] = new

    def _own(self, value: Any) -> Any:  # noqa: ANN401 - anything that a module holds
        if isinstance(value, FunctionType):
            return self._again(value)
        if type(value) is partial:
            parts = self._own(value.func), self._own(value.args), {k: self._own(v) for k, v in value.keywords.items()}
            same = parts[0] is value.func and parts[1] is value.args and not _differ(parts[2], value.keywords)
            return value if same else partial(parts[0], *parts[1], **parts[2])
        if type(value) is tuple:
            new = tuple(map(self._own, value))
            return new if any(a is not b for a, b in zip(new, value, strict=True)) else value
        if isinstance(value, dict | list | nn.Module):
            self.replace_in(vars(value) if isinstance(value, nn.Module) else value)
        return value

    def _held(self, value: Any) -> Any:  # noqa: ANN401
        """What a function holds: a part of the module becomes that of the copy."""
        return self._copies.get(id(value)) if id(value) in self._copies else self._own(value)

    def _again(self, function: FunctionType) -> FunctionType:
        if id(function) in self._seen:
            return self._seen[id(function)]  # type: ignore[no-any-return]
        cells = tuple(CellType() for _ in function.__closure__ or ())
        new = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells or None)
        self._seen[id(function)] = new
        before = [cell_contents(cell) for cell in function.__closure__ or ()]
        after = [(self._held(content[0]),) if content else () for content in before]
        defaults = tuple(map(self._held, function.__defaults__ or ())) or None
        named = {k: self._held(v) for k, v in (function.__kwdefaults__ or {}).items()} or None
        moved = any(a and a[0] is not b[0] and a[0] is not new for a, b in zip(after, before, strict=True))
        if not (moved or _differ(defaults, function.__defaults__) or _differ(named, function.__kwdefaults__)):
            self._seen[id(function)] = function
            return function
        for cell, content in zip(cells, after, strict=True):
            if content:
                cell.cell_contents = content[0]
        new.__defaults__, new.__kwdefaults__ = defaults, named
        new.__qualname__, new.__module__, new.__doc__ = function.__qualname__, function.__module__, function.__doc__
        new.__annotations__ = function.__annotations__
        vars(new).update(vars(function))
        return new


def cell_contents(cell: CellType) -> tuple[Any, ...]:
    """Of one cell; nothing where its variable has no value yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _differ(new: Any, old: Any) -> bool:  # noqa: ANN401 - defaults, or None
    new, old = ([*v.values()] if isinstance(v, dict) else [*(v or ())] for v in (new, old))
    return any(a is not b for a, b in zip(new, old, strict=True))
