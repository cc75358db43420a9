"""Local SGD: what all methods that train on devices share, as settings and as the tasks made from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import numpy as np

from coordinator.strategies.base import Fleet, ServedModels, ServingOptions, State
from coordinator.strategies.common.assignment import serving_center
from coordinator.strategies.common.label_totals import LABEL_PRIORS, label_counts, label_totals_of
from coordinator.strategies.common.method_value import MethodValue
from coordinator.strategies.common.sampling import sample_cohort
from coordinator.strategies.common.server_options import SERVER_DEFAULTS, ServerOptions
from coordinator.strategies.common.setting_checks import COHORT, setting
from coordinator.strategies.plans.asynchronous_plan import AsynchronousPlan, whole_rounds
from coordinator.strategies.plans.sum_plan import SumPlan, check_hidden, check_noisy, plan_of, single_updates
from edge_client.errors import ConfigError
from edge_client.protocol.task import (
    MAX_BATCH,
    OPTIMISERS,
    OPTION_RANGES,
    Array,
    ClientId,
    Fit,
    Flat,
    Optimiser,
    Probe,
    Schema,
)

MAX_PULL = 2.0  # of lr * mu; above it each step of plain SGD ends farther from the anchor than it began
_SETTING_OF = {"eps": "adam_eps"}  # `eps` alone is a setting of some methods
BUFFER_SOURCES: Mapping[str, str] = {  # `batch-norm` -> whose running statistics a device evaluates with
    "average": "sent",  # the center's, which are means by samples; devices continue them in training
    "local": "own",  # a device keeps its own (FedBN, Li et al. 2021)
    "batch": "batch",  # those of the device's training samples (AdaBN, Li et al. 2016)
}


def _option(name: str, default: float, words: str) -> float:
    """The setting for an option of an optimiser, with the limits that tasks have."""
    low, high = OPTION_RANGES[name]
    return setting(default, words, low=low, high=high)


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

    local_steps: int = setting(20, "steps of SGD in one fit", low=1)
    learning_rate: float = setting(0.1, "learning rate of these steps", low=0.0)
    momentum: float = _option("momentum", 0.9, "momentum of these steps, 0 to 1; velocity begins at zero in each fit")
    optimiser: str = setting(  # those below are its options
        "sgd", '"sgd", "adam" or "adamw"; what it remembers begins at zero in each fit', choices=tuple(OPTIMISERS)
    )
    nesterov: bool = setting(default=False, words="of sgd: Nesterov's momentum")
    beta1: float = _option("beta1", 0.9, "of adam and adamw: the share of the mean gradient that a step keeps")
    beta2: float = _option("beta2", 0.999, "of adam and adamw: the same of the mean square")
    adam_eps: float = _option("eps", 1e-8, "of adam and adamw: what is added to the root of the mean square")
    weight_decay: float = _option(
        "weight_decay", 0.0, "this times the weights is added to the gradient; adamw shrinks the weights by it instead"
    )
    clip_norm: float = _option("clip_norm", 0.0, "a gradient longer than this is shortened to it; 0 clips none")
    batch_size: int = setting(16, "samples in a step", low=1, high=MAX_BATCH)
    fraction_train: float = setting(1.0, **COHORT)
    batch_norm: str = setting(
        "average", 'running statistics that a device uses: "average", "local" or "batch"', choices=tuple(BUFFER_SOURCES)
    )
    label_prior: str = setting(
        "model", '"device" corrects centers to the device\'s own label counts, "model" does not', choices=LABEL_PRIORS
    )
    server: ServerOptions = setting(  # its fields are settings of the method, without a prefix
        SERVER_DEFAULTS, "ServerOptions: robust means, privacy noise and momentum of the centers"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_optimiser()
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
        """Raise ConfigError for an option that the optimiser does not have."""
        usual = {f.name: f.default for f in fields(LocalSgd)}
        for option in sorted({"nesterov", *OPTION_RANGES} - {*OPTIMISERS[self.optimiser]}):
            name = _SETTING_OF.get(option, option)
            value, told = getattr(self, name), name.replace("_", "-")
            if value != usual[name]:
                others = [other for other, options in OPTIMISERS.items() if option in options]
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
        """Client -> the share [K] of its training samples that each center was trained on; a client may be left out.

        Where no device is assigned to a center, all that took part have trained each.
        """
        if not state.assignment:
            return dict.fromkeys(label_counts(state), np.ones(len(state.centers)))
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

    def probe_centers(
        self, state: State, *want: str, prior: Sequence[float] | None = None, seed: int = 0, least: bool = False
    ) -> Probe:
        """A task: the quantities `want` of all centers on the device's training samples; as `Probe` says."""
        models = list(state.centers)
        return Probe(
            models=models,
            want=frozenset(want),
            label_totals=label_totals_of(state, models),
            prior=prior,
            batch=self.batch_size,
            seed=seed,
            least=least,
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
