"""What a decoder is, and what may be said of what it accepts.

`read(bytes) -> object` may raise Malformed (or, for configuration, ConfigError) and nothing else. `check(given, valid,
read)` raises AssertionError when it accepted what it should not have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edge_client.errors import Malformed
from tests.support.mutations import Mutate

Check = Callable[[bytes, bytes, Any], None]  # the case, the valid bytes it was made of, what was read
SEED = bytes(range(32))
FEDERATION = "demo"


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """One reader. `valid` are inputs that it accepts; `share` is how many of a run's cases it gets, relatively."""

    name: str
    read: Callable[[bytes], Any]
    valid: tuple[bytes, ...]
    mutate: Mutate
    check: Check
    refuses_with: tuple[type[Exception], ...] = (Malformed,)
    share: int = 1


def anything(_given: bytes, _valid: bytes, _read: object) -> None:
    """Whatever it accepts is fine, as long as it did not fail."""


def reads_back(write: Callable[[Any], bytes], read: Callable[[bytes], Any]) -> Check:
    """What was accepted can be written, and the writing is read as the same."""

    def check(_given: bytes, _valid: bytes, found: object) -> None:
        assert read(write(found)) == found

    return check


def only_what_was_signed(expected: object) -> Check:
    """Whatever the bytes look like, they say what was signed."""

    def check(_given: bytes, _valid: bytes, found: object) -> None:
        assert found == expected

    return check
