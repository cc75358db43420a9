"""How a method works where the server learns sums only: what each device chooses, weighs and adds.

A method states its `sum_plan`, and coordinator/rounds/sealed_round.py carries it out; the method's own `round` is for
single updates. A method without a plan needs single updates, and is refused with `secure`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import isfunction
from typing import Literal, Protocol

from coordinator.strategies.base import Fleet
from edge_client.errors import ConfigError
from edge_client.protocol.summed_task import SOFT
from edge_client.protocol.task import ClientId

PLANS = ("sum_plan", "asynchronous_plan")  # the functions by which a method says how it works elsewhere
SECURE_STARTS = ("loss", "k-means")
SORTS = 4  # by then the centers of random groups have come apart
HINT = "use fesem, ifca, hypcluster, fedem, fedsoft, fedavg, fedprox, ditto or pfedme; or set secure = off"


@dataclass(frozen=True, kw_only=True)
class PersonalFit:
    """A second fit of each device that stays on it: its own model in `slot`, pulled to the common one by `mu`."""

    slot: str
    mu: float


@dataclass(frozen=True, kw_only=True)
class SumPlan:
    """`choose` as `SummedFit` says. `first`: how centers come apart in the first round, "groups", "k-means" or "none".

    With `sorts` above zero there are more random groups than centers, among which the devices choose by their losses so
    many times, and which are then merged. In the first `by_loss` rounds after that the devices choose by their losses,
    whatever `choose` says.

    `weigh`: devices count "equal" or by their "samples". `pulls` are the proximal terms of the devices, which begin at
    their own model in `slot` with `own_start`; soft weights are estimated every `tau` rounds. `served` is that of
    `SummedProbe`; the other fields are those of `SummedFit`.
    """

    choose: str
    weigh: str = "samples"
    first: str = "none"
    sorts: int = 0
    by_loss: int = 0
    pulls: Mapping[ClientId, float] = field(default_factory=dict)
    representation: str = "classifier"
    hysteresis: float = 0.0
    sigma: float = 0.0
    tau: int = 1
    own_start: bool = False
    repeats: int = 1
    move: float = 1.0
    slot: str = "main"
    step: float = 1.0
    served: Literal["asked", "center", "mixture"] = "asked"
    personal: PersonalFit | None = None


class HasSumPlan(Protocol):
    """A method that may say how it works on sums."""

    def sum_plan(self, fleet: Fleet) -> SumPlan:
        """The plan; raises ConfigError where the method needs single updates."""


def plan_of(method: HasSumPlan, fleet: Fleet) -> SumPlan:
    """The plan of a method. Raises ConfigError for one that needs single updates, and says why."""
    if own := own_parts(method, "sum_plan"):  # the plan is that of a method with other parts
        raise single_updates(method, f"its `{own[0]}` works on the devices' single updates")
    plan: SumPlan = method.sum_plan(fleet)
    return plan


def own_parts(method: object, plan: str) -> list[str]:
    """The functions of a class that are newer than its function `plan`, which does not know them; `round` first."""
    kinds = type(method).__mro__
    stated = next(i for i, kind in enumerate(kinds) if plan in vars(kind))
    named = [n for kind in kinds[:stated] for n, part in vars(kind).items() if isfunction(part)]
    return sorted((n for n in named if not n.startswith("__") and n not in PLANS), key=lambda n: n != "round")


def check_noisy(method: object, plan: SumPlan) -> None:
    """Refuse noise on the devices where the plan has sums that noise does not cover. Raises ConfigError."""
    secure = f"secure and privacy-noise with {type(method).__name__}"
    if plan.first == "k-means":
        raise ConfigError(f"{secure}: its first k-means has sums without noise", hint="set secure-start = loss")
    if plan.choose in SOFT:
        raise ConfigError(
            f"{secure}: a device's weights in the centers are summed without noise",
            hint="use fesem, ifca, hypcluster, fedavg, fedprox, ditto or pfedme; or set privacy-noise = 0",
        )


def check_hidden(method: object, plan: SumPlan) -> None:
    """Refuse weights that tell which devices are in the sum of a center. Raises ConfigError."""
    if plan.weigh == "samples" and plan.choose in ("loss", "nearest"):
        raise ConfigError(
            f"secure = updates+membership with {type(method).__name__}: it weighs devices by their samples, which are "
            "known, and the sum of the weights of a center tells which devices are its own",
            hint="use ifca, or fesem with weights = equal; or set secure = updates",
        )


def single_updates(method: object, why: str, hint: str = HINT) -> ConfigError:
    """The refusal of a method or a setting that needs the update of one device."""
    return ConfigError(f"secure with {type(method).__name__}: {why}, and the server would learn sums only", hint=hint)
