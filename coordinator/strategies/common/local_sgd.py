"""Local SGD: what all methods that train on devices share, as settings and as the tasks made from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import numpy as np

from coordinator.strategies.base import Fleet, ServedModels, ServingOptions, State
from coordinator.strategies.common.assignment import serving_center
from coordinator.strategies.common.label_totals import LABEL_PRIORS, label_totals_of
from coordinator.strategies.common.method_value import MethodValue
from coordinator.strategies.common.sampling import sample_cohort
from coordinator.strategies.common.server_options import SERVER_DEFAULTS, ServerOptions
from coordinator.strategies.common.setting_checks import check_choice, check_range
from coordinator.strategies.plans.asynchronous_plan import AsynchronousPlan, whole_rounds
from coordinator.strategies.plans.sum_plan import SumPlan, check_hidden, check_noisy, plan_of, single_updates
from edge_client.errors import ConfigError
from edge_client.protocol.task import OPTIMISERS, OPTION_RANGES, Array, ClientId, Fit, Flat, Optimiser, Probe, Schema

MAX_PULL = 2.0  # of lr * mu; above it each step of plain SGD ends farther from the anchor than it began
_SETTING_OF = {"eps": "adam_eps"}  # `eps` alone is a setting of some methods
BUFFER_SOURCES: Mapping[str, str] = {  # `batch-norm` -> whose running statistics a device evaluates with
    "average": "sent",  # the center's, which are means by samples; devices continue them in training
    "local": "own",  # a device keeps its own (FedBN, Li et al. 2021)
    "batch": "batch",  # those of the device's training samples (AdaBN, Li et al. 2016)
}


@dataclass(frozen=True, kw_only=True, repr=False)
class LocalSgd(MethodValue):
    """How a device trains in one task, which share of the fleet is asked each round, and the server's options.

    The defaults were chosen on the training split of the digits fleet, and suit small models on a few hundred samples.
    A method of your own extends this class and has `round`, which yields tasks by device, receives replies by device,
    and returns the next state:

    >>> from dataclasses import dataclass, replace
    >>> import numpy as np, fedcenters as fc
    >>> @dataclass(frozen=True, kw_only=True, repr=False)
    ... class PlainMean(fc.LocalSgd):
    ...     def round(self, state, schema, fleet, rng):
    ...         asked = self.cohort(fleet, rng)
    ...         replies = yield {who: self.fit(start=state.centers[0], seed=0) for who in asked}
    ...         return replace(state, centers=np.mean([r.update for r in replies.values()], axis=0)[None])
    >>> bool(fc.simulate(PlainMean(), fleet=fc.fleets.digits(devices=3, groups=1), rounds=2).accuracy > 0.5)
    True
    """

    takes_newcomers: ClassVar[bool] = True
    members: ClassVar[int] = 1  # models whose outputs are added; above 1 a run's model is such a sum (models/sums.py)

    local_steps: int = 20
    learning_rate: float = 0.1
    momentum: float = 0.9
    optimiser: str = "sgd"  # a name of protocol/task.py; those below are options of it
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 0.0  # 0: gradients are not clipped
    batch_size: int = 16
    fraction_train: float = 1.0
    batch_norm: str = "average"  # a key of BUFFER_SOURCES
    label_prior: str = "model"  # "device": devices correct centers to their own label counts (label_totals.py)
    server: ServerOptions = SERVER_DEFAULTS  # its fields are settings of the method, without a prefix

    def __post_init__(self) -> None:
        check_range("local-steps", self.local_steps, low=1)
        check_range("learning-rate", self.learning_rate, low=0.0)
        self._check_optimiser()
        check_range("batch-size", self.batch_size, low=1, high=65_536)
        check_range("fraction-train", self.fraction_train, low=1e-9, high=1.0)
        check_choice("batch-norm", self.batch_norm, tuple(BUFFER_SOURCES))
        check_choice("label-prior", self.label_prior, LABEL_PRIORS)
        if self.label_prior == "device" and self.server.privacy_noise:
            raise ConfigError(
                "label-prior device with privacy-noise: the server would learn each device's label counts",
                hint="set label-prior = model, or privacy-noise = 0; label counts are sent without noise",
            )
        if self.server.secure != "off":
            if self.label_prior == "device":
                raise ConfigError(
                    "label-prior device with secure: the server would learn each device's label counts",
                    hint="set label-prior = model",
                )
            plan = plan_of(self, {})  # refuses a method that needs single updates
            if self.server.privacy_noise:
                check_noisy(self, plan)
            if self.server.secure == "updates+membership":
                check_hidden(self, plan)

    def begin(self, model: Flat, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> State:  # noqa: ARG002 - the interface's
        """The common model as the only center; no device has a center yet."""
        return State(centers=model[None].copy())

    def sum_plan(self, fleet: Fleet) -> SumPlan:  # noqa: ARG002 - methods use it
        """How the method works on sums of devices (`secure`). Raises ConfigError: this one needs single updates."""
        raise single_updates(self, "it compares the devices' updates on the server")

    def asynchronous_plan(self, fleet: Fleet) -> AsynchronousPlan:  # noqa: ARG002 - methods use it
        """How the method works without rounds. Raises ConfigError: this one needs the replies of a whole round."""
        raise whole_rounds(type(self).__name__, "it compares the replies of a whole round")

    @property
    def task_optimiser(self) -> Optimiser | None:
        """What tasks say of the optimiser: nothing for plain SGD, which every program's step has in it."""
        if self.optimiser == "sgd" and not (self.nesterov or self.weight_decay or self.clip_norm):
            return None
        options = {o: getattr(self, _SETTING_OF.get(o, o)) for o in OPTIMISERS[self.optimiser]}
        return Optimiser(name=self.optimiser, **options)

    def _check_optimiser(self) -> None:
        """Raise ConfigError for an option out of its range, or one that the optimiser does not have."""
        check_choice("optimiser", self.optimiser, tuple(OPTIMISERS))
        usual = {f.name: f.default for f in fields(LocalSgd)}
        for option in ("nesterov", *OPTION_RANGES):
            setting = _SETTING_OF.get(option, option)
            value, told = getattr(self, setting), setting.replace("_", "-")
            if option in OPTION_RANGES:
                low, high = OPTION_RANGES[option]
                check_range(told, value, low=low, high=high)
            if option not in OPTIMISERS[self.optimiser] and value != usual[setting]:
                others = [name for name, options in OPTIMISERS.items() if option in options]
                raise ConfigError(
                    f"{told} is {value}, and the optimiser {self.optimiser} has no such option",
                    hint=f"set optimiser = {' or '.join(others)}, or leave {told} out",
                )
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov with momentum 0", hint="set a momentum above 0, or leave nesterov out")

    @property
    def clusters_together(self) -> bool:
        """Whether a device's updates influence the assignment of other devices."""
        return False

    @property
    def serving(self) -> ServingOptions:
        """How devices evaluate models, in probes and when served."""
        return {"buffers": BUFFER_SOURCES[self.batch_norm]}

    def label_shares(self, state: State) -> Mapping[ClientId, Array]:
        """Client -> the share [K] of its training samples that each center was trained on; a client may be left out."""
        every = np.eye(len(state.centers))
        return {c: every[k] for c, k in state.assignment.items()}

    @property
    def compared_centers(self) -> int:
        """How many trained centers one probe names at most: `label-prior` sends the label totals of each."""
        return 1

    def predictor(self, state: State, who: ClientId | None) -> ServedModels:
        """The center of the device; the most common one for a device that has none."""
        return ((1.0, state.centers[serving_center(state.assignment, who)]),)

    def cohort(self, fleet: Fleet, rng: np.random.Generator) -> list[ClientId]:
        """The devices that a round asks, sorted: the share `fraction_train` of the fleet, by lot."""
        return sample_cohort(fleet, self.fraction_train, rng)

    def fit(  # noqa: PLR0913 - a task has these fields
        self,
        *,
        start: Flat | Literal["own"],
        seed: int,
        anchor: Flat | None = None,
        mu: float = 0.0,
        linear: Flat | None = None,
        init: Flat | None = None,
        steps: int | None = None,
        rows: str = "ones",
        slot: str = "main",
        upload: bool = True,
        center: int | None = None,
    ) -> Fit:
        """One device's task: SGD from `start`, pulled to `anchor` [schema.size] with strength `mu`; as `Fit` says.

        `steps`: None for `local_steps`.
        """
        optimiser = self.task_optimiser
        return Fit(
            start=start,
            init=init,
            anchor=anchor if mu > 0 else None,
            mu=mu,
            linear=linear,
            rows=rows,
            slot=slot,
            upload=upload,
            buffers="own" if self.batch_norm == "local" else "sent",
            steps=self.local_steps if steps is None else steps,
            lr=self.learning_rate,
            momentum=self.momentum if optimiser is None else 0.0,
            optimiser=optimiser,
            batch=self.batch_size,
            seed=seed,
            center=center,
        )

    def probe_centers(self, state: State, *want: str, prior: Sequence[float] | None = None, seed: int = 0) -> Probe:
        """A task: the quantities `want` of all centers on the device's training samples; as `Probe` says."""
        models = list(state.centers)
        return Probe(
            models=models,
            want=frozenset(want),
            label_totals=label_totals_of(state, models),
            prior=prior,
            batch=self.batch_size,
            seed=seed,
            **self.serving,
        )

    def check_pull(self, mu: float, who: str, *, setting: str) -> None:
        """Raise ConfigError for a proximal pull `mu` with which SGD diverges: learning-rate * mu > 2.

        A step of Adam is about the learning rate long, however strong the pull.
        """
        if self.optimiser == "sgd" and self.learning_rate * mu > MAX_PULL:
            raise ConfigError(
                f"the proximal pull of {who} is mu = {mu:.4g}; with learning-rate {self.learning_rate} it diverges",
                hint=f"learning-rate * mu must not exceed 2; lower `{setting}` or `learning-rate`",
            )


def merge_anchors(anchors: Array, mus: Sequence[float]) -> tuple[Flat | None, float]:
    """Anchors [s, p] with pulls [s] -> one anchor and one pull with the same gradient; (None, 0) without any pull."""
    strength = np.asarray(mus, dtype=np.float64)
    total = float(strength.sum())
    if not math.isfinite(total) or (strength < 0).any():
        raise ValueError(f"pulls must be finite and not negative, got {list(mus)}")
    if total == 0:
        return None, 0.0
    return (strength @ anchors / total).astype(anchors.dtype), total
