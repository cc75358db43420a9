"""FeSEM (Xie 2021): K centers by stochastic expectation maximisation; each device belongs to the nearest center.

    min  sum_i alpha_i L(w_i) + (lam / m) sum_k sum_i r_ik ||w_i - c_k||^2            (eq. 5)
    E    r_ik = 1 if k = argmin_j ||w_i - c_j||^2
    M    c_k  = sum_i r_ik w_i / sum_i r_ik                                            (eq. 9, devices count equally)
    w_i  starts at its center, then SGD on f_i(w) + (mu_i / 2) ||w - c_k||^2, mu_i = 2 lam n_mean / n_i   (eq. 7)

In the first round every device trains from one common start, and the best of 20 k-means runs on these models gives the
centers. Later a device without a center begins at the one of least loss on its training samples, as in IFCA: of a model
from the common start the distances to the centers tell its age as well as its data. With start "loss" random groups
give the centers, which devices sort by their losses (loss_starts.py), and for three rounds devices choose by loss,
until the centers have moved far enough apart. A center without devices keeps its values. Clusters that are computed
anew get the numbers of the nearest old centers, so a center keeps its number.
representation.py says which parameters are compared: the public code takes the last layer, the paper all parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregation.centers import one_hot
from coordinator.clustering.gram import squared_distances
from coordinator.clustering.kmeans import centroid_distances, kmeans
from coordinator.clustering.label_matching import canonical_labels, match_labels
from coordinator.strategies.base import Fleet, Replies, Round, State, StreamingExchange
from coordinator.strategies.common.absent_points import most_points, recall_points, remember_points
from coordinator.strategies.common.assignment import centers_of_newcomers, choose_by_loss, newcomers
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.loss_starts import ClearStarts
from coordinator.strategies.common.representation import COMPARED, check_representation, represent
from coordinator.strategies.common.sampling import TaskSeeds
from coordinator.strategies.common.setting_checks import RESTARTS, WEIGHTS, described, setting
from coordinator.strategies.common.streaming_gram import StreamingDistances, StreamingGram
from coordinator.strategies.common.updates import ClientUpdates
from coordinator.strategies.numbered_fleet import mean_samples, reassigned
from coordinator.strategies.plans.asynchronous_plan import BY_LOSS_KEY, AsynchronousPlan, whole_rounds
from coordinator.strategies.plans.sum_plan import SORTS, SumPlan, single_updates
from edge_client.errors import ConfigError
from edge_client.protocol.task import F64, I64, MAX_MODELS, Array, ClientId, Fit, Flat, Reply, Schema

ROUNDS_BY_LOSS = 3  # by then the centers of random groups have come apart
Clusters = tuple[I64, NDArray[np.bool_]]  # labels [n], and which points count for a center [n]


@dataclass(frozen=True, kw_only=True, repr=False)
class FeSEM(LocalSgd):
    """`clusters` models for the fleet; lam = 0 leaves out the proximal pull, as the public code does."""

    clusters: int = field(default=3, kw_only=False, metadata=described("number of centers", low=1))
    lam: float = setting(  # gives an average device mu = 0.1, as the papers' FedProx baseline has
        0.05, "weight of the pull to the center; an average device has mu = 2 lam", low=0.0
    )
    restarts: int = setting(20, **RESTARTS)  # the paper's
    representation: str = setting("classifier", COMPARED)
    e_step: str = setting(  # anew: matched to the old centers, as WeCFL's code does
        "nearest", '"nearest" center, or "k-means" anew in every round', choices=("nearest", "k-means")
    )
    weights: str = setting("equal", **WEIGHTS)  # "samples": n_i, in k-means and in the M-step
    hysteresis: float = setting(
        0.0, "share h, 0 to 0.99: a device moves only below (1 - h) of its old distance", low=0.0, high=0.99
    )
    start: str = setting(  # "loss": as with secure, whose server sees no points (secure-start)
        "k-means",
        'how centers begin: "k-means" of the first models, or "loss" of random groups',
        choices=("k-means", "loss"),
    )
    max_age: int = setting(  # needs fraction-train below 1
        5, "rounds for which k-means remembers a device that was not asked", low=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_representation(self.representation)
        self.check_pull(2 * self.lam, "an average device", setting="lam")
        devices_choose = self.start == "loss" or self.server.secure != "off"
        if devices_choose and self.clusters > MAX_MODELS:
            setting = "start loss" if self.start == "loss" else f"secure {self.server.secure}"
            told = f"clusters is {self.clusters}, and with {setting} a device compares all centers"
            raise ConfigError(told, hint=f"use at most {MAX_MODELS} clusters, or start = k-means and secure = off")

    @property
    def clusters_together(self) -> bool:
        """k-means compares the devices' updates."""
        return True

    @property
    def compared_centers(self) -> int:
        """All: newcomers do, and with start "loss" the first rounds; one where a probe has no room for all."""
        return self.clusters if self.clusters <= MAX_MODELS else 1

    def begin(self, model: Flat, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> State:  # noqa: ARG002 - the interface's
        return State(centers=np.tile(model, (self.clusters, 1)), extra={"start": model.copy()})

    def sum_plan(self, fleet: Fleet) -> SumPlan:
        """The E-step on the device. Raises ConfigError for one that compares the devices' models on the server."""
        if self.e_step != "nearest":
            raise single_updates(self, f"e-step {self.e_step} compares the devices' models", "set e-step = nearest")
        if self.representation not in ("classifier", "all"):
            hint = "set representation = classifier, or all"
            raise single_updates(self, f"a device does not compute representation {self.representation}", hint)
        tells = self.server.secure_start == "k-means"
        return SumPlan(
            choose="nearest",
            weigh=self.weights,
            first="k-means" if tells else "groups",
            sorts=0 if tells or self.server.privacy_noise else SORTS,  # with noise each sum costs epsilon
            by_loss=0 if tells else ROUNDS_BY_LOSS,
            pulls=self._pulls(fleet, fleet),
            representation=self.representation,
            hysteresis=self.hysteresis,
            served="center",
        )

    def asynchronous_plan(self, fleet: Fleet) -> AsynchronousPlan:
        """Each update goes to the nearest of the newest centers. Raises ConfigError for k-means in every round."""
        if self.e_step != "nearest":
            why = "the Gram matrix of k-means is that of a whole round"
            raise whole_rounds(f"e-step {self.e_step}", why, "set e-step = nearest, or leave out concurrency")
        return AsynchronousPlan(
            choose="nearest",
            weigh=self.weights,
            pulls=self._pulls(fleet, fleet),
            distances=self._distances,
            hysteresis=self.hysteresis,
        )

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """One exchange, then E and M. A device without a center tells its losses in it, where others have one.

        In the first round all train from the common start, without a pull.
        """
        if self.start == "loss" and int(state.extra.get(BY_LOSS_KEY, ROUNDS_BY_LOSS)):
            return (yield from self._round_by_loss(state, schema, fleet, rng))
        cohort = self.cohort(fleet, rng)
        if state.assignment and self.clusters == 1:
            state = replace(state, assignment=reassigned(fleet, state.assignment, dict.fromkeys(cohort, 0)))
        new = newcomers(cohort, state)
        trains = [c for c in cohort if c not in new]
        mus = self._pulls(fleet, trains)
        seeds, watch = TaskSeeds.from_rng(rng), self._watch(state, schema, fleet, trains)
        fits = {c: self._task(state, c, mus[c], seeds.of(c)) for c in trains}
        replies = yield StreamingExchange(
            {**fits, **{c: self.probe_centers(state, "loss", least=True) for c in new}}, watch.add_reply
        )
        chosen = centers_of_newcomers(new, replies)
        updates = ClientUpdates.from_replies(replies, schema.size)
        if not updates.clients:
            return replace(state, assignment=reassigned(fleet, state.assignment, chosen)) if chosen else state
        labels, counts = self._e_step(state, updates, replies, watch, fleet, rng)
        R = one_hot(labels, self.clusters) * counts[:, None]
        centers = self._m_step(state.centers, updates, R, self._weights(updates.n), schema)
        chosen |= {c: int(k) for c, k in zip(updates.clients, labels, strict=True)}
        extra = state.extra
        if self.e_step == "k-means" and self.fraction_train < 1:
            point = partial(self._point, state, schema)
            most = most_points(point(state.centers[0]).size)
            points = {c: point(row).copy() for c, row in zip(updates.clients[:most], updates.rows, strict=False)}
            extra = remember_points(extra, points, max_age=self.max_age)
        return State(centers=centers, assignment=reassigned(fleet, state.assignment, chosen), extra=extra)

    def _round_by_loss(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """A round in which devices choose the center of least loss; the first one begins with the centers' start."""
        if BY_LOSS_KEY not in state.extra:
            begun = yield from self._first_centers(state, schema, fleet, rng)
            if begun is state:
                return state
            state = begun
        cohort, seeds = self.cohort(fleet, rng), TaskSeeds.from_rng(rng)
        replies = yield {c: self.probe_centers(state, "loss", seed=seeds.of(c), least=True) for c in cohort}
        chosen = choose_by_loss(replies, rng)
        left = np.array(int(state.extra.get(BY_LOSS_KEY, ROUNDS_BY_LOSS)) - 1)
        state = replace(
            state,
            assignment=reassigned(fleet, state.assignment, chosen),
            extra={**state.extra, BY_LOSS_KEY: left},
        )
        mus = self._pulls(fleet, chosen)
        replies = yield {c: self._task(state, c, mus[c], seeds.of(c)) for c in chosen}
        updates = ClientUpdates.from_replies(replies, schema.size)
        R = one_hot(np.array([chosen[c] for c in updates.clients], dtype=np.int64), self.clusters)
        return replace(state, centers=self._m_step(state.centers, updates, R, self._weights(updates.n), schema))

    def _first_centers(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        starts = ClearStarts(
            method=self,
            schema=schema,
            fleet=fleet,
            mean=partial(self._m_step, schema=schema),
            by_samples=self.weights == "samples",
            pulls=self._pulls(fleet, fleet),
            representation=self.representation,
        )
        return (yield from starts.round(state, rng))

    def _pulls(self, fleet: Fleet, clients: Iterable[ClientId]) -> dict[ClientId, float]:
        """mu_i = 2 lam n_mean / n_i of these clients, n_mean over the whole fleet; small devices are pulled harder.

        Each is at most the greater of 2 lam and 1 / learning-rate (to the center in one step); above, SGD diverges.
        """
        mean, average = mean_samples(fleet), 2 * self.lam
        most = max(average, 1 / self.learning_rate) if self.learning_rate else math.inf
        return {c: min(average * mean / fleet[c], most) for c in clients}

    def _task(self, state: State, who: ClientId, mu: float, seed: int) -> Fit:
        if who not in state.assignment:
            return self.fit(start=state.extra["start"], seed=seed)
        number = state.assignment[who]
        center = state.centers[number]
        return self.fit(start=center, seed=seed, anchor=center, mu=mu, center=number)

    def _points(self, vectors: Array, state: State, schema: Schema) -> Array:
        return represent(vectors, schema, self.representation, pivot=state.extra["start"])

    def _weights(self, n: F64) -> F64:
        return n if self.weights == "samples" else np.ones(len(n))

    def _cluster(self, matrix: F64, a: F64, rng: np.random.Generator, init: I64 | None) -> Clusters:
        """Clusters of points with weights `a` [n] from their Gram matrix [n, n]; `init` are labels to begin with."""
        found = kmeans(matrix, self.clusters, rng, weights=a, restarts=self.restarts, init=init)
        return found.labels, np.ones(len(a), dtype=np.bool_)

    def _m_step(self, centers: Array, updates: ClientUpdates, R: F64, a: F64, schema: Schema) -> Array:
        return self.server.aggregate(centers, updates, R, a, schema)

    def _distances(self, state: State, schema: Schema, vector: Flat) -> F64:
        """Squared distances [K] of one model to the centers, as the E-step of a round measures them."""
        watch = StreamingDistances(
            self._points(state.centers, state, schema), point=partial(self._point, state, schema)
        )
        watch.add_reply("", Reply(n=1, update=vector))
        d2: F64 = watch.squared_distances([""], {})[0]
        return d2

    def _watch(
        self, state: State, schema: Schema, fleet: Fleet, asked: list[ClientId]
    ) -> StreamingGram | StreamingDistances:
        """The collector of streamed replies: a Gram matrix for k-means, or distances to the old centers."""
        old = self._points(state.centers, state, schema)
        point = partial(self._point, state, schema)
        if state.assignment and self.e_step == "nearest":
            return StreamingDistances(old, point=point)
        return StreamingGram(old, recall_points(state.extra, fleet, old.shape[1]), asked=asked, point=point)

    def _point(self, state: State, schema: Schema, vector: Flat) -> Array:
        point: Array = self._points(vector[None], state, schema)[0]
        return point

    def _e_step(
        self,
        state: State,
        updates: ClientUpdates,
        replies: Replies,
        watch: StreamingGram | StreamingDistances,
        fleet: Fleet,
        rng: np.random.Generator,
    ) -> Clusters:
        """The E-step: labels [m] of the devices that answered, and which of them count for a center [m]."""
        m, k = len(updates.clients), self.clusters
        before = np.array([state.assignment.get(c, -1) for c in updates.clients], dtype=np.int64)
        if isinstance(watch, StreamingDistances):
            d2 = watch.squared_distances(updates.clients, replies)
            return apply_hysteresis(d2.argmin(axis=1), d2, before, self.hysteresis), np.ones(m, dtype=np.bool_)
        matrix, past = watch.matrix(updates.clients, replies), watch.absent_clients(updates.clients)
        size, a = m + len(past), self._weights(np.concatenate([updates.n, [fleet[c] for c in past]]))
        if not state.assignment:
            labels, counts = self._cluster(matrix[:size, :size], a, rng, None)
            return canonical_labels(labels)[:m], counts[:m]
        nearest = squared_distances(matrix, np.arange(size), np.arange(size, size + k)).argmin(axis=1)
        labels, counts = self._cluster(matrix[:size, :size], a, rng, nearest)
        labels, d2 = _match_to_old_centers(labels, matrix, a * counts, k)
        return apply_hysteresis(labels[:m], d2[:m], before, self.hysteresis), counts[:m]


def apply_hysteresis(labels: I64, d2: F64, before: I64, hysteresis: float) -> I64:
    """New labels [m]; a device stays at its old center unless the new distance is below (1 - h) of the old one.

    `d2` [m, k] are squared distances, `before` [m] the old labels, -1 for a device without a center.
    """
    every = np.arange(len(labels))
    stays = (before >= 0) & (d2[every, labels] >= (1 - hysteresis) ** 2 * d2[every, before])
    return np.where(stays, before, labels)


def _match_to_old_centers(labels: I64, matrix: F64, a: F64, k: int) -> tuple[I64, F64]:
    """New labels [n] with the numbers of the nearest old centers, and squared distances [n, k] to the new centroids.

    The last k rows of the Gram matrix [n + k, n + k] are the old centers. A number without a cluster is at infinity.
    """
    n, labels = len(labels), canonical_labels(labels)
    used, weight = int(labels.max()) + 1, np.concatenate([a, np.zeros(k)])
    d2 = centroid_distances(matrix, np.concatenate([labels, np.zeros(k, np.int64)]), used, weight)
    names = match_labels(d2[n:])
    named = np.full((n, k), np.inf)
    named[:, names] = d2[:n]
    return names[labels], named
