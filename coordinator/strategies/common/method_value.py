"""Methods as values: a short repr that can be typed again, and an error for a wrong setting that says what to write."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import Signature, get_annotations, ismemberdescriptor, signature
from typing import TYPE_CHECKING, Any

from coordinator.strategies.common.setting_checks import check_kind, plain_number, setting_rows
from edge_client.errors import ConfigError
from export.plugins import nearest_name_hint

DECORATOR = "@dataclass(frozen=True, kw_only=True, repr=False)"


class _PlainNumbers(ABCMeta):  # so that a class of the user may be an ABC too
    """Makes numbers of numpy those of Python: tasks and files of settings take no others."""

    if not TYPE_CHECKING:  # a type checker knows each class by its own arguments

        def __call__(cls, *args: object, **given: object) -> Any:  # noqa: ANN401 - an object of the class
            return super().__call__(*map(plain_number, args), **{name: plain_number(v) for name, v in given.items()})

    @property
    def __signature__(cls) -> Signature:
        """The class's own arguments, which `help` and completion show."""
        own = signature(cls.__init__)  # type: ignore[misc]
        return own.replace(parameters=list(own.parameters.values())[1:])


class MethodValue(metaclass=_PlainNumbers):
    """Base of the frozen dataclasses of settings.

    >>> from coordinator.strategies.fesem import FeSEM
    >>> FeSEM(4, learning_rate=0.05)
    FeSEM(4, learning_rate=0.05)
    """

    def __new__(cls, *args: object, **given: object) -> Any:  # noqa: ANN401 - the class itself, which mypy knows
        """Refuse unknown settings with the nearest one. Raises TypeError, as Python does for a wrong argument.

        Raises ConfigError for a value of another kind than the setting's, and for what `_check_body` refuses.
        """
        known, forgotten = _fields(cls), forgotten_decorator(cls)
        first = [name for name, f in known.items() if f.init and not f.kw_only]
        if known and len(args) > len(first):
            example = next((name for name in known if name not in first), "setting")
            shown, hint = ", ".join(map(repr, args)), forgotten or f"write {example}=..."
            raise TypeError(f"{cls.__name__}({shown}) has a value without a name\n\nhint: {hint}")
        for name in given.keys() - known.keys():
            group = next((g for g, f in known.items() if name in _fields(f.default)), None)
            hint = f"write {group}=fc.ServerOptions({name}=...)" if group else nearest_name_hint(name, known)
            raise TypeError(f"{cls.__name__} has no setting {name!r}\n\nhint: {forgotten or hint}")
        for name, value in given.items():
            default = known[name].default
            if is_dataclass(default) and not isinstance(value, type(default)):
                settings = ", ".join(f"{k}={v!r}" for k, v in value.items()) if isinstance(value, Mapping) else "..."
                hint = f"write {name}=fc.{type(default).__name__}({settings})"
                raise TypeError(f"{name} of {cls.__name__} is {type(value).__name__}\n\nhint: {hint}")
        _check_body(cls, known)
        for name, value in [*zip(first, args, strict=False), *given.items()]:
            check_kind(name.replace("_", "-"), value, _kind(known[name]))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of its setting's limits."""
        for name, row in setting_rows(type(self)):
            row.check(name.replace("_", "-"), getattr(self, name))

    def __repr__(self) -> str:
        told = [(f, getattr(self, f.name)) for f in _fields(self).values() if f.repr]
        words = [repr(value) for f, value in told if not f.kw_only]
        words += [f"{f.name}={value!r}" for f, value in told if f.kw_only and _differs(value, f.default)]
        return f"{type(self).__name__}({', '.join(words)})"


def _check_body(cls: type, known: Mapping[str, Field[Any]]) -> None:
    """Raise ConfigError for a default in the body of a user's class that Python does not take for one."""
    for name, f in known.items():
        value = getattr(cls, name, f.default)
        if f.default is MISSING or value is f.default or ismemberdescriptor(value):  # NaN is not equal to itself
            continue
        if _differs(value, f.default):
            hint = f"write its type, {name}: {_kind(f)} = {value!r}, and {DECORATOR} above the class"
            raise ConfigError(f"{name} = {value!r} in {cls.__name__} has no effect: {f.default!r} stays", hint=hint)


def forgotten_decorator(cls: type) -> str:
    """What to write above a class of the user that has fields or an `__init__` and is no dataclass of its own."""
    if "__dataclass_fields__" in vars(cls) or not (get_annotations(cls) or "__init__" in vars(cls)):
        return ""
    return f"write {DECORATOR} above class {cls.__name__}: its fields are its settings"


def _fields(value: object) -> Mapping[str, Field[Any]]:
    """The fields of a dataclass by name; none for another object, as for a default that is missing."""
    return {f.name: f for f in fields(value)} if is_dataclass(value) else {}


def _kind(row: Field[Any]) -> str:
    """The type of a field, as it is written."""
    return row.type.__name__ if isinstance(row.type, type) else str(row.type)


def _differs(value: object, default: object) -> bool:
    """Whether a value is another than the default; an array, whose comparison is an array, counts as another."""
    try:
        return bool(value != default)
    except (ValueError, RuntimeError):  # of numpy, of torch
        return True
