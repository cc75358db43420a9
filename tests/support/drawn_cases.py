"""Random combinations of a method, its settings, the options of a run and kinds of devices, and what is simpler.

Settings and options have values of a small problem. A combination may be one that is refused.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.strategies.registry import METHODS, Setting, make_method, method_settings

USUAL: Mapping[str, Setting] = {  # of a small problem, and of few rounds
    "local-steps": 2,
    "batch-size": 8,
    "clusters": 2,
    "runs": 2,
    "restarts": 2,
    "first-steps": 4,
    "level-rounds": 1,
    "trial-rounds": 2,
    "warm-up": 1,
}
OF_GROUPS: Mapping[str, Setting] = {"least-members": 2}  # those of start = loss, too
OF_SUMS: Mapping[str, Setting] = {**OF_GROUPS, "secure-clip": 10.0}
OTHERS: Mapping[str, tuple[Setting, ...]] = {  # values of settings, where a method has them
    "clusters": (1, 3, 7),
    "runs": (1, 3),
    "start": ("groups", "k-means", "redraw", "loss"),
    "weights": ("equal", "samples"),
    "e-step": ("nearest", "k-means"),
    "lam": (0.0, 0.5),
    "mu": (0.0, 1.0),
    "hysteresis": (0.3,),
    "max-age": (1,),
    "representation": ("all", "classifier", "delta", "projection", "head.*"),
    "warm-up": (0, 2),
    "common": (False,),
    "cap": (0.5,),
    "eps": (0.0, 1.0),
    "eps-1": (1.0,),
    "eps-2": (0.0,),
    "gamma": (0.0,),
    "smallest": (2,),
    "coverage": (0.5,),
    "criterion": ("absolute",),
    "linkage": ("single", "complete", "average", "ward"),
    "metric": ("l2", "l1"),
    "threshold": (0.1, 100.0),
    "per-group": (1,),
    "trim-clusters": (0.3,),
    "least-gain": (0.0,),
    "most-centers": (1, 2),
    "prior-samples": (0.0,),
    "trial-rounds": (0, 1, 8),
    "level-rounds": (0, 2),
    "common-weight": (0.5,),
    "local-rounds": (1, 3),
    "beta": (0.5,),
    "tau": (1, 5),
    "sigma": (0.2,),
    "select": (1, 4),
    "local-start": ("centers",),
    "late-weight": (0.0,),
    "momentum": (0.0,),
    "nesterov": (True,),
    "optimiser": ("adam", "adamw"),
    "weight-decay": (0.1,),
    "clip-norm": (0.1,),
    "batch-size": (64,),
    "local-steps": (1, 7),
    "learning-rate": (0.01, 1.0),
    "fraction-train": (0.5, 0.34, 0.1),
    "batch-norm": ("local", "batch"),
    "label-prior": ("device", "model"),
    "reduce": ("mean", "trimmed-mean", "median", "norm-clip", "krum", "multi-krum", "geometric-median"),
    "trim-updates": (0.0, 0.4),
    "server-momentum": (0.5, 0.9),
    "privacy-noise": (0.1, 2.0),
    "privacy-clip": (0.01, 10.0),
    "secure": ("updates", "updates+membership"),
    "least-members": (3, 5),
    "secure-bits": (16, 24),
    "secure-clip": (1.0, 0.001),
    "secure-start": ("k-means",),
}
OURS = ("over_select", "profiles", "deadline_s", "fleet", "workers")  # no options of `SimulateArgs`, or other values
OPTIONS: Mapping[str, tuple[Any, ...]] = {  # of the run
    "codec": ("f16", "i8"),
    "concurrency": (1, 3, 20),
    "buffer": (1, 3),
    "max_staleness": (0, 1),
    "evaluate_every": (2, 5),
    "fraction_evaluate": (0.5, 0.1),
    "hostile": ("sign-flip:0.2", "nan:0.4", "scale:0.3", "noise:0.3", "label-flip:0.3"),
    "over_select": (1.5, 4.0),
    "profiles": ("usual", "flaky", "away", "gone"),
    "deadline_s": (0.5, 2.0),
    "seed": (1, 2, 2**40),
    "fleet": ("one", "two", "twelve", "uneven", "buffered", "one-class", "untested", "drawn"),
    "workers": (2, 3),
}
NEEDS: Mapping[str, tuple[str, tuple[Any, ...]]] = {  # a value has an effect only with one of another
    "buffer": ("concurrency", OPTIONS["concurrency"]),
    "max_staleness": ("concurrency", OPTIONS["concurrency"]),
    "privacy-clip": ("privacy-noise", OTHERS["privacy-noise"]),
    "trim-updates": ("reduce", ("trimmed-mean", "krum", "multi-krum")),
    "secure-bits": ("secure", OTHERS["secure"]),
    "secure-clip": ("secure", OTHERS["secure"]),
    "secure-start": ("secure", OTHERS["secure"]),
}


@dataclass(frozen=True)
class DrawnCase:
    """A method by name, its settings in kebab-case, and options: fields of `SimulateArgs`, and those of OURS."""

    method: str
    settings: Mapping[str, Setting] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.method, *(f"{k}={v}" for k, v in {**self.settings, **self.options}.items())])

    @property
    def asked(self) -> dict[str, Setting]:
        """The settings, with the usual ones of a small problem."""
        known = method_settings(make_method(self.method))
        more = OF_SUMS if "secure" in self.settings else OF_GROUPS if "start" in self.settings else {}
        return {key: value for key, value in {**USUAL, **more, **self.settings}.items() if key in known}


def draw(seed: int, most: int, options: Mapping[str, tuple[Any, ...]] = OPTIONS) -> DrawnCase:
    """A method with up to `most` settings and options that are not the usual ones; the same for the same seed."""
    rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
    method = rng.choice(sorted(METHODS))
    axes = sorted(OTHERS.keys() & method_settings(make_method(method)).keys())
    drawn = rng.sample(axes, min(len(axes), rng.randint(0, most))) + rng.sample(sorted(options), rng.randint(0, most))
    values: dict[str, Any] = {key: rng.choice(OTHERS.get(key) or options[key]) for key in drawn}
    for key in drawn:
        if key in NEEDS:
            other, some = NEEDS[key]
            values[other] = values[other] if values.get(other) in some else rng.choice(some)
    return DrawnCase(
        method,
        {key: value for key, value in values.items() if key in OTHERS},
        {key: value for key, value in values.items() if key in options},
    )


def simpler(case: DrawnCase) -> Iterator[DrawnCase]:
    """The case with one value less."""
    for key in case.settings:
        yield replace(case, settings={k: v for k, v in case.settings.items() if k != key})
    for key in case.options:
        yield replace(case, options={k: v for k, v in case.options.items() if k != key})
