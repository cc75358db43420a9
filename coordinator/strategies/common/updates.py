"""The models that clients return, as rows; and arrays by client, as a `State` stores them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from coordinator.aggregation.rows import Rows
from coordinator.strategies.base import Replies, StoredReplies, vector_samples
from edge_client.protocol.task import F64, Array, ClientId, Flat, Reply


@dataclass(frozen=True)
class ClientUpdates:
    """The fitted models of one exchange: client i has row `rows[i]` [schema.size] and `n[i]` training samples."""

    clients: tuple[ClientId, ...]
    rows: Rows
    n: F64 = field(repr=False)

    @staticmethod
    def from_replies(replies: Replies, size: int) -> ClientUpdates:
        """Updates [m, size] sorted by client; a reply without a model is left out. A row is read when it is used."""
        return updates_of(replies, "update", size, _update)


def updates_of(replies: Replies, vector: str, size: int, read: Callable[[Reply], Flat]) -> ClientUpdates:
    """The replies that have an "update" or a "grad" as rows [m, size], sorted by client; `read` gives one row."""
    n = vector_samples(replies, vector)
    clients = tuple(n)
    rows = Rows(len(clients), size, lambda i: read(replies[clients[i]]), held=not isinstance(replies, StoredReplies))
    return ClientUpdates(clients, rows, np.array(list(n.values()), dtype=np.float64))


def _update(reply: Reply) -> Flat:
    if reply.update is None:
        raise ValueError("this reply has no model")
    return reply.update


def pack_by_client(name: str, values: Mapping[ClientId, Array]) -> dict[str, Array]:
    """One array per client as entries `{name}/{client}` of `State.extra`."""
    return {f"{name}/{c}": values[c] for c in sorted(values)}


def unpack_by_client(extra: Mapping[str, Array], name: str) -> dict[ClientId, Array]:
    """What `pack_by_client` stored in `extra` under this name, sorted by client."""
    prefix = f"{name}/"
    return {key.removeprefix(prefix): extra[key] for key in sorted(extra) if key.startswith(prefix)}
