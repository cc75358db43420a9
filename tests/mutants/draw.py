"""Which mutants a seed draws of a module."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.mutants.mutants import Mutant, mutants_of
from tests.mutants.nearest_tests import ROOT, name_of


def modules_in(places: Iterable[Path]) -> list[Path]:
    files = {file for place in places for file in ([ROOT / place] if place.suffix else (ROOT / place).rglob("*.py"))}
    return sorted(file for file in files if file.name != "__init__.py")


def drawn(module: Path, each: int, seeds: Sequence[int], only: str = "") -> list[Mutant]:
    """`each` mutants by each seed, in the order of the lines; what several draw, once. Or all with the text `only`."""
    every = mutants_of(module.read_text(encoding="utf-8"))
    if only:
        return [one for one in every if only in str(one)]
    taken = {i for seed in seeds for i in _lots(name_of(module), every, seed)[:each]}
    return [every[i] for i in sorted(taken)]


def _lots(name: str, every: Sequence[Mutant], seed: int) -> list[int]:
    """All mutants in the seed's order. Each has a lot of its own, which a change of another line leaves as it is."""
    texts = [f"{seed} {name} {one.text} {one.what} {one.nth}".encode() for one in every]
    return sorted(range(len(every)), key=lambda i: hashlib.sha256(texts[i]).digest())
