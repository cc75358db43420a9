"""fedcenters: the default, which is told neither a number of centers nor a method.

In its first `trial_rounds` rounds each device trains on four fifths of its training samples, and two questions are
decided by the loss on the rest:

    how many centers   k-means on the models of a center's devices (WeCFL, Ma 2022) proposes 2 to 12 parts. A device
                       compares means of others (`Split`). The center is split into the parts with the least loss, if
                       that is clearly below the loss without a split
    what is served     p(y | x) = s_1 p(y | x; c) + s_2 p(y | x; w) + s_3 p(y | x; v)

c is the device's center, w the model that it trained from there last (fine-tuning), and v its personal model, pulled to
the center (Ditto, Li 2021); w and v stay on the device. The shares s come from EM steps, as FedEM's (Marfoq 2021), one
in each round of the trial and ten in its last: r_i are the mean responsibilities of device i on its m_i held-out
samples, drawn to the fleet's since few samples say little:

    s_i = (m_i r_i + a r) / (m_i + a),    r = sum_i m_i r_i / sum_i m_i,    a = `prior_samples`

After the trial devices train on all samples. Members and shares stay, a share below 5 % is left out, and a device that
has none in v does not train it: with one center and no other share the method is FedAvg from then on. A device without
a center takes the one with the least loss on its training samples (IFCA) and trains when it is asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from coordinator.aggregation.centers import one_hot
from coordinator.clustering.gram import gram_matrix
from coordinator.clustering.kmeans import kmeans
from coordinator.clustering.label_matching import canonical_labels
from coordinator.strategies.base import Fleet, PartOfCohort, Round, ServedModels, State
from coordinator.strategies.common.assignment import centers_of_newcomers, newcomers, serving_center, told_losses
from coordinator.strategies.common.label_totals import label_counts, label_totals_of, with_label_totals
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.momentum import reset_velocity
from coordinator.strategies.common.representation import COMPARED, check_representation, represent_rows
from coordinator.strategies.common.sampling import TaskSeeds
from coordinator.strategies.common.setting_checks import RESTARTS, setting
from coordinator.strategies.common.updates import ClientUpdates, pack_by_client
from coordinator.strategies.held_out.evidence import best_candidate, blended_shares
from coordinator.strategies.numbered_fleet import all_of_one_center
from edge_client.errors import ConfigError
from edge_client.protocol.task import (
    F64,
    I64,
    MAX_MODELS,
    OWN_MODEL,
    Array,
    ClientId,
    Fit,
    Flat,
    OwnModel,
    Probe,
    Schema,
)

HELD_OUT = 5  # in the trial one of so many training samples is held out
NUMBERS_OF_PARTS = (2, 3, 4, 5, 6, 8, 10, 12)
LAST_STEPS = 10  # of EM, in the last round of the trial; one in those before
LEAST_SHARE = 0.05  # of a served model
TUNED_SLOT, PERSONAL_SLOT = "main", "personal"
FOLDS = 3  # of a part's devices
SERVED = 3  # models of a mixture


@dataclass(frozen=True)
class Split:
    """A way to part a center's m devices, with models that a device compares: means of others of its part.

    A mean that has the device's own fit in it is the nearer to that fit the smaller the part is, and the fit is served
    besides (w). So each part is dealt into folds, and there is a mean without each fold.
    """

    labels: I64  # [m]
    fold: I64  # [m]
    others: Array  # [parts * FOLDS, size]

    @classmethod
    def of(cls, labels: I64, mean: Callable[[F64], Array]) -> Split:
        """`mean` makes the means [K, size] of the devices in each column of [m, K]."""
        order, sizes = np.argsort(labels, kind="stable"), np.bincount(labels)
        rank = np.empty(len(labels), dtype=np.int64)
        rank[order] = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        part, fold = np.divmod(np.arange(len(sizes) * FOLDS), FOLDS)
        inside = (labels[:, None] == part) & ((rank % FOLDS)[:, None] != fold)
        return cls(labels, rank % FOLDS, mean(inside.astype(np.float64)))

    def is_alone(self, i: int) -> bool:
        """Whether a device has a part for itself."""
        return int((self.labels == self.labels[i]).sum()) == 1

    def model(self, i: int) -> Flat:
        """What a device compares that is not alone in its part."""
        model: Flat = self.others[self.labels[i] * FOLDS + self.fold[i]]
        return model


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The devices of one center that answered, and the splits of it that they compare; the first has a single part."""

    center: int
    start: Flat
    updates: ClientUpdates
    splits: Sequence[Split]

    def models(self, i: int) -> list[Flat]:
        """What device i compares; one that is alone in its part gains nothing by the split."""
        first, *others = self.splits
        whole = first.model(i)
        return [whole, *(whole if split.is_alone(i) else split.model(i) for split in others)]


