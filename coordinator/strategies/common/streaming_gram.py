"""Products of the devices' points, computed while an exchange is open.

The driver passes each accepted reply of a `StreamingExchange` (base.py) to `add_reply`, which turns the update into a
point [d] and adds its products to the result; the update is not kept. Replies that were not streamed are read when the
exchange closes, so the result depends on the replies alone, not on their order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from coordinator.clustering.gram import GramMatrix
from coordinator.strategies.base import Replies
from edge_client.protocol.task import F64, Array, ClientId, Flat, Reply


class StreamingGram:
    """The Gram matrix of the devices' points, `remembered` points and `centers` [K, d], about the centers' mean.

    Each device in `asked` has its row of the matrix from the beginning, in the order of names.
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
        """Add an accepted reply; a reply without a model, or a second one of the same device, is ignored."""
        if reply.update is not None and who not in self._seen:
            if who not in self._rows:  # was not asked
                self._rows[who] = self._gram.capacity
                self._gram.grow(self._gram.capacity + 1)
            self._gram.add(self._point(reply.update), at=self._rows[who])
            self._seen.add(who)

    def absent_clients(self, clients: Collection[ClientId]) -> list[ClientId]:
        """The remembered devices that are not among these `clients`, sorted."""
        return [who for who in self._remembered if who not in clients]

    def matrix(self, clients: Sequence[ClientId], replies: Replies) -> F64:
        """The Gram matrix of these `clients`, of the absent remembered ones, and of the centers, in this order."""
        for who in clients:
            if who not in self._seen:
                self.add_reply(who, replies[who])  # may be read from disk
        past = [self._remembered[who] for who in self.absent_clients(clients)]
        return self._gram.submatrix(np.array([*(self._rows[who] for who in clients), *past, *self._centers]))


class StreamingDistances:
    """Squared distances of devices to the `centers` [K, d]; keeps K numbers of each device."""

    def __init__(self, centers: Array, *, point: Callable[[Flat], Array]) -> None:
        self._centers, self._point = centers, point
        self._seen: dict[ClientId, F64] = {}

    def add_reply(self, who: ClientId, reply: Reply) -> None:
        """As `StreamingGram.add_reply`."""
        if reply.update is not None and who not in self._seen:
            apart = (self._point(reply.update) - self._centers).astype(np.float64, copy=False)
            self._seen[who] = np.einsum("kd,kd->k", apart, apart)

    def squared_distances(self, clients: Sequence[ClientId], replies: Replies) -> F64:
        """[m, K] squared distances of these `clients`, float64."""
        for who in clients:
            if who not in self._seen:
                self.add_reply(who, replies[who])  # may be read from disk
        return np.stack([self._seen[who] for who in clients])
