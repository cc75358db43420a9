"""`python -m tests.benches.rollout`: how soon a worse bundle is withdrawn, in simulated roll-outs; a minute.

Devices' accuracies are beta distributed around 0.8 for the stable bundle, with a standard deviation of 0.12, and around
less for the candidate. Prints a Markdown table: the share of 200 roll-outs that was stopped within so many pairs.
"""

from __future__ import annotations

import sys

import numpy as np

from export.serve.rollout import SIGNIFICANCE, RolloutEvidence

STABLE, SPREAD, RUNS = 0.8, 10.0, 200  # a beta distribution's mean and concentration
PAIRS = (50, 100, 200, 500)


def pairs_needed(rng: np.random.Generator, candidate: float) -> int:
    """Until the evidence is enough; one more than the most that are tried when it never is."""
    evidence = RolloutEvidence()
    for i in range(PAIRS[-1]):
        a, b = (float(rng.beta(SPREAD * mean, SPREAD * (1 - mean))) for mean in (STABLE, candidate))
        evidence = evidence.with_report(a, canary=False).with_report(b, canary=True)
        if evidence.e_value >= 1 / SIGNIFICANCE:
            return i + 1
    return PAIRS[-1] + 1


def main() -> None:
    """Entry point."""
    rng = np.random.Generator(np.random.PCG64(0))
    sys.stdout.write(f"| points worse | {' | '.join(f'{p} pairs' for p in PAIRS)} |\n|---:|{'---:|' * len(PAIRS)}\n")
    for worse in (0.0, 0.02, 0.05, 0.1, 0.2):
        needed = np.array([pairs_needed(rng, STABLE - worse) for _ in range(RUNS)])
        shares = " | ".join(f"{(needed <= p).mean():.0%}" for p in PAIRS)
        sys.stdout.write(f"| {100 * worse:.0f} | {shares} |\n")


if __name__ == "__main__":
    main()
