"""An attack, what was seen of it, and the lines of the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from edge_client.printable import printable_line

Copy = TypeVar("Copy")
ACCESS, EPOCHS, LIMITS = "docs/security.md", "PROTOCOL.md, section 10", "PROTOCOL.md, section 14"
ROUNDS = EPOCHS
TRANSFER, UPDATES = "PROTOCOL.md, section 9", "docs/hostile-devices.md"
SUMS = "PROTOCOL.md, section 21"


@dataclass(frozen=True)
class Seen:
    """Whether the bound held (None: the installation has nothing to attack in this way), and what was seen."""

    held: bool | None
    words: str


NO_UPDATES = Seen(held=None, words="this method asks for no update in its first round")
NO_SINGLE = Seen(held=None, words="this run adds masked updates, and no single one is sent")
NO_SUMS = Seen(held=None, words="this run makes no masked sums (`secure`)")


@dataclass(frozen=True, kw_only=True)
class Attack(Generic[Copy]):
    """One attack: what is tried, the bound, where that is written, and what plays it on a copy."""

    tried: str
    bound: str
    where: str
    play: Callable[[Copy], Seen]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What came of one attack."""

    tried: str
    bound: str
    where: str
    seen: Seen

    def as_json(self) -> dict[str, Any]:
        about = {"tried": self.tried, "bound": self.bound, "where": self.where}
        return about | {"held": self.seen.held, "seen": self.seen.words}

    def in_words(self) -> str:
        """Two lines: the result and what was tried; what was seen, the bound and where it is written."""
        result = {True: "held", False: "BROKEN", None: "no aim"}[self.seen.held]
        seen = printable_line(self.seen.words)
        return f"{result:6}  {self.tried}\n        {seen}; bound: {self.bound} ({self.where})"
