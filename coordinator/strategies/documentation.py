"""What users read about a method in Python: its class, its paper's equations, its settings and its costs.

The text is put together from the class's and the module's docstrings, the fields of the class and the two tables below.
docs/methods.md has the same costs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.server_options import ServerOptions

ALL = "every method"
_SETTINGS: Mapping[str, Mapping[str, str]] = {  # setting -> method, or ALL -> what it means, with its unit
    "local_steps": {ALL: "steps of SGD in one fit"},
    "learning_rate": {ALL: "learning rate of these steps", "FedSGD": "learning rate of the server's step"},
    "momentum": {ALL: "momentum of these steps, 0 to 1; velocity begins at zero in each fit"},
    "optimiser": {ALL: '"sgd", "adam" or "adamw"; what it remembers begins at zero in each fit'},
    "nesterov": {ALL: "of sgd: Nesterov's momentum"},
    "beta1": {ALL: "of adam and adamw: the share of the mean gradient that a step keeps"},
    "beta2": {ALL: "of adam and adamw: the same of the mean square"},
    "adam_eps": {ALL: "of adam and adamw: what is added to the root of the mean square"},
    "weight_decay": {ALL: "this times the weights is added to the gradient; adamw shrinks the weights by it instead"},
    "clip_norm": {ALL: "a gradient longer than this is shortened to it; 0 clips none"},
    "batch_size": {ALL: "samples in a step", "FedSGD": "samples that a device reads at a time"},
    "fraction_train": {ALL: "share of the fleet that trains in a round, above 0 to 1"},
    "batch_norm": {
        ALL: 'running statistics that a device uses: "average", "local" or "batch"',
        **dict.fromkeys(("CAM", "CAMWeCFL", "FeMAM"), 'running statistics that a device uses: "average" or "batch"'),
    },
    "label_prior": {ALL: '"device" corrects centers to the device\'s own label counts, "model" does not'},
    "clusters": {ALL: "number of centers"},
    "runs": {ALL: "number of independent runs"},
    "cap": {ALL: "share of the devices whose losses count as they are; greater ones are cut to theirs; 1 cuts none"},
    "lam": {
        ALL: "weight of the pull to the center; an average device has mu = 2 lam",
        "FedCenters": "weight of the pull of the personal model to the center",
        "Ditto": "weight of the pull of the personal model to the common one",
        "PFedMe": "weight of the pull of the personal model theta_i to w_i, the device's copy of the common one",
        "FedSoft": "weight of the pull to the mixture of centers",
    },
    "mu": {ALL: "weight of the pull to the center, mu / 2 times the squared distance"},
    "restarts": {ALL: "starts of each k-means, of which the best counts"},
    "representation": {
        ALL: 'what is compared: "classifier" (the last layer), "all", or their direction: "delta", "projection"; '
        'or the parameters whose names fit a pattern with a "*"'
    },
    "e_step": {ALL: '"nearest" center, or "k-means" anew in every round'},
    "weights": {ALL: '"equal" devices, or by their number of "samples"', "TKM": '"equal" devices, and no others'},
    "hysteresis": {ALL: "share h, 0 to 0.99: a device moves only below (1 - h) of its old distance"},
    "max_age": {ALL: "rounds for which k-means remembers a device that was not asked"},
    "trim_clusters": {ALL: "share of the devices, farthest from all centers, that counts for none"},
    "criterion": {ALL: 'how eps_1 and eps_2 are meant: "relative" or "absolute"'},
    "eps_1": {ALL: "bound of the mean update's norm; a share of the largest if relative"},
    "eps_2": {ALL: "bound of the largest update's norm; a share of the first round's if relative"},
    "gamma": {ALL: "how far the two sides must point apart, 0 to 1"},
    "warm_up": {
        ALL: "rounds before the first split or clustering",
        **dict.fromkeys(("CAM", "CAMWeCFL"), "first rounds, in which the common model is trained alone"),
    },
    "smallest": {ALL: "fewest devices of a cluster that may still be split"},
    "coverage": {ALL: "share of a cluster's devices that must answer for a split"},
    "linkage": {
        "CFL": 'how the two sides of a split are joined: "single" or "complete"',
        "FLHC": 'how clusters are joined: "single", "complete", "average", or "ward" with the metric l2',
    },
    "common_weight": {ALL: "share of the common model beside the personal one where a device is served"},
    "late_weight": {ALL: "weight of an update that came after its round"},
    "eps": {ALL: "share of the way to the mean that a round goes, 0 to 1"},
    "start": {
        ALL: 'how centers begin apart: "groups", "k-means", "redraw" or "loss"',
        **dict.fromkeys(
            ("FeSEM", "CAMWeCFL", "FeMAM"),
            'how centers begin: "k-means" of the first models, or "loss" of random groups',
        ),
        **dict.fromkeys(("FedEM", "FedSoft"), 'how centers begin apart: "groups", "k-means" or "redraw"'),
    },
    "per_group": {ALL: "devices for each group whose first updates start the groups"},
    "first_steps": {ALL: "steps of SGD in a device's first update, by which it is grouped"},
    "metric": {ALL: 'distance of two updates: "cosine", "l2" or "l1"'},
    "threshold": {ALL: "distance above which clusters are not joined"},
    "tau": {ALL: "rounds from one estimate of the devices' shares of the centers to the next"},
    "sigma": {ALL: "least share of each center"},
    "select": {ALL: "devices per center and round; 0 takes all"},
    "local_start": {ALL: 'a device starts from its "own" model, or from the mixture of "centers"'},
    "eta": {ALL: "step of w_i, the device's copy of the common model, in a local round"},
    "local_rounds": {ALL: "exchanges in a round"},
    "beta": {ALL: "share of the way to the mean that the common model goes"},
    "level_rounds": {ALL: "rounds in which each level but the last is trained"},
    "common": {
        ALL: "whether the common model is trained after the first warm_up rounds; without it this is the base method"
    },
    "trial_rounds": {ALL: "first rounds, in which a fifth of the training samples is held out; 0: none"},
    "most_centers": {ALL: "centers at most, 1 to 16"},
    "prior_samples": {ALL: "how many held-out samples the fleet's mean shares count as, beside a device's own"},
    "least_gain": {ALL: "share of the held-out loss that more centers must save, 0 to 1"},
    "reduce": {
        "TKM": '"trimmed-mean", "median", "norm-clip", "krum", "multi-krum" or "geometric-median"',
        "NonFed": '"mean", without a meaning: no center is made',
    },
    "server": {ALL: "ServerOptions: robust means, privacy noise and momentum of the centers"},
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
        "1", "0; one at the beginning of the last level, a sum of three", "0; 1 in the first two levels"
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
    parts = [own, paper, f"Args:\n{_settings(kind)}", f"Cost of a round per device: {told}{where}."]
    return "\n\n".join([*parts, f"Example:\n    result = {example}\n"])


def _settings(kind: type[Any]) -> str:
    """The class's own settings first, then those of every method."""
    shared = {f.name for f in fields(LocalSgd)}
    first = sorted(fields(kind), key=lambda f: f.name in shared)
    return "\n".join(f"    {f.name}: {setting_words(kind, f.name)}. Default: {_default(f.default)}." for f in first)


def setting_words(kind: type[Any], setting: str) -> str:
    """What a setting of the method `kind`, or of its server options, means; empty for one of a user's own class."""
    told = {**_server_words().get(setting, {}), **_SETTINGS.get(setting, {})}
    names = [base.__name__ for base in kind.__mro__]
    return next((told[name] for name in [*names, ALL] if name in told), "")


def _server_words() -> dict[str, dict[str, str]]:
    """The words of ServerOptions' docstring, one line a setting."""
    lines = re.findall(r"^    (\w+): (.*)\.$", inspect.cleandoc(ServerOptions.__doc__ or ""), flags=re.MULTILINE)
    return {name: {ALL: words} for name, words in lines}


def _default(value: object) -> str:
    return f"{type(value).__name__}()" if is_dataclass(value) else repr(value)
