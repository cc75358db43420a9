"""Control messages: strict JSON in, canonical JSON out, and the table of what each kind of message carries.

`read_message` gives back only what the kind's table (message_schemas.py) allows: a message that exists is valid.
`write_message` holds what we send to the same table. Times and identifiers are arguments; nothing here sends, and
nothing here knows a blob's bytes.
"""

from __future__ import annotations

import json
import math
from typing import Any

from edge_client.errors import Malformed
from edge_client.protocol.blocks import is_count
from edge_client.protocol.message_schemas import DOWNLINK_KINDS, MESSAGE_KINDS, NULLABLE, ROUTES, check_rules, table_of
from edge_client.protocol.validators import MAX_SAFE_INTEGER, record

VERSION = 1
MAX_MESSAGE_BYTES = 8_192
MAX_DEPTH = 8
_DIGITS_MAX = 17  # of MAX_SAFE_INTEGER, with its sign


def canonical_json(obj: object) -> bytes:
    """UTF-8 JSON with sorted keys, no spaces, no ASCII escapes; Malformed for NaN, infinity and lone surrogates."""
    try:
        text = json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8")
    except (TypeError, ValueError) as wrong:
        raise Malformed("bad_field", f"cannot be written as JSON: {wrong}") from wrong


def parse_json(data: bytes, limit: int = MAX_MESSAGE_BYTES) -> Any:  # noqa: ANN401 - any JSON value
    """Read at most `limit` bytes of strict UTF-8 JSON. Raises Malformed("bad_json") or Malformed("too_big").

    Refused beyond the grammar: duplicate keys, NaN, infinities (1e999 too), integers beyond +-(2^53 - 1), lone
    surrogates, more than 8 levels of nesting, a byte order mark.
    """
    if len(data) > limit:
        raise Malformed("too_big", f"JSON of {len(data)} bytes, at most {limit}")
    try:
        value = json.loads(
            bytes(data).decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse,
            parse_float=_float,
            parse_int=_int,
        )
        _check_tree(value)
    except Malformed:
        raise
    except (ValueError, RecursionError) as wrong:  # UnicodeError and JSONDecodeError are ValueErrors
        raise Malformed("bad_json", f"not strict JSON: {wrong!s:.120}") from wrong
    return value


def read_message(payload: bytes, route: str | None = None) -> dict[str, Any]:
    """Read one control message; every field of the result is valid and unknown fields are dropped. Raises Malformed.

    `route` is the kind of the topic that brought it (`Route.kind`); a kind that does not belong there is "bad_kind".
    """
    message = parse_json(payload)
    if not isinstance(message, dict):
        raise Malformed("bad_json", "a control message is a JSON object")
    version = message.get("v")
    if not is_count(version, VERSION, VERSION):
        raise Malformed("bad_version", f"message version {version!r:.80}, this side reads {VERSION}")
    kind = message.get("k")
    if not isinstance(kind, str) or kind not in MESSAGE_KINDS:
        raise Malformed("bad_kind", f"unknown kind {kind!r:.80}")
    if route is not None and kind not in ROUTES.get(route, ()):
        raise Malformed("bad_kind", f"{kind} does not belong on topic {route}")
    return {"v": VERSION, "k": kind} | _checked(kind, message, down=_is_down(kind, message, route))


def write_message(kind: str, *, ident: str, t_ms: int, **fields: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """One canonical control message of at most 8,192 bytes.

    Fields given as None are left out (except where null is a value), manifests may be given as `Manifest`, and fields
    that the kind does not have are a Malformed("bad_field"): what we send is held to the table that `read_message`
    uses.
    """
    if kind not in MESSAGE_KINDS:
        raise Malformed("bad_kind", f"unknown kind {kind!r:.80}")
    given = {k: v for k, v in fields.items() if v is not None or (kind, k) in NULLABLE}
    message = _checked(kind, given | {"id": ident, "t": t_ms}, down=_is_down(kind, given, None))
    unknown = set(given) - set(message)
    if unknown:
        raise Malformed("bad_field", f"{kind} has no field {', '.join(sorted(unknown))}")
    payload = canonical_json(message | {"v": VERSION, "k": kind})
    if len(payload) > MAX_MESSAGE_BYTES:
        raise Malformed("too_big", f"{kind} message of {len(payload)} bytes, at most {MAX_MESSAGE_BYTES}")
    return payload


def _is_down(kind: str, message: dict[str, Any], route: str | None) -> bool:
    """`near` is the one kind that travels both ways: an answer has `re`."""
    if kind == "near":
        return "re" in message if route is None else route == "t"
    return kind in DOWNLINK_KINDS


def _checked(kind: str, message: dict[str, Any], *, down: bool) -> dict[str, Any]:
    checked: dict[str, Any] = record(table_of(kind, message, down=down))(message, kind)
    check_rules(kind, checked)
    return checked


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise Malformed("bad_json", "an object has the same key twice")
    return out


def _refuse(text: str) -> Any:  # noqa: ANN401 - never returns
    raise Malformed("bad_json", f"{text} is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Malformed("bad_json", f"number {text!s:.40} overflows")
    return value


def _int(text: str) -> int:
    if len(text) > _DIGITS_MAX or abs(value := int(text)) > MAX_SAFE_INTEGER:
        raise Malformed("bad_json", f"integer {text!s:.40} is beyond 2^53 - 1")
    return value


def _check_tree(value: object) -> None:
    """Refuse deep nesting and lone surrogates, without recursion."""
    level: list[Any] = [value]
    depth = 0  # containers around each item of `level`
    while level:
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                item.encode("utf-8")  # UnicodeEncodeError on a lone surrogate
            elif isinstance(item, dict | list):
                if depth == MAX_DEPTH:
                    raise Malformed("bad_json", f"nested deeper than {MAX_DEPTH} levels")
                below += [*item.keys(), *item.values()] if isinstance(item, dict) else item
        level, depth = below, depth + 1
