"""Draw combinations of options by the hundred and judge each (tests/support/run_promises.py): `make combinations`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tests.support.drawn_cases import draw
from tests.support.run_promises import GOOD, one_that_runs, smallest


def main() -> int:
    """-> the exit status: 1 if a case breaks a promise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=3)
    parser.add_argument("--refused", action="store_true", help="print the refusals, too")
    asked = parser.parse_args()
    verdicts: Counter[str] = Counter()
    for seed in range(asked.seed, asked.seed + asked.count):
        for case, verdict, said in one_that_runs(draw(seed, asked.most), seed):
            verdicts[verdict] += 1
            if verdict == "refused" and asked.refused:
                print(f"refused: {case}\n    {said}", flush=True)
            if verdict not in GOOD:
                least, why = smallest(case)
                print(f"{seed}: {case}\n  smallest: {least}\n    {why}", flush=True)
    print(dict(verdicts))
    return int(any(verdict not in GOOD for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
