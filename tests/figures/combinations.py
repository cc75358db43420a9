"""Draw combinations of options by the hundred and judge each: `make combinations`.

Runs in one process are judged by tests/support/run_promises.py, with --real runs over a mosquitto by real_promises.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from coordinator.local_broker import start_broker
from tests.support.drawn_cases import DrawnCase, draw
from tests.support.real_cases import draw_real
from tests.support.real_promises import judge_real
from tests.support.run_promises import GOOD, Judge, judge, one_that_runs, smallest, verdict_of


def main() -> int:
    """-> the exit status: 1 if a case breaks a promise, or none runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=3)
    parser.add_argument("--refused", action="store_true", help="print the refusals, too")
    parser.add_argument("--real", action="store_true", help="over a broker, with real clients")
    asked = parser.parse_args()
    verdicts: Counter[str] = Counter()
    with ExitStack() as stack:
        drawn: Callable[[int, int], DrawnCase] = draw
        judged: Judge = judge
        if asked.real:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url = stack.enter_context(start_broker(folder, "mosquitto")).url
            drawn, judged = draw_real, partial(verdict_of, partial(judge_real, url))
        for seed in range(asked.seed, asked.seed + asked.count):
            for case, verdict, said in one_that_runs(drawn(seed, asked.most), seed, judged):
                verdicts[verdict] += 1
                if verdict == "refused" and asked.refused:
                    print(f"refused: {case}\n    {said}", flush=True)
                if verdict not in GOOD:
                    least, why = smallest(case, judged)
                    print(f"{seed}: {case}\n  smallest: {least}\n    {why}", flush=True)
    print(dict(verdicts))
    return int(not verdicts["runs"] or any(verdict not in GOOD for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
