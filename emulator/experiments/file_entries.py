"""Tables of a TOML file as dataclasses: a key is a field, and its value has the field's kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from export.plugins import nearest_name_hint

T = TypeVar("T")


def _list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(one, kind) for one in value)


KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {  # a field's annotation -> what fits, and what to write
    "str": (lambda value: isinstance(value, str), "a text"),
    "int": (lambda value: type(value) is int, "a whole number"),
    "Mapping[str, Any]": (lambda value: isinstance(value, dict), "a table, { ... }"),
    "tuple[str, ...]": (_list_of(str), "a list of texts"),
    "tuple[Mapping[str, Any], ...]": (_list_of(dict), "tables, [[ ... ]]"),
}


def read_entry(kind: type[T], table: Mapping[str, Any], where: str = "") -> T:
    """A dataclass from a table with its fields in kebab-case.

    Raises ValueError, with `where` before it, for a key that is unknown or missing, and a value of another kind.
    """
    known = {field.name.replace("_", "-"): field for field in fields(kind)}  # type: ignore[arg-type]
    for key, value in table.items():
        if key not in known:
            raise ValueError(f"{where}unknown key {key!r}: {nearest_name_hint(key, known)}")
        fits, what = KINDS[str(known[key].type)]
        if not fits(value):
            raise ValueError(f"{where}{key} is {value!r}: write {what}")
    for key, field in known.items():
        if key not in table and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where}{key!r} is missing")
    return kind(**{known[key].name: tuple(value) if isinstance(value, list) else value for key, value in table.items()})
