"""CFL (Sattler, Mueller and Samek 2019), "FedCluster" in the seed papers: FedAvg that splits where updates disagree.

A leaf C with updates dw_i, alpha_i = n_i / n_C, is split when its mean update is small and single updates are large:

    || sum_i alpha_i dw_i || < eps_1   and   max_i || dw_i || > eps_2,

into the bipartition with the least cross = max cos(dw_i, dw_j) between its sides, if gamma < sqrt((1 - cross) / 2).
Absolute bounds depend on learning rate, steps and model; criterion "relative" takes eps_1 as a share of max_i ||dw_i||
and eps_2 as a share of the largest update of the first round.
Each leaf is examined in every round in which at least the share `coverage` of its devices answered. A device that did
not answer GONE times in a row, or left the fleet as many rounds ago, counts no longer until it answers. A fleet with
devices that are often away, or fraction-train below 1, needs a `coverage` below 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from coordinator.aggregation.centers import row_means
from coordinator.clustering.gram import gram_matrix
from coordinator.clustering.hierarchy import bipartition, cosines
from coordinator.strategies.base import State
from coordinator.strategies.common.center_tree import TreeOfCenters, split_leaf
from coordinator.strategies.common.sampling import part_of
from coordinator.strategies.common.setting_checks import WARM_UP, setting
from coordinator.strategies.common.updates import ClientUpdates, pack_by_client, unpack_by_client
from edge_client.protocol.task import I64, Array, ClientId, Flat, Schema

GONE = 3  # rounds in a row in which a device did not answer, or was not in the fleet
_MISSED = "missed"


@dataclass(frozen=True, kw_only=True, repr=False)
class CFL(TreeOfCenters):
    """A tree of models; the number of clusters is found, not given. eps_1 = 0 never splits and is FedAvg.

    The defaults come from training on digits: without groups the largest update falls below half of the first round's
    and the sides' directions agree; with groups it grows, and the mean falls below 0.4 of it in round 3.
    """

    criterion: str = setting(
        "relative", 'how eps_1 and eps_2 are meant: "relative" or "absolute"', choices=("relative", "absolute")
    )
    eps_1: float = setting(0.4, "bound of the mean update's norm; a share of the largest if relative", low=0)
    eps_2: float = setting(0.6, "bound of the largest update's norm; a share of the first round's if relative", low=0)
    gamma: float = setting(  # only sides that point apart; for mere noise, of cosine 0, the root is 0.707
        0.7, "how far the two sides must point apart, 0 to 1", low=0.0, high=1.0
    )
    warm_up: int = setting(2, **WARM_UP)
    smallest: int = setting(3, "fewest devices of a cluster that may still be split", low=2)  # the published code's
    coverage: float = setting(  # the others walk the tree when they return
        1.0, "share of a cluster's devices that must answer for a split", low=1e-9, high=1.0
    )
    linkage: str = setting(  # "single" is the paper's objective, "complete" what the published code does
        "single", 'how the two sides of a split are joined: "single" or "complete"', choices=("single", "complete")
    )

    def _grow(self, state: State, schema: Schema, updates: ClientUpdates, expected: Collection[ClientId]) -> State:
        state = _with_misses(state, updates.clients, expected)
        number = int(state.extra.get("round", np.zeros(1))[0]) + 1
        leaf = np.array([state.assignment[c] for c in updates.clients], dtype=np.int64)
        moved = zip(updates.rows, leaf, strict=True)
        norms = np.array([_norm((row - state.centers[k])[: schema.n_params]) for row, k in moved])
        scale = state.extra.get("scale", norms.max(keepdims=True))
        out = replace(state, extra={**state.extra, "round": np.array([number]), "scale": scale})
        if number <= self.warm_up:
            return out
        for k in range(len(state.centers)):
            mine = np.flatnonzero(leaf == k)
            if self._ready(state, k, len(mine)) and self._stalled(
                partial(_mean_move, state.centers[k], updates, mine, schema.n_params), norms[mine], scale[0]
            ):
                out = self._split(out, schema, updates, k, mine)
        return out

    def _ready(self, state: State, leaf: int, answered: int) -> bool:
        gone = {c for c, missed in unpack_by_client(state.extra, _MISSED).items() if missed >= GONE}
        members = sum(k == leaf and c not in gone for c, k in state.assignment.items())
        return answered >= max(self.smallest, part_of(self.coverage, members))

    def _stalled(self, mean: Callable[[], float], norms: Array, scale: float) -> bool:
        """The criterion; `mean` is the length of the mean update, for which all updates are read again."""
        largest, absolute = float(norms.max()), self.criterion == "absolute"
        least, most = (self.eps_2, self.eps_1) if absolute else (self.eps_2 * scale, self.eps_1 * largest)
        return largest > least and mean() < most

    def _split(self, state: State, schema: Schema, updates: ClientUpdates, leaf: int, mine: I64) -> State:
        points = self._points(updates.rows.select(mine), state.centers[leaf], schema)
        matrix = gram_matrix(points, np.zeros(points.width, updates.rows[0].dtype))
        sides, cross = bipartition(cosines(matrix), self.linkage)
        if self.gamma >= np.sqrt((1 - cross) / 2):
            return state
        clients = [updates.clients[i] for i in mine]  # of the whole fleet, not of the leaf
        return split_leaf(state, leaf, dict(zip(clients, sides.tolist(), strict=True)), points)


def _with_misses(state: State, answered: Collection[ClientId], expected: Collection[ClientId]) -> State:
    """The state with the rounds in a row that a device of a leaf missed, up to GONE; no entry where it missed none."""
    before = unpack_by_client(state.extra, _MISSED)
    heard = set(answered)
    now = {c: missed for c, missed in before.items() if c not in heard}
    for c in set(expected).intersection(state.assignment) - heard:
        now[c] = np.minimum(before.get(c, np.array(0)) + 1, GONE)
    kept = {name: value for name, value in state.extra.items() if not name.startswith(f"{_MISSED}/")}
    return replace(state, extra={**kept, **pack_by_client(_MISSED, now)})


def _mean_move(center: Flat, updates: ClientUpdates, mine: I64, n_params: int) -> float:
    """The length of the weighted mean of these updates."""
    deltas = updates.rows.select(mine).map(lambda row: (row - center)[:n_params], n_params)
    return _norm(row_means(deltas, updates.n[mine][:, None])[0])


def _norm(row: Array) -> float:
    wide = row.astype(np.float64, copy=False)
    return float(np.sqrt((wide * wide).sum()))
