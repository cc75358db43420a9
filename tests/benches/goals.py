"""What each bench is measured against, what it must reach and what it aims at. Numbers only: nothing here measures.

A goal compares one number, the `score` of a figure (results.py): a ratio to a peer, a share of a limit, an exponent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UPDATES = "client updates per core-second"
WHOLE = "50 devices x 3 rounds"


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One row of the table. `unit` is that of the score; without `at_least` a row only informs."""

    row: str
    bench: str
    against: str
    at_least: float | None = None
    aim: float | None = None
    better: Literal["more", "less"] = "more"
    unit: Literal["x", "%", "", "ms", "s"] = "x"

    def met(self, score: float, bound: float) -> bool:
        """Whether the score is on the right side of a bound."""
        return score >= bound if self.better == "more" else score <= bound


GOALS = (
    Goal(row="updates-wecfl-pfl", bench=f"{UPDATES}, WeCFL CNN", against="pfl 0.6", at_least=1.8, aim=2.3),
    Goal(row="updates-wecfl-loop", bench=f"{UPDATES}, WeCFL CNN", against="DataLoader loop"),
    Goal(row="updates-mlp-pfl", bench=f"{UPDATES}, MLP 784-200-10", against="pfl 0.6", at_least=2.5, aim=3.3),
    Goal(row="updates-mlp-loop", bench=f"{UPDATES}, MLP 784-200-10", against="DataLoader loop"),
    Goal(
        row="updates-mlp-fedjax",
        bench="client updates per second, MLP 784-200-10, two workers",
        against="FedJAX",
        at_least=1.0,
        aim=1.5,
    ),
    Goal(row="updates-mlp-fedjax-core", bench=f"{UPDATES}, MLP 784-200-10, two workers", against="FedJAX"),
    Goal(
        row="updates-femnist-loop",
        bench=f"{UPDATES}, LEAF FEMNIST CNN",
        against="DataLoader loop",
        at_least=1.7,
        aim=2.0,
    ),
    Goal(
        row="run-wecfl-wall",
        bench=f"{WHOLE}, WeCFL CNN: seconds from command to result",
        against="Flower",
        at_least=3.0,
        aim=6.0,
    ),
    Goal(
        row="run-wecfl-memory",
        bench=f"{WHOLE}, WeCFL CNN: peak memory of all processes, MB",
        against="Flower",
        at_least=3.0,
    ),
    Goal(
        row="run-wecfl-left",
        bench=f"{WHOLE}, WeCFL CNN: processes left behind",
        against="Flower",
        at_least=0,
        better="less",
        unit="",
    ),
    Goal(row="run-digits-wall", bench=f"{WHOLE}, digits MLP: seconds from command to result", against="Flower"),
    Goal(row="run-digits-memory", bench=f"{WHOLE}, digits MLP: peak memory of all processes, MB", against="Flower"),
    Goal(row="scaling-wecfl", bench="two worker processes, WeCFL CNN", against="one", at_least=1.8, aim=1.9),
    Goal(row="scaling-mlp", bench="two worker processes, MLP 784-200-10", against="one", at_least=1.8, aim=1.9),
    Goal(
        row="floor-mlp",
        bench="share of the step floor, MLP 784-200-10, ms per step",
        against="kernels and one pass",
        at_least=70,
        aim=75,
        unit="%",
    ),
    Goal(
        row="floor-wecfl",
        bench="share of the step floor, WeCFL CNN, ms per step",
        against="kernels and one pass",
        at_least=50,
        aim=65,
        unit="%",
    ),
    Goal(
        row="floor-femnist",
        bench="share of the step floor, LEAF FEMNIST CNN, ms per step",
        against="kernels and one pass",
        at_least=55,
        aim=60,
        unit="%",
    ),
    Goal(
        row="probe-wecfl", bench="probe of 5 centers, WeCFL CNN, ms", against="load and evaluate", at_least=2.5, aim=3.0
    ),
    Goal(row="probe-mlp", bench="probe of 5 centers, MLP 784-200-10, ms", against="load and evaluate"),
    Goal(
        row="clustering-time",
        bench="clustering, 200 x 29k, 20 restarts, G included, ms",
        against="scikit-learn",
        at_least=25,
        aim=40,
    ),
    Goal(
        row="clustering-after",
        bench="clustering, 200 x 29k, after the last arrival",
        against="scikit-learn",
        at_least=5,
        better="less",
        unit="ms",
    ),
    Goal(
        row="clustering-large",
        bench="clustering, 3550 x 120k, after the last arrival",
        against="scikit-learn",
        at_least=0.3,
        better="less",
        unit="s",
    ),
    Goal(
        row="clustering-objective",
        bench="clustering objective above scikit-learn's (n_init=20), relative, data with clusters",
        against="scikit-learn",
        at_least=1e-9,
        better="less",
        unit="",
    ),
    Goal(
        row="clustering-weak",
        bench="clustering objective below scikit-learn's (n_init=20), relative, weak clusters",
        against="scikit-learn",
        at_least=1e-6,  # lower, not only as low
        unit="",
    ),
    Goal(row="clustering-growth-n", bench="cost of clustering, 100 to 3200 updates: exponent", against="", unit=""),
    Goal(row="clustering-growth-k", bench="cost of clustering, 2 to 32 centers: exponent", against="", unit=""),
    Goal(row="clustering-growth-d", bench="cost of clustering, 10⁴ to 10⁶ parameters: exponent", against="", unit=""),
    # An exponent is a slope through a few noisy points; a tenth above one is within what they scatter.
    Goal(
        row="growth-devices",
        bench="cost of a round, 10² to 10⁴ devices, 100 sampled: exponent",
        against="linear",
        at_least=1.1,
        better="less",
        unit="",
    ),
    Goal(
        row="growth-centers",
        bench="cost of a probe, 2 to 32 centers: exponent",
        against="linear",
        at_least=1.1,
        better="less",
        unit="",
    ),
    Goal(
        row="growth-parameters",
        bench="cost of an update, 10⁴ to 10⁷ parameters: exponent",
        against="linear",
        at_least=1.1,
        better="less",
        unit="",
    ),
)
