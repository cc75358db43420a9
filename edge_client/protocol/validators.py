"""Checkers: small functions from which the tables of message_schemas.py are built.

A checker takes a value and the name to complain about, and gives the value back or raises Malformed("bad_field"). A
combinator (`list_of`, `record`, ...) makes one checker of others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from edge_client.errors import Malformed
from edge_client.protocol.blocks import MAX_INTEGER, Manifest, is_count

Check = Callable[[Any, str], Any]
FieldSpec = tuple[Check, bool]  # the checker, and whether the field is required
FieldTable = dict[str, FieldSpec]


def field_error(name: str, value: object, wanted: str) -> Malformed:
    """The complaint about one field."""
    return Malformed("bad_field", f"{name} is {value!r:.80}; expected {wanted}")


def checked(check: Callable[[Any], str]) -> Check:
    """What a check of the value alone, which raises Malformed by itself, gives back."""
    return lambda value, _name: check(value)


def integer(low: int, high: int = MAX_INTEGER) -> Check:
    """An int, not a bool, from `low` to `high`; by default to the largest that the protocol has."""

    def check(value: Any, name: str) -> int:  # noqa: ANN401
        if not is_count(value, low, high):
            raise field_error(name, value, f"an integer from {low} to {high}")
        return int(value)

    return check


def number(low: float = 0.0, high: float = math.inf) -> Check:
    """A finite number from `low` to `high`."""

    def check(value: Any, name: str) -> float:  # noqa: ANN401
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise field_error(name, value, "a finite number")
        if not low <= value <= high:
            raise field_error(name, value, f"a number from {low:g} to {high:g}")
        return value

    return check


def positive(high: float = math.inf) -> Check:
    """A finite number above 0, at most `high`."""
    return number(math.ulp(0.0), high)


def one_of(*allowed: str) -> Check:
    """One of a few texts."""

    def check(value: Any, name: str) -> str:  # noqa: ANN401
        if value not in allowed:
            raise field_error(name, value, f"one of {', '.join(allowed)}")
        return str(value)

    return check


def matching(pattern: str) -> Check:
    """A text that the whole pattern matches."""
    compiled = re.compile(pattern)

    def check(value: Any, name: str) -> str:  # noqa: ANN401
        if not isinstance(value, str) or compiled.fullmatch(value) is None:
            raise field_error(name, value, f"the form {pattern}")
        return value

    return check


def text(limit: int, *, low: int = 0) -> Check:
    """Any text of `low` to `limit` characters."""

    def check(value: Any, name: str) -> str:  # noqa: ANN401
        if not isinstance(value, str) or not low <= len(value) <= limit:
            raise field_error(name, value, f"a text of {low} to {limit} characters")
        return value

    return check


def boolean(value: Any, name: str) -> bool:  # noqa: ANN401
    """True or false."""
    if not isinstance(value, bool):
        raise field_error(name, value, "true or false")
    return value


def list_of(item: Check, low: int, high: int) -> Check:
    """A list of `low` to `high` items, each checked."""

    def check(value: Any, name: str) -> list[Any]:  # noqa: ANN401
        if not isinstance(value, list) or not low <= len(value) <= high:
            raise field_error(name, value, f"a list of {low} to {high} items")
        return [item(v, f"{name}[{i}]") for i, v in enumerate(value)]

    return check


def map_of(key: Check, item: Check, high: int) -> Check:
    """An object of at most `high` entries, keys and values checked."""

    def check(value: Any, name: str) -> dict[str, Any]:  # noqa: ANN401
        if not isinstance(value, Mapping) or len(value) > high:
            raise field_error(name, value, f"an object of at most {high} entries")
        return {key(k, f"a key of {name}"): item(v, f"{name}.{k:.40}") for k, v in value.items()}

    return check


def record(table: FieldTable) -> Check:
    """An object with the fields of `table`; other fields are dropped."""

    def check(value: Any, name: str) -> dict[str, Any]:  # noqa: ANN401
        if not isinstance(value, Mapping):
            raise field_error(name, value, "an object")
        missing = [field for field, (_, required) in table.items() if required and field not in value]
        if missing:
            raise Malformed("bad_field", f"{name} lacks {', '.join(missing)}")
        return {field: check(value[field], f"{name}.{field}") for field, (check, _) in table.items() if field in value}

    return check


def named(tables: Mapping[str, Mapping[str, Check]]) -> Check:
    """An object with exactly the fields of the table that its `name` picks, all of them required."""

    def check(value: Any, name: str) -> dict[str, Any]:  # noqa: ANN401
        word = value.get("name") if isinstance(value, Mapping) else None
        if not isinstance(word, str) or word not in tables:
            raise field_error(f"{name}.name", word, f"one of {', '.join(tables)}")
        if unknown := sorted(set(value) - set(tables[word]) - {"name"}):
            raise field_error(name, unknown[0], f"the fields {', '.join(tables[word])} of {word}")
        found: dict[str, Any] = record(required(**tables[word]))(value, name)
        return found | {"name": word}

    return check


def manifest(*kinds: str) -> Check:
    """A manifest of one of `kinds`, as JSON or as `Manifest`; the result is JSON."""

    def check(value: Any, name: str) -> dict[str, Any]:  # noqa: ANN401
        blob = Manifest.from_json(value.to_json() if isinstance(value, Manifest) else value)
        if blob.kind not in kinds:
            raise field_error(name, blob.kind, f"a manifest of kind {' or '.join(kinds)}")
        return blob.to_json()

    return check


def word_or(word: str, other: Check) -> Check:
    """The given word, or what `other` accepts."""

    def check(value: Any, name: str) -> Any:  # noqa: ANN401
        return value if isinstance(value, str) and value == word else other(value, name)

    return check


def with_field(field: str, own: Check, other: Check) -> Check:
    """What `own` accepts if it is an object with `field`, else what `other` accepts."""

    def check(value: Any, name: str) -> Any:  # noqa: ANN401
        return (own if isinstance(value, Mapping) and field in value else other)(value, name)

    return check


def or_null(other: Check) -> Check:
    """Null, or what `other` accepts."""

    def check(value: Any, name: str) -> Any:  # noqa: ANN401
        return None if value is None else other(value, name)

    return check


def required(**checks: Check) -> FieldTable:
    """Fields that must be there."""
    return {name: (check, True) for name, check in checks.items()}


def optional(**checks: Check) -> FieldTable:
    """Fields that may be absent."""
    return {name: (check, False) for name, check in checks.items()}
