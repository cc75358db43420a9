"""A tree of splits as plain objects, with FedAvg in each leaf: what CFL, FL+HC and FedGroup have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edge_client.data.dataset import Dataset
from edge_client.protocol.task import F64, ClientId, Flat
from tests.support.methods import MethodWorld
from tests.support.plain_loops import SAME, STEPS, PlainMomentum, fit, mean, seeds


@dataclass
class Node:
    """A split: the model that its devices were compared at, and where each branch of this direction leads."""

    model: Flat
    directions: list[Flat]
    leads: list[Node | int]


@dataclass
class PlainTree:
    """Leaves with a model each, and the splits that lead to them."""

    fleet: MethodWorld
    beta: float = 0.0
    only: slice = field(default_factory=lambda: slice(None))  # the compared parameters
    own: dict[ClientId, int] = field(default_factory=dict)
    root: Node | int = 0

    def __post_init__(self) -> None:
        self.data: dict[ClientId, Dataset] = {c: local.train for c, local in self.fleet.devices.local.items()}
        self.centers = [self.fleet.state.centers[0].copy()]
        self.coasting = [PlainMomentum(self.beta)]

    def split(self, leaf: int, sides: dict[ClientId, int], moves: dict[ClientId, Flat]) -> None:
        """Side 0 keeps the leaf's number; a device of the leaf on no side has none any more."""
        numbers = [leaf, *range(len(self.centers), len(self.centers) + max(sides.values()))]
        directions = []
        for side in range(len(numbers)):
            units = [m / (np.linalg.norm(m) or 1.0) for m in (moves[c][self.only] for c in sides if sides[c] == side)]
            directions.append(np.mean(units, axis=0))
        node = Node(self.centers[leaf], directions, [*numbers])
        self.root = _replaced(self.root, leaf, node)
        self.centers += [self.centers[leaf].copy() for _ in numbers[1:]]
        self.coasting[leaf] = PlainMomentum(self.beta)
        self.coasting += [PlainMomentum(self.beta) for _ in numbers[1:]]
        self.own = {c: k for c, k in self.own.items() if k != leaf} | {c: numbers[s] for c, s in sides.items()}

    def train(
        self, gone: set[ClientId], *, exchange: int = 0, steps: int = STEPS
    ) -> tuple[dict[ClientId, Flat], dict[ClientId, int]]:
        """The fits of the round that was played, and from which leaf each device began; who answered stays there."""
        found, exchange = self.find(exchange, gone, steps)
        told = seeds(self.fleet, exchange)
        leaf = {c: self.own[c] if c in self.own else found[c] if found else 0 for c in told}
        fits = {c: fit(self.centers[leaf[c]], self.data[c], told[c]) for c in told if c not in gone}
        self.own |= {c: leaf[c] for c in fits}
        return fits, leaf

    def find(self, exchange: int, gone: set[ClientId], steps: int = STEPS) -> tuple[dict[ClientId, int], int]:
        """Where devices without a leaf get to from exchange `exchange` on, and the number of the one after it."""
        at: dict[ClientId, Node | int] = {}
        while True:
            asked = self.fleet.exchanges[exchange] if exchange < len(self.fleet.exchanges) else {}
            walking = (
                {c: n for c, n in at.items() if isinstance(n, Node)}
                if at
                else {c: self.root for c in asked if c not in self.own and isinstance(self.root, Node)}
            )
            if not walking:
                return {c: n for c, n in at.items() if isinstance(n, int)}, exchange
            assert sorted(walking) == sorted(asked)
            at = {c: n for c, n in at.items() if isinstance(n, int)}
            told = seeds(self.fleet, exchange)
            for c, node in walking.items():
                if c not in gone and isinstance(node, Node):
                    move = (fit(node.model, self.data[c], told[c], steps=steps) - node.model)[self.only]
                    cosine = [float(move @ d / np.linalg.norm(d)) if d.any() else 0.0 for d in node.directions]
                    at[c] = node.leads[int(np.argmax(cosine))]
            exchange += 1

    def average(self, fits: dict[ClientId, Flat]) -> None:
        for k, old in enumerate(list(self.centers)):
            if mine := [c for c in fits if self.own[c] == k]:
                new = mean([fits[c] for c in mine], [float(len(self.data[c])) for c in mine])
                self.centers[k] = self.coasting[k].move(old, new)

    def check(self) -> None:
        np.testing.assert_allclose(self.fleet.state.centers, np.stack(self.centers), rtol=0, atol=SAME)
        assert self.fleet.state.assignment == self.own


def _replaced(node: Node | int, leaf: int, new: Node) -> Node | int:
    if isinstance(node, Node):
        node.leads = [_replaced(child, leaf, new) for child in node.leads]
        return node
    return new if node == leaf else node


def cosines(moves: Sequence[Flat]) -> F64:
    units = np.stack([m / (np.linalg.norm(m) or 1.0) for m in moves])
    return np.asarray(units @ units.T)
