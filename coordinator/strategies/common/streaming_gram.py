"""What is compared of the devices that answer an exchange, gathered while they answer.

A `StreamingExchange` exchange (base.py) shows every accepted reply to `add_reply`, which turns it into a point [d] and
adds that to the Gram matrix; of the reply nothing else is kept. Whom nobody showed is seen at the end, so that what
comes out depends on the replies alone, not on who came when. Knows no center's number and no method.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from coordinator.clustering.gram import GramMatrix
from coordinator.strategies.base import Replies
from edge_client.protocol.task import F64, Array, ClientId, Flat, Reply


class StreamingGram:
    """Points about the mean of the `centers` [K, d], which are some of them, like the `remembered` ones.

    Whoever is `asked` has a row of the matrix from the beginning, in the order of names.
    """

    def __init__(
        self,
        centers: Array,
        remembered: Mapping[ClientId, Array],
        *,
        asked: Collection[ClientId],
        point: Callable[[Flat], Array],
    ) -> None:
        pivot = centers.mean(axis=0, dtype=np.float64).astype(centers.dtype)
        self._rows = {who: row for row, who in enumerate(sorted(asked))}
        first, last = len(asked), len(asked) + len(remembered)
        self._gram, self._point = GramMatrix(pivot, last + len(centers)), point
        names = enumerate(sorted(remembered), start=first)
        self._remembered = {who: self._gram.add(remembered[who], at=row) for row, who in names}
        self._centers = [self._gram.add(center, at=row) for row, center in enumerate(centers, start=last)]
        self._seen: set[ClientId] = set()

    def add_reply(self, who: ClientId, reply: Reply) -> None:
        """An accepted reply; one without a model has no point, and a second one of the same device is the first."""
        if reply.update is not None and who not in self._seen:
            if who not in self._rows:  # nobody asked
                self._rows[who] = self._gram.capacity
                self._gram.grow(self._gram.capacity + 1)
            self._gram.add(self._point(reply.update), at=self._rows[who])
            self._seen.add(who)

    def absent_clients(self, clients: Collection[ClientId]) -> list[ClientId]:
        """The remembered devices apart from these `clients`, sorted."""
        return [who for who in self._remembered if who not in clients]

    def matrix(self, clients: Sequence[ClientId], replies: Replies) -> F64:
        """The Gram matrix of these `clients`, of the absent remembered ones, and of the centers, in this order."""
        for who in clients:
            if who not in self._seen:
                self.add_reply(who, replies[who])  # read from a disk, perhaps
        past = [self._remembered[who] for who in self.absent_clients(clients)]
        return self._gram.submatrix(np.array([*(self._rows[who] for who in clients), *past, *self._centers]))


class StreamingDistances:
    """Squared distances to the `centers` [K, d] only, for who is not clustered anew; keeps K numbers of a device."""

    def __init__(self, centers: Array, *, point: Callable[[Flat], Array]) -> None:
        self._centers, self._point = centers, point
        self._seen: dict[ClientId, F64] = {}

    def add_reply(self, who: ClientId, reply: Reply) -> None:
        """As `StreamingGram.add_reply`."""
        if reply.update is not None and who not in self._seen:
            apart = (self._point(reply.update) - self._centers).astype(np.float64, copy=False)
            self._seen[who] = np.einsum("kd,kd->k", apart, apart)

    def squared_distances(self, clients: Sequence[ClientId], replies: Replies) -> F64:
        """[m, K] of these `clients`."""
        for who in clients:
            if who not in self._seen:
                self.add_reply(who, replies[who])  # read from a disk, perhaps
        return np.stack([self._seen[who] for who in clients])
