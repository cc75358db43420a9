"""What users read about a method in Python: its class, its paper's equations, its settings and its costs.

The text is put together from the class's and the module's docstrings, the fields of the class and the table of costs.
docs/methods.md has the same costs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.server_options import ServerOptions
from coordinator.strategies.common.setting_checks import setting_rows

_REDUCE = {  # method -> what `reduce` of its server options means, where it does not take every rule
    "TKM": '"trimmed-mean", "median", "norm-clip", "krum", "multi-krum" or "geometric-median"',
    "NonFed": '"mean", without a meaning: no center is made',
}


@dataclass(frozen=True)
class RoundCost:
    """Per device and round after the first rounds: exchanges, models fetched (down), models or gradients sent (up)."""

    exchanges: str
    down: str
    up: str


ONE = RoundCost("1", "1", "1")
_NEWCOMERS = RoundCost("1", "1; K for a newcomer", "1")
_BY_LOSS = RoundCost("2; 3 in the first round", "K", "1")
_ENSEMBLE = RoundCost("K", "K", "K")
COSTS: Mapping[str, RoundCost] = {
    "cam": RoundCost("3; 4 in the first round", "K + 1; sums of two", "2; sums of two"),
    "cam-wecfl": RoundCost("2", "2; K + 1 for a newcomer; sums of two", "2; sums of two"),
    "fesem": _NEWCOMERS,
    "fesem-ma": _NEWCOMERS,
    "wecfl": _NEWCOMERS,
    "tkm": _NEWCOMERS,
    "femam": RoundCost(
        "1",
        "0; one at the beginning of the last level, a sum of three; K for a newcomer",
        "0; 1 in the first two levels",
    ),
    "nonfed": RoundCost("1", "0; one at the beginning", "0"),
    "feddane": RoundCost("2", "2", "2"),
    "cfl": RoundCost("1; one more per level for a new device", "1", "1"),
    "hypcluster": _BY_LOSS,
    "ifca": _BY_LOSS,
    "clove": RoundCost("2", "K", "1"),
    "fedem": RoundCost("1 + K; 2 + K in the first round", "K", "K"),
    "fedrc": RoundCost("1 + K; 3 + K in the first round", "K", "K"),
    "fedsoft": RoundCost("1; 2 every tau rounds", "1; 1 + K every tau rounds", "1"),
    "fedavg-plus": _ENSEMBLE,
    "fedprox-plus": _ENSEMBLE,
    "ditto": RoundCost("2", "1", "1"),
    "fedcenters": RoundCost(
        "2; 1 where no personal model is served, 3 to 5 in the first 7 rounds, up to 14 in the eighth",
        "1; 2 to 10 in the first 8 rounds",
        "1",
    ),
    "pfedme": RoundCost("R", "R", "R"),
    "fedgroup": RoundCost("1; 2 in the first round", "1", "1"),
}


def method_doc(name: str, kind: type[Any]) -> str:
    """The docstring of the class `kind` of the method `name`."""
    own, paper = inspect.cleandoc(kind.__doc__ or ""), inspect.cleandoc(inspect.getmodule(kind).__doc__ or "")
    cost = COSTS.get(name, ONE)
    signs = {"K": "K is `clusters` or `runs`", "R": "R is `local_rounds`"}
    where = "".join(f"; {words}" for sign, words in signs.items() if sign in f"{cost.exchanges} {cost.down} {cost.up}")
    told = f"exchanges: {cost.exchanges}. Models down: {cost.down}. Models up: {cost.up}"
    example = f"fc.simulate(fc.{kind.__name__}(), fleet=fc.fleets.digits(), rounds=10)"
    parts = [own, paper, settings_doc(kind), f"Cost of a round per device: {told}{where}."]
    return "\n\n".join([*parts, f"Example:\n    result = {example}\n"])


def settings_doc(kind: type[Any]) -> str:
    """The part `Args` of a docstring: the class's own settings first, then those of every method."""
    shared = {f.name for f in fields(LocalSgd)}
    shown = [f for f in fields(kind) if f.metadata.get("setting", True)]
    first = sorted(shown, key=lambda f: f.name in shared)
    lines = [f"    {f.name}: {setting_words(kind, f.name)}. Default: {_default(f.default)}." for f in first]
    return "\n".join(["Args:", *lines])


def setting_words(kind: type[Any], setting: str) -> str:
    """What a setting of the method `kind`, or of its server options, means; empty for one of a user's own class."""
    if setting == "reduce" and (words := [_REDUCE[k.__name__] for k in kind.__mro__ if k.__name__ in _REDUCE]):
        return words[0]
    row = dict(setting_rows(kind)).get(setting) or dict(setting_rows(ServerOptions)).get(setting)
    return row.words if row else ""


def _default(value: object) -> str:
    return f"{type(value).__name__}()" if is_dataclass(value) else repr(value)