@dataclass(frozen=True, kw_only=True, repr=False)
class FedCenters(LocalSgd):
    """As many centers as held-out losses ask for; each device is served its own mixture of center and own models."""

    trial_rounds: int = setting(8, "first rounds, in which a fifth of the training samples is held out; 0: none", low=0)
    most_centers: int = setting(MAX_MODELS, "centers at most, 1 to 16", low=1, high=MAX_MODELS)
    least_gain: float = setting(
        0.2, "share of the held-out loss that more centers must save, 0 to 1", low=0.0, high=1.0
    )
    prior_samples: float = setting(
        20.0, "how many held-out samples the fleet's mean shares count as, beside a device's own", low=0.0
    )
    lam: float = setting(0.1, "weight of the pull of the personal model to the center", low=0.0)  # Ditto's
    representation: str = setting("classifier", COMPARED)
    restarts: int = setting(20, **RESTARTS)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_representation(self.representation)
        self.check_pull(self.lam, "every device", setting="lam")
        if self.server.privacy_noise and self.trial_rounds:
            raise ConfigError(
                "privacy-noise with a trial: each proposed split would be one more release",
                hint="set trial-rounds = 0, which is FedAvg, or use another method",
            )

    @property
    def clusters_together(self) -> bool:
        """In the trial k-means compares the devices' updates."""
        return self.trial_rounds > 0

    @property
    def compared_centers(self) -> int:
        """A device that comes after a split compares all centers; its own two models stand in for the center."""
        return max(self.most_centers, SERVED) if self.trial_rounds else 1

    def begin(self, model: Flat, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> State:  # noqa: ARG002 - the interface's
        return State(centers=model[None].copy(), assignment=all_of_one_center(fleet))

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """A fit from the own center, then of the personal model; in the trial exchanges of losses besides."""
        number = int(state.extra.get("round", np.array(0))) + 1
        cohort, trial = self.cohort(fleet, rng), number <= self.trial_rounds
        held = {c: fleet[c] // HELD_OUT if trial else 0 for c in cohort}
        new, usual = newcomers(cohort, state), serving_center(state.assignment, None)
        mine = {c: state.assignment.get(c, usual) for c in cohort if c not in new}
        seeds, begun = TaskSeeds.from_rng(rng), state.centers
        fits = {c: self.fit(start=begun[k], seed=seeds.of(c), center=k, rows=_rows(held[c])) for c, k in mine.items()}
        replies = yield {**fits, **{c: self.probe_centers(state, "loss", least=True) for c in new}}
        placed = {**state.assignment, **mine, **centers_of_newcomers(new, replies)}
        state = replace(state, assignment=placed) if placed != state.assignment else state
        updates = ClientUpdates.from_replies(replies, schema.size)
        if not updates.clients:
            return state
        R = one_hot(np.array([mine[c] for c in updates.clients], dtype=np.int64), len(begun))
        centers = self.server.aggregate(begun, updates, R, updates.n, schema)
        state = replace(state, centers=centers, extra={**state.extra, "round": np.array(number)})
        if trial:
            state = yield from self._grown(
                state, list(self._proposals(state, begun, updates, schema, rng)), held, schema
            )
        personal = {
            c: self._personal(begun[mine[c]], seeds.of(c), held[c])
            for c in updates.clients
            if trial or self._shares(state, c)[-1] > 0
        }
        if personal:
            yield PartOfCohort(personal, of=len(cohort))
        last = number == self.trial_rounds
        for _ in range(LAST_STEPS if last else int(trial)):
            state = yield from self._weighed(state, {c: held[c] for c in updates.clients})
        return state

    def predictor(self, state: State, who: ClientId | None) -> ServedModels:
        """The device's mixture, by the fleet's shares for one that has none; before any are known the center alone."""
        center = state.centers[serving_center(state.assignment, who)]
        if who is None:
            return ((1.0, center),)
        served = zip(self._shares(state, who).tolist(), _parts(center), strict=True)
        return tuple((share, part) for share, part in served if share > 0)

    def _shares(self, state: State, who: ClientId) -> F64:
        """[3] of the models that a device is served."""
        known = state.extra.get(f"share/{who}", state.extra.get("fleet-share", np.array([1.0, 0.0, 0.0])))
        kept = np.where(known < LEAST_SHARE, 0.0, known)
        shares: F64 = kept / kept.sum()
        return shares

    def _personal(self, center: Flat, seed: int, held: int) -> Fit:
        return self.fit(
            start=OWN_MODEL,
            init=center,
            anchor=center,
            mu=self.lam,
            rows=_rows(held),
            slot=PERSONAL_SLOT,
            upload=False,
            seed=seed,
        )

    def _probe(
        self,
        models: Sequence[Flat | OwnModel],
        held: int,
        want: str,
        state: State,
        prior: Sequence[float] | None = None,
    ) -> Probe:
        """A quantity on the samples that `all-but:held` left out; centers of the state are corrected as when served."""
        return Probe(
            models=models,
            want=frozenset({want}),
            label_totals=label_totals_of(state, models),
            prior=prior,
            limit=held,
            seed=0,
            batch=self.batch_size,
            **self.serving,
        )

    def _proposals(
        self, state: State, begun: Array, updates: ClientUpdates, schema: Schema, rng: np.random.Generator
    ) -> Iterator[Proposal]:
        """For each center the splits into as many parts as there is room for; none of a center with few devices."""
        room = self.most_centers - len(state.centers) + 1
        for k, start in enumerate(begun):
            members = [i for i, c in enumerate(updates.clients) if state.assignment[c] == k]
            if len(members) < 2 or room < 2:  # noqa: PLR2004 - what can be split
                continue
            some = ClientUpdates(
                tuple(updates.clients[i] for i in members), updates.rows.select(members), updates.n[members]
            )
            points = represent_rows(some.rows, schema, self.representation, less=start)
            matrix = gram_matrix(points, np.zeros(points.width, begun.dtype))
            labelled = [np.zeros(len(members), dtype=np.int64)]
            for parts in (n for n in NUMBERS_OF_PARTS if n <= min(len(members), room)):
                labels = kmeans(matrix, parts, rng, weights=some.n, restarts=self.restarts).labels
                labels = canonical_labels(labels)
                if labels.max() + 1 == parts:
                    labelled.append(labels)
            if len(labelled) > 1:
                mean = partial(self._mean, start, some, schema=schema)
                yield Proposal(center=k, start=start, updates=some, splits=[Split.of(one, mean) for one in labelled])

    def _mean(self, start: Flat, updates: ClientUpdates, R: Array, *, schema: Schema) -> Array:
        """[K, size] the means of the devices in each column of R [m, K]."""
        return self.server.aggregate(np.tile(start, (R.shape[1], 1)), updates, R, updates.n, schema)

    def _grown(
        self, state: State, proposals: Sequence[Proposal], held: Mapping[ClientId, int], schema: Schema
    ) -> Round:
        """The state after the splits that held-out losses ask for.

        A device of a split center that is on no side of it is placed when it is asked again.
        """
        asked = {
            c: self._probe(one.models(i), held[c], "loss", state)
            for one in proposals
            for i, c in enumerate(one.updates.clients)
            if held[c]
        }
        if not asked:
            return state
        told, before = told_losses((yield PartOfCohort(asked, of=len(held)))), state
        for one in proposals:
            who = [c for c in one.updates.clients if c in told]
            if not who:
                continue
            m = np.array([held[c] for c in who], dtype=np.float64)
            best = best_candidate(np.stack([told[c] for c in who]), m, self.least_gain)
            labels = one.splits[best].labels
            parts = int(labels.max()) + 1
            if best and len(state.centers) + parts - 1 <= self.most_centers:
                means = self._mean(one.start, one.updates, one_hot(labels, parts), schema=schema)
                state = _split(state, one, labels, means)
        if state is before or not label_counts(state):
            return state
        return with_label_totals(state, self.label_shares(state), before)  # shares are those of corrected centers

    def _weighed(self, state: State, held: Mapping[ClientId, int]) -> Round:
        """One EM step of the shares of each device that has held-out samples."""
        usual = state.extra.get("fleet-share", np.full(3, 1 / 3))
        asked = {
            c: self._probe(
                _parts(state.centers[state.assignment[c]]),
                m,
                "posterior",
                state,
                prior=state.extra.get(f"share/{c}", usual).tolist(),
            )
            for c, m in held.items()
            if m and c in state.assignment
        }
        replies = (yield PartOfCohort(asked, of=len(held))) if asked else {}
        told = {c: r.posterior for c, r in sorted(replies.items()) if r.posterior is not None}
        if not told:
            return state
        shares, fleet = blended_shares(told, held, self.prior_samples)
        return replace(state, extra={**state.extra, **pack_by_client("share", shares), "fleet-share": fleet})


def _rows(held: int) -> str:
    return f"all-but:{held}" if held else "ones"


def _parts(center: Flat) -> tuple[Flat | OwnModel, ...]:
    """What a device may be served; the center stands in for a model that it does not keep."""
    return center, OwnModel(slot=TUNED_SLOT, init=center), OwnModel(slot=PERSONAL_SLOT, init=center)


def _split(state: State, proposal: Proposal, labels: I64, means: Array) -> State:
    """Part 0 keeps the center's number, the others get new ones."""
    k, fresh = proposal.center, len(state.centers)
    centers = np.concatenate([state.centers, means[1:]])
    centers[k] = means[0]
    numbers = [k, *range(fresh, fresh + len(means) - 1)]
    stay = {c: number for c, number in state.assignment.items() if number != k}
    sides = {c: numbers[label] for c, label in zip(proposal.updates.clients, labels, strict=True)}
    return State(centers=centers, assignment={**stay, **sides}, extra=reset_velocity(state.extra, k))
