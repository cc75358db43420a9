"""FeSEM (Xie 2021): K centers; each device belongs to the one nearest to its model, by stochastic EM.

    min  sum_i alpha_i L(w_i) + (lam / m) sum_k sum_i r_ik ||w_i - c_k||^2            (eq. 5)
    E    r_ik = 1 if k = argmin_j ||w_i - c_j||^2
    M    c_k  = sum_i r_ik w_i / sum_i r_ik                                            (eq. 9, devices count equally)
    w_i  starts at its center, then SGD on f_i(w) + (mu_i / 2) ||w - c_k||^2, mu_i = 2 lam n_mean / n_i   (eq. 7)

The first time, every device trains once from one common start, and the best of 20 k-means runs on these models gives
the centers. Distances are taken on the last layer, as in the public code ("classifier"), or on all parameters, as in
the paper ("all"). A center that nobody chose keeps its values, so centers keep their numbers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate import aggregate, one_hot
from coordinator.clustering.gram import gram, squared_distances
from coordinator.clustering.kmeans import kmeans
from coordinator.clustering.matching import canonical, match
from coordinator.strategies.base import Fleet, Mixture, Round, State
from coordinator.strategies.parts import LocalSgd, Seeds, Updates, check, one_of, representation, sample
from edge_client.protocol.task import ClientId, Fit, Flat, Schema

E_STEPS = ("nearest", "k-means")
WEIGHTS = ("equal", "samples")


@dataclass(frozen=True, kw_only=True)
class FeSEM(LocalSgd):
    """`clusters` models for the fleet; lam = 0 leaves out the proximal pull, which is what the public code does."""

    clusters: int = 3
    lam: float = 0.05  # pulls an average device with mu = 0.1, the strength of the papers' FedProx baseline
    restarts: int = 20  # the paper's; of the first clustering
    representation: str = "classifier"
    e_step: str = "nearest"  # "k-means": cluster anew each round and match to the old centers, as WeCFL's code does
    weights: str = "equal"  # "samples": the M-step weighs devices by n_i

    def __post_init__(self) -> None:
        """Refuse settings that cannot work for any fleet."""
        super().__post_init__()
        check("clusters", self.clusters, least=1)
        check("lam", self.lam, least=0.0)
        check("restarts", self.restarts, least=1)
        one_of("representation", self.representation, ("classifier", "all"))
        one_of("e-step", self.e_step, E_STEPS)
        one_of("weights", self.weights, WEIGHTS)

    def begin(self, model: Flat, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> State:  # noqa: ARG002 - the interface's
        """K copies of the common start; nobody is assigned before the first clustering."""
        self._pulls(fleet)
        return State(centers=np.tile(model, (self.clusters, 1)), extra={"start": model.copy()})

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """One exchange, then E and M. A device without a center trains from the common start, without a pull."""
        mus, cohort = self._pulls(fleet), sample(fleet, self.fraction_train, rng)
        seeds = Seeds.from_rng(rng)
        replies = yield {c: self._task(state, c, mus[c], seeds.of(c)) for c in cohort}
        updates = Updates.of(replies, schema.size)
        if not updates.clients:
            return state
        labels = self._e_step(state, schema, updates.rows, rng)
        a = updates.n if self.weights == "samples" else np.ones(len(labels))
        centers = aggregate(state.centers, updates.rows, one_hot(labels, self.clusters), a)
        chosen = {c: int(k) for c, k in zip(updates.clients, labels, strict=True)}
        return State(centers=centers, assignment={**state.assignment, **chosen}, extra=state.extra)

    def predictor(self, state: State, who: ClientId | None) -> Mixture:
        """The device's center; the most common one for a device that has none."""
        counts = Counter(state.assignment.values())
        usual = min(counts, key=lambda k: (-counts[k], k), default=0)
        return ((1.0, state.centers[state.assignment.get(who, usual) if who is not None else usual]),)

    def _pulls(self, fleet: Fleet) -> dict[ClientId, float]:
        """mu_i = 2 lam n_mean / n_i over the whole fleet; small devices are pulled harder."""
        mean = sum(fleet.values()) / max(1, len(fleet))
        mus = {c: 2 * self.lam * mean / n for c, n in fleet.items()}
        for c in sorted(mus):
            self.check_pull(mus[c], f"{c} ({fleet[c]} samples, the mean is {mean:.0f})", setting="lam")
        return mus

    def _task(self, state: State, who: ClientId, mu: float, seed: int) -> Fit:
        if who not in state.assignment:
            return self.fit(start=state.extra["start"], seed=seed)
        center = state.centers[state.assignment[who]]
        return self.fit(start=center, seed=seed, anchor=center, mu=mu)

    def _e_step(
        self, state: State, schema: Schema, rows: NDArray[np.floating], rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """[m] the center of every updated model. Old centers join the Gram matrix as rows; their mean is the pivot."""
        m, k = len(rows), self.clusters
        points = representation(np.concatenate([rows, state.centers]), schema, self.representation)
        matrix = gram(points, pivot=points[m:].mean(axis=0, dtype=np.float64).astype(points.dtype))
        nearest: NDArray[np.int64] = squared_distances(matrix, np.arange(m), np.arange(m, m + k)).argmin(axis=1)
        if not state.assignment:
            return canonical(kmeans(matrix[:m, :m], k, rng, restarts=self.restarts).labels)
        if self.e_step == "nearest":
            return nearest
        labels = kmeans(matrix[:m, :m], k, rng, restarts=self.restarts, init=nearest).labels
        return _as_before(labels, matrix, m, k)


def _as_before(labels: NDArray[np.int64], matrix: NDArray[np.float64], m: int, k: int) -> NDArray[np.int64]:
    """New labels [m] renamed after the old centers (rows m to m + k of the Gram matrix) that they lie next to."""
    labels = canonical(labels)
    member = one_hot(labels, k)[:, : labels.max() + 1]
    share = member / member.sum(axis=0)  # centroid j = share[:, j] @ points
    cross = matrix[m : m + k, :m] @ share
    own = np.einsum("ij,ij->j", share, matrix[:m, :m] @ share)
    distance = np.diag(matrix)[m : m + k, None] - 2 * cross + own
    return match(distance)[labels]
