"""Ways to damage bytes: flips, cuts, splices, hostile numbers and texts, and damage that repairs its own checksum.

Everything follows one `random.Random`: the same seed gives the same cases.
"""

from __future__ import annotations

import base64
import copy
import json
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

Mutate = Callable[[random.Random, bytes], bytes]

HEADER_BYTES = 16  # of a block
NUMBERS = [0, 1, 7, 8, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 - 1, 2**53, 2**63, 2**64 - 1]
TOKENS = [
    *(b"NaN", b"Infinity", b"-1e999", b"1e999", b"1.0", b"-1", b"9" * 400, b"null", b"true", b"{}", b"[]", b'""'),
    *(
        b'"\\ud800"',
        b'"\\u0000"',
        b"\xff",
        b"\xef\xbb\xbf",
        b"\xed\xa0\x80",
        b"[" * 2_000,
        b'{"a":' * 500,
        b"/../",
        b"#",
    ),
    *(b"+", b"\0", "\u202e".encode(), b'"__metadata__":', b'"v":1,"v":1', b"1" + b"0" * 30),
]
FLOATS = [
    struct.pack(f"<{code}", value)
    for code in "efd"
    for value in (float("nan"), float("inf"), -float("inf"), -1.0, {"e": 6e4, "f": 3e38, "d": 1e308}[code], -0.0)
] + [b"\x80", struct.pack("<q", -1), struct.pack("<q", 2**63 - 1)]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 1.5, 1e308, -0.0, 2**31, 2**32, 2**53 - 1, 2**53, 2**64, "", "own", "start", "zero"),
    *("../../etc/passwd", "a/b", "+", "#", "a\0b", "\u202e", "x" * 300, "coordinator.0", [], {}, [[0, 1]] * 9, [None]),
    *("0" * 64, "f" * 64, "0" * 128, "AAAA", "A" * 4_000, {"own": "main"}, [[[[[[[[[[0]]]]]]]]]], "posterior:0"),
]


def bytes_changed(rng: random.Random, data: bytes) -> bytes:
    """One to eight edits of raw bytes."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 8) if rng.random() < 0.5 else 1):
        _edit(rng, out)
    return bytes(out)


def _edit(rng: random.Random, out: bytearray) -> None:
    at = rng.randrange(len(out) + 1)
    span = min(rng.choice((1, 1, 2, 4, 8, 64)), len(out) - at)
    what = rng.randrange(8)
    if what == 0 and at < len(out):
        out[at] ^= 1 << rng.randrange(8)
    elif what == 1:
        out[at : at + span] = rng.randbytes(span)
    elif what == 2:
        del out[at : at + span]
    elif what == 3:
        out[at:at] = out[at : at + span] * rng.randint(1, 3)
    elif what == 4:
        del out[at:]
    elif what == 5:
        out[at : at + span] = rng.choice(TOKENS)
    elif what == 6:
        width = rng.choice("BHIQ")
        number = struct.pack(f"<{width}", rng.choice(NUMBERS) & ((1 << 8 * struct.calcsize(width)) - 1))
        out[at : at + len(number)] = number
    else:
        out += rng.randbytes(rng.choice((1, 8, 100)))


def json_changed(rng: random.Random, data: bytes) -> bytes:
    """A valid document whose nodes are replaced, removed, doubled or moved; half of the time only its bytes."""
    if rng.random() < 0.3:
        return bytes_changed(rng, data)
    tree = json.loads(data)
    for _ in range(rng.randint(1, 3)):
        tree = _node_changed(rng, tree)
    return json.dumps(tree, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def _node_changed(rng: random.Random, tree: Any, *, stop: float = 0.02) -> Any:  # noqa: ANN401 - JSON
    """Walk down at random, and change what is there; the root itself rarely."""
    if not isinstance(tree, dict | list) or not tree or rng.random() < stop:
        return copy.deepcopy(rng.choice(VALUES))  # what is changed further must not change the list
    key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
    what = rng.random()
    if what < 0.6:
        tree[key] = _node_changed(rng, tree[key], stop=0.15)
    elif what < 0.75:
        del tree[key]
    elif isinstance(tree, dict):
        tree[rng.choice((key, "extra", "inline", "base", "own", "\ud800", "é"))] = tree[rng.choice(list(tree))]
    else:
        tree *= rng.randint(1, 20)
    return tree


def block_changed(rng: random.Random, data: bytes) -> bytes:
    """A damaged block, whose checksum is right all the same in half of the cases."""
    out = bytes_changed(rng, data)
    if rng.random() < 0.5 or len(out) < HEADER_BYTES:
        return out
    crc = zlib.crc32(out[HEADER_BYTES:], zlib.crc32(out[:12]))
    return out[:12] + struct.pack("<I", crc) + out[HEADER_BYTES:]


def tensors_changed(rng: random.Random, data: bytes) -> bytes:
    """A damaged tensor file: its body, its header as JSON with a length that fits again, or any of its bytes."""
    what, length = rng.random(), int.from_bytes(data[:8], "little")
    head, body = data[8 : 8 + length], data[8 + length :]
    if what < 0.3:
        return bytes_changed(rng, data)
    if what < 0.5:
        return data[: 8 + length] + _overwritten(rng, body)
    if what < 0.6:
        out = bytearray(data)
        struct.pack_into("<Q", out, 0, rng.choice(NUMBERS))
        return bytes(out)
    if what < 0.8:
        tree = json.loads(head)
        fc = json_changed(rng, tree["__metadata__"]["fc"].encode()) if rng.random() < 0.3 else b""
        if fc:
            tree["__metadata__"]["fc"] = fc.decode("utf-8", "replace")
            head = json.dumps(tree, separators=(",", ":")).encode()
        else:
            head = json.dumps(_node_changed(rng, tree)).encode("utf-8", "surrogatepass")
    else:
        head = bytes_changed(rng, head)
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + body


def _overwritten(rng: random.Random, body: bytes) -> bytes:
    """Other values in the same places: bits, bytes, whole numbers such as NaN and infinity."""
    out = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        item = rng.choice((rng.randbytes(1), *FLOATS))
        at = rng.randrange(max(1, len(out) - len(item) + 1))
        at -= at % len(item)
        out[at : at + len(item)] = item
    return bytes(out[: len(body)])


def pem_changed(rng: random.Random, data: bytes) -> bytes:
    """Other bytes between the same armour, or armour that is damaged itself."""
    if rng.random() < 0.2:
        return bytes_changed(rng, data)
    first, *lines, last = data.decode("ascii").strip().splitlines()
    der = bytes_changed(rng, base64.b64decode("".join(lines)))
    return f"{first}\n{base64.b64encode(der).decode()}\n{last}\n".encode("ascii")


def text_changed(alphabet: Sequence[str]) -> Mutate:
    """Edits of a short text that also use words of `alphabet`."""

    def mutate(rng: random.Random, data: bytes) -> bytes:
        if rng.random() < 0.5:
            return bytes_changed(rng, data)
        parts = data.decode("utf-8", "replace").split("/")
        parts[rng.randrange(len(parts))] = rng.choice(alphabet)
        if rng.random() < 0.2:
            parts.insert(rng.randrange(len(parts)), rng.choice(alphabet))
        return "/".join(parts).encode("utf-8", "surrogatepass")

    return mutate
