"""Copies of a user's module whose own functions belong to the copy.

`copy.deepcopy` leaves functions as they are: a hook, or a lambda in an attribute, that names `self` would go on to call
the layers of the original, whose weights no step moves. Here each such function is made again, with the copy in the
place of what it holds of the original: in its closure, in the defaults of its arguments, and in the global variables
that it names. The original, and what is part of neither, stay as they are.

A function that no list below leads to (of a set, of functools.lru_cache) still calls the original;
lasting_state.refuse_unmoved refuses a pass that computes with its parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakMethod, ref

from torch import Tensor, nn

from edge_client.errors import ProgramRefused
from export.diagnostics import first_sentence, raise_for_machine
from export.own_thread import replaced_here

LEADING = (FunctionType, MethodType, partial, ref, tuple, list, dict)  # what may lead to a part of a module

TORCHS_COPY = Tensor.__deepcopy__
PLAIN = frozenset({int, float, bool, str, bytes, type(None)})  # of which a module may hold millions


def copied(module: nn.Module) -> nn.Module:
    """A copy of the module; `_tensor_copied` says what stands for computed tensors. Raises ProgramRefused."""
    known = dict[int, Any]()
    try:
        with replaced_here(Tensor, "__deepcopy__", _tensor_copied):
            mine = copy.deepcopy(module, known)
    except Exception as wrong:
        raise_for_machine(wrong)
        raise ProgramRefused(
            f"model {type(module).__name__!r} cannot be copied: {first_sentence(wrong)}",
            hint="keep locks, generators, open files and connections outside of the module",
        ) from wrong
    _alive = known.pop(id(known), None)  # what deepcopy took for a moment from the original, whose ids are in `known`
    functions = _Functions(known)
    for made in known.values():
        functions.replace_in(made)
    return mine


def _tensor_copied(value: Tensor, memo: dict[int, Any]) -> Tensor:
    """As torch's own, which refuses what was computed, as features in a list or `weight` of a weight norm.

    For these it is a parameter that has no place: refuse_unmoved refuses a pass that reads one before it is computed
    again, as a view of a parameter in a list.
    """
    if value.is_leaf:
        return TORCHS_COPY(value, memo)  # type: ignore[no-any-return,no-untyped-call]  # torch's own
    return memo.setdefault(id(value), nn.Parameter(value.detach().clone()))  # type: ignore[no-any-return]


class _Functions:
    """What leads to a part of a module -> what leads to its copy. `copies`: id of a part of the module -> its copy."""

    def __init__(self, copies: Mapping[int, Any]) -> None:
        self._copies, self._mine = copies, {id(made) for made in copies.values()}
        self._made: dict[int, tuple[Any, Any]] = {}  # with what it was made from, whose id no other may get

    def replace_in(self, made: Any) -> None:  # noqa: ANN401 - anything that a module holds
        """In a list or dict its values, in another object its attributes."""
        held = made if isinstance(made, list | dict) else getattr(made, "__dict__", {})
        for place, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
            if type(value) not in PLAIN and (new := self._own(value)) is not value:
                held[place] = new

    def _own(self, value: Any) -> Any:  # noqa: ANN401 - as above
        """What stands for a value in the copy: the value itself where it leads to no part of the module."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        if not isinstance(value, LEADING) or not self._leads(value):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = value, self._again(value)
        return self._made[id(value)][1]

    def _leads(self, value: Any) -> bool:  # noqa: ANN401
        todo, seen = [value], dict[int, Any]()
        while todo:
            one = todo.pop()
            if id(one) in self._copies:
                return True
            if id(one) not in seen and isinstance(one, LEADING):
                seen[id(one)] = one
                todo += self._held(one)
        return False

    def _held(self, value: Any) -> list[Any]:  # noqa: ANN401
        match value:
            case FunctionType():
                cells = [content for cell in value.__closure__ or () for content in cell_contents(cell)]
                named = (value.__kwdefaults__ or {}, vars(value), self._globals(value))
                return [*cells, *(value.__defaults__ or ()), *(v for values in named for v in values.values())]
            case MethodType():
                return [value.__func__, value.__self__]
            case partial():
                return [value.func, *value.args, *value.keywords.values()]
            case ref():
                return [value()] if type(value) in (ref, WeakMethod) else []
            case _ if id(value) in self._mine and not isinstance(value, tuple):
                return []  # `replace_in` has them
        return list(value.values() if isinstance(value, dict) else value)

    def _globals(self, function: FunctionType) -> dict[str, Any]:
        """The global variables that a function names, of those that are parts of the module."""
        known = function.__globals__
        return {n: known[n] for n in _names(function.__code__) if n in known and id(known[n]) in self._copies}

    def _again(self, value: Any) -> Any:  # noqa: ANN401
        own = self._own
        match value:
            case FunctionType():
                return self._function(value)
            case MethodType():
                return MethodType(own(value.__func__), own(value.__self__))
            case partial():
                return partial(own(value.func), *map(own, value.args), **{k: own(v) for k, v in value.keywords.items()})
            case ref():
                return type(value)(own(value()))
            case tuple():
                new = map(own, value)
                return type(value)(*new) if hasattr(value, "_fields") else tuple(new)
        made = copy.copy(value)  # a list or dict that belongs to a function
        self._made[id(value)] = value, made
        self.replace_in(made)
        return made

    def _function(self, function: FunctionType) -> FunctionType:
        """Its variables that lead to no part of the module stay shared with other functions."""
        cells = tuple(map(self._cell, function.__closure__ or ())) or None
        known = function.__globals__
        if replaced := {name: self._own(value) for name, value in self._globals(function).items()}:
            known = _Globals(known, replaced)
        new = FunctionType(function.__code__, known, function.__name__, None, cells)
        self._made[id(function)] = function, new
        for cell, before in zip(cells or (), function.__closure__ or (), strict=True):
            if cell is not before and not cell_contents(cell):
                (content,) = cell_contents(before)
                cell.cell_contents = self._own(content)
        new.__defaults__ = tuple(map(self._own, function.__defaults__ or ())) or None
        new.__kwdefaults__ = {k: self._own(v) for k, v in (function.__kwdefaults__ or {}).items()}
        new.__qualname__, new.__module__, new.__doc__ = function.__qualname__, function.__module__, function.__doc__
        new.__annotations__ = function.__annotations__
        vars(new).update({name: self._own(value) for name, value in vars(function).items()})
        return new

    def _cell(self, cell: CellType) -> CellType:
        """An empty one for each whose content is another in the copy."""
        if id(cell) not in self._made:
            self._made[id(cell)] = cell, CellType() if any(map(self._leads, cell_contents(cell))) else cell
        return self._made[id(cell)][1]  # type: ignore[no-any-return]


class _Globals(dict[str, Any]):
    """Global variables of which some are replaced; the others are read where they are."""

    def __init__(self, known: dict[str, Any], replaced: Mapping[str, Any]) -> None:
        super().__init__({name: value for name, value in known.items() if name.startswith("__")} | dict(replaced))
        self._known = known

    def __contains__(self, name: object) -> bool:  # for cloudpickle
        return super().__contains__(name) or name in self._known

    def __missing__(self, name: str) -> Any:  # noqa: ANN401 - any variable
        return self._known[name]


def _names(code: CodeType) -> Iterator[str]:
    """The global variables and attributes that it names, and those of functions in it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def cell_contents(cell: CellType) -> tuple[Any, ...]:
    """Of one cell; nothing where its variable has no value yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()
