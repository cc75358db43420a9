"""Give damaged bytes to a decoder and watch: it refuses by name or reads something that holds, within its memory."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from edge_client.errors import Malformed
from tests.support.decoders.decoder import Decoder

MEASURED_OF = 64  # one case of so many; tracing memory makes a case several times slower
FIXED_BYTES = 1 << 20  # what a reader may need however small its input is
TIMES_ITS_INPUT = 64  # small JSON values become Python objects


@dataclass
class Tally:
    """What happened to one decoder's cases."""

    name: str
    cases: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    peak_bytes: int = 0
    wrong: list[str] = field(default_factory=list)


def attack(decoder: Decoder, cases: int, seed: int) -> Tally:
    """That many cases, all from `seed`; of the first ones the memory is measured."""
    rng = random.Random(f"{seed} {decoder.name}")  # noqa: S311 - repeatable on purpose
    tally = Tally(decoder.name)
    measured = -(-cases // MEASURED_OF)
    tracemalloc.start()  # once: each start keeps some memory for good
    for number in range(cases):
        if number == measured:
            tracemalloc.stop()
        valid = rng.choice(decoder.valid)
        given = decoder.mutate(rng, valid)
        tally.cases += 1
        before = _mark() if number < measured else 0
        try:
            _one(decoder, tally, given, valid)
        except Exception as wrong:  # noqa: BLE001 - whatever it is, it is what we look for
            tally.wrong.append(f"seed {seed}, case {number}: {wrong!r:.300} from {given!r:.600}")
        if number < measured:
            peak, most = tracemalloc.get_traced_memory()[1] - before, FIXED_BYTES + TIMES_ITS_INPUT * len(given)
            if peak > most:
                peak = min(peak, _peak_again(decoder, given))
            tally.peak_bytes = max(tally.peak_bytes, peak)
            if peak > most:
                tally.wrong.append(f"seed {seed}, case {number}: {peak} bytes for {len(given)} of input")
    tracemalloc.stop()
    return tally


def _mark() -> int:
    """What is in use now; the peak begins here."""
    tracemalloc.reset_peak()
    return tracemalloc.get_traced_memory()[0]


def _peak_again(decoder: Decoder, given: bytes) -> int:
    """The bytes that a second reading takes: a thread of another test allocates at one of the two, not at both."""
    before = _mark()
    with suppress(Exception):  # the first reading told it
        decoder.read(given)
    return tracemalloc.get_traced_memory()[1] - before


def _one(decoder: Decoder, tally: Tally, given: bytes, valid: bytes) -> None:
    try:
        found = decoder.read(given)
    except decoder.refuses_with as refusal:
        code = refusal.code if isinstance(refusal, Malformed) else "config"
        tally.refused[code] += 1
        return
    tally.accepted += 1
    decoder.check(given, valid, found)


def unexpected(tally: Tally) -> str:
    """The first things that went wrong, for people; empty when nothing did."""
    return "\n".join(tally.wrong[:3])
