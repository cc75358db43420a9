"""Methods whose centers are the leaves of a tree of splits: FedAvg in each leaf, and new devices walk down the tree.

A split stores the model at which its devices were compared and the mean direction of each branch's updates. A new
device trains once from that model, follows the branch with the greatest cosine to its own update, and so on to a leaf.
The tree is stored as plain arrays in `State.extra`. Subclasses decide when a leaf splits and how.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable
from dataclasses import dataclass, replace

import numpy as np

from coordinator.aggregation.centers import one_hot
from coordinator.aggregation.rows import Rows
from coordinator.clustering.cosine_kmeans import assign_by_cosine, unit_means
from coordinator.strategies.base import Exchange, Fleet, PartOfCohort, Replies, RequireAll, Round, State
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.momentum import reset_velocity
from coordinator.strategies.common.representation import COMPARED, check_representation, represent, represent_rows
from coordinator.strategies.common.sampling import TaskSeeds
from coordinator.strategies.common.setting_checks import setting
from coordinator.strategies.common.updates import ClientUpdates
from edge_client.protocol.task import I64, Array, ClientId, Fit, Flat, Schema

TaskFactory = Callable[[Flat, ClientId], Fit]


@dataclass(frozen=True, kw_only=True)
class SplitTree:
    """Splits with a model each, `models` [s, size], and the branches that lead from them.

    Branch e leads from split `edges[e, 0]` to `edges[e, 1]`, a split or, below zero, the leaf ~edges[e, 1]; the updates
    of its devices have the mean direction `directions[e]` [d]. Split 0 is the root; without splits leaf 0 is the fleet.
    """

    models: Array
    edges: I64
    directions: Array

    @staticmethod
    def from_state(state: State) -> SplitTree:
        extra = state.extra
        if "tree/models" not in extra:
            size = state.centers.shape[1]
            return SplitTree(models=np.empty((0, size)), edges=np.empty((0, 2), np.int64), directions=np.empty((0, 0)))
        return SplitTree(models=extra["tree/models"], edges=extra["tree/edges"], directions=extra["tree/directions"])

    def to_extra(self) -> dict[str, Array]:
        if not len(self.models):
            return {}
        return {"tree/models": self.models, "tree/edges": self.edges, "tree/directions": self.directions}

    def split(self, leaf: int, model: Flat, leaves: Iterable[int], directions: Array) -> SplitTree:
        """The leaf becomes a split with a branch to each of `leaves`; `directions` [len(leaves), d]."""
        number, old = len(self.models), self.edges.copy()
        old[old[:, 1] == ~leaf, 1] = number
        branches = np.array([[number, ~child] for child in leaves], dtype=np.int64)
        known = self.directions if number else directions[:0]
        return SplitTree(
            models=np.concatenate([self.models, model[None]]) if number else model[None].copy(),
            edges=np.concatenate([old, branches]),
            directions=np.concatenate([known, directions]),
        )

    def walk(
        self, clients: Iterable[ClientId], ask: TaskFactory, compared: Callable[[Array], Array], size: int, *, of: int
    ) -> Generator[Exchange, Replies, dict[ClientId, int]]:
        """The leaf of each client that answered all the way; one exchange per level. `compared`: deltas -> points.

        The clients are a part of a cohort that has `of`.
        """
        at = dict.fromkeys(clients, 0 if len(self.models) else ~0)
        while walking := {c: s for c, s in at.items() if s >= 0}:
            asked = PartOfCohort({c: ask(self.models[s], c) for c, s in walking.items()}, of=of)
            updates = ClientUpdates.from_replies((yield asked), size)
            at = {c: s for c, s in at.items() if s < 0}
            for c, row in zip(updates.clients, updates.rows, strict=True):
                point = compared((row - self.models[walking[c]])[None])
                branches = np.flatnonzero(self.edges[:, 0] == walking[c])
                at[c] = int(self.edges[branches[assign_by_cosine(point, self.directions[branches])[0]], 1])
        return {c: ~leaf for c, leaf in sorted(at.items())}


@dataclass(frozen=True, kw_only=True, repr=False)
class TreeOfCenters(LocalSgd):
    """FedAvg in every leaf. A subclass overrides `_prepare` or `_grow` to split leaves."""

    representation: str = setting("all", COMPARED)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_representation(self.representation)

    @property
    def clusters_together(self) -> bool:
        """Splits compare the devices' updates."""
        return True

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """New devices find their leaf; then the cohort trains, the tree may grow, each leaf takes its n-mean."""
        whole = self._needs_whole_fleet(state)
        cohort = sorted(fleet) if whole else self.cohort(fleet, rng)
        seeds = TaskSeeds.from_rng(rng)
        state = yield from self._prepare(state, schema, fleet, rng)
        leaf = {**state.assignment, **(yield from self._newcomers(state, schema, cohort, rng))}
        found = {c: leaf[c] for c in cohort if c in leaf}
        tasks = {c: self.fit(start=state.centers[k], seed=seeds.of(c), center=k) for c, k in found.items()}
        replies = yield RequireAll(tasks) if whole else tasks
        updates = ClientUpdates.from_replies(replies, schema.size)
        if not updates.clients:
            return state
        known = {**state.assignment, **{c: leaf[c] for c in updates.clients}}
        expected = tasks.keys() | {c for c in known if c not in fleet}
        grown = self._grow(replace(state, assignment=known), schema, updates, expected)
        labels = np.array([grown.assignment[c] for c in updates.clients], dtype=np.int64)
        centers = self.server.aggregate(grown.centers, updates, one_hot(labels, len(grown.centers)), updates.n, schema)
        return replace(grown, centers=centers)

    def _needs_whole_fleet(self, state: State) -> bool:  # noqa: ARG002
        """Whether the whole fleet trains in this round, and not a cohort."""
        return False

    def _prepare(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:  # noqa: ARG002
        """Exchanges before the round's training: none here."""
        yield from ()
        return state

    def _grow(self, state: State, schema: Schema, updates: ClientUpdates, expected: Collection[ClientId]) -> State:  # noqa: ARG002
        """The state with new leaves, before its centers move. Unchanged here.

        Each device of `updates` has a leaf; the others of `expected` did not answer, or have left the fleet.
        """
        return state

    def _first(self, model: Flat, seed: int) -> Fit:
        """The task of a device whose update will be compared with others."""
        return self.fit(start=model, seed=seed)

    def _compared(self, schema: Schema) -> Callable[[Array], Array]:
        return lambda deltas: represent(deltas, schema, self.representation)

    def _points(self, rows: Rows, model: Flat, schema: Schema) -> Rows:
        """What is compared of models that were trained from `model`."""
        return represent_rows(rows, schema, self.representation, less=model)

    def _newcomers(
        self, state: State, schema: Schema, cohort: Collection[ClientId], rng: np.random.Generator
    ) -> Generator[Exchange, Replies, dict[ClientId, int]]:
        new, seeds = [c for c in cohort if c not in state.assignment], TaskSeeds.from_rng(rng)
        tree = SplitTree.from_state(state)
        return (
            yield from tree.walk(
                new,
                lambda model, c: self._first(model, seeds.of(c)),
                self._compared(schema),
                schema.size,
                of=len(cohort),
            )
        )


def split_leaf(state: State, leaf: int, sides: dict[ClientId, int], points: Rows) -> State:
    """Split `leaf` by `sides`, client -> 0..k-1, whose compared updates are `points` in the clients' sorted order.

    Side 0 keeps the leaf's number, the others get new ones; all begin at the leaf's center, without velocity. A device
    of the leaf that is on no side becomes unassigned, and walks down the tree when it is asked again.
    """
    labels = np.array([sides[c] for c in sorted(sides)], dtype=np.int64)
    k, fresh = int(labels.max()) + 1, len(state.centers)
    leaves = [leaf, *range(fresh, fresh + k - 1)]
    model = state.centers[leaf]
    tree = SplitTree.from_state(state).split(leaf, model, leaves, unit_means(points, labels, k))
    stay = {c: number for c, number in state.assignment.items() if number != leaf}
    return State(
        centers=np.concatenate([state.centers, np.tile(model, (k - 1, 1))]),
        assignment={**stay, **{c: leaves[side] for c, side in sides.items()}},
        extra={**reset_velocity(state.extra, leaf), **tree.to_extra()},
    )
