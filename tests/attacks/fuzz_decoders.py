"""Damaged bytes by the million to every decoder: `make fuzz`.

    python -m tests.attacks.fuzz_decoders --cases 1000000

Each case is valid bytes with some damage. A decoder must refuse them by name or read something that holds; any other
exception, anything accepted that should not be, and more memory than the limit is a failure: the exit status is 1 and
its line says which seed and which bytes. The address space is limited while it runs, so no case can take the machine's
memory; the table says how much the process grew.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

from tests.attacks.fuzz import Tally, attack, unexpected
from tests.support.decoders.decoder import Decoder
from tests.support.decoders.files import file_decoders
from tests.support.decoders.wire import program, wire_decoders

SLACK_BYTES = 128 << 20  # of address space, beyond what the process has when it begins


def main() -> None:
    """Every decoder, its share of the cases; a line each, then the sum."""
    asked = arguments()
    decoders = [*wire_decoders(), *file_decoders(program())]
    decoders = [decoder for decoder in decoders if not asked.only or decoder.name in asked.only]
    for decoder in decoders:
        attack(decoder, 100, asked.seed)  # what is loaded and kept once is not a case's
    limit_bytes = address_space_bytes() + SLACK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    resident, began_s = resident_kib(), time.process_time()
    shares = sum(decoder.share for decoder in decoders)
    tallies = [shown(attack(decoder, cases_of(decoder, shares, asked.cases), asked.seed)) for decoder in decoders]
    total = {
        "cases": sum(tally.cases for tally in tallies),
        "refused": sum(sum(tally.refused.values()) for tally in tallies),
        "accepted": sum(tally.accepted for tally in tallies),
        "wrong": sum(len(tally.wrong) for tally in tallies),
        "decoders": len(decoders),
        "seed": asked.seed,
        "cpu_s": round(time.process_time() - began_s, 1),
        "largest_peak_kib": max(tally.peak_bytes for tally in tallies) >> 10,
        "grown_mib": round((resident_kib() - resident) / 1024, 1),
        "limit_mib": SLACK_BYTES >> 20,
    }
    say(json.dumps(total))
    if asked.json is not None:
        rows = {t.name: {"cases": t.cases, "accepted": t.accepted, "refused": t.refused} for t in tallies}
        asked.json.write_text(json.dumps({"total": total, "decoders": rows}, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if total["wrong"] else 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", type=int, default=1_000_000, help="of all decoders together, at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="names of decoders; all when left out")
    parser.add_argument("--json", type=Path, help="where the numbers go, too")
    return parser.parse_args()


def cases_of(decoder: Decoder, shares: int, cases: int) -> int:
    """Its part, rounded up."""
    return -(-cases * decoder.share // shares)


def shown(tally: Tally) -> Tally:
    codes = ", ".join(f"{code} {count:,}" for code, count in tally.refused.most_common(5))
    say(
        f"{tally.name:24} {tally.cases:>9,} cases {tally.accepted:>8,} read; {codes}; peak {tally.peak_bytes >> 10} KiB"
    )
    if tally.wrong:
        say(f"  {len(tally.wrong)} WRONG: {unexpected(tally)}")
    return tally


def address_space_bytes() -> int:
    """What the process has mapped."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


def resident_kib() -> int:
    """The most memory that the process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
