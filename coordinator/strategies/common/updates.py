"""The models that clients return, as one matrix; and arrays by client, as a `State` stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from coordinator.strategies.base import Replies
from edge_client.protocol.task import F64, Array, ClientId


@dataclass(frozen=True)
class ClientUpdates:
    """The fitted models of one exchange: client i has row `rows[i]` [schema.size] and `n[i]` training samples."""

    clients: tuple[ClientId, ...]
    rows: Array
    n: F64 = field(repr=False)

    @staticmethod
    def from_replies(replies: Replies, size: int) -> ClientUpdates:
        """Updates [m, size] sorted by client; a reply without a model is left out. Each reply is read once."""
        clients, n, rows = list[ClientId](), list[float](), np.empty((0, size))
        for client in sorted(replies):
            reply = replies[client]
            if reply.update is not None:
                if not clients:
                    rows = np.empty((len(replies), size), reply.update.dtype)
                rows[len(clients)] = reply.update
                clients.append(client)
                n.append(reply.n)
        return ClientUpdates(tuple(clients), rows[: len(clients)], np.array(n, dtype=np.float64))


def pack_by_client(name: str, values: Mapping[ClientId, Array]) -> dict[str, Array]:
    """One array per client as entries `{name}/{client}` of `State.extra`."""
    return {f"{name}/{c}": values[c] for c in sorted(values)}


def unpack_by_client(extra: Mapping[str, Array], name: str) -> dict[ClientId, Array]:
    """What `pack_by_client` stored in `extra` under this name, sorted by client."""
    prefix = f"{name}/"
    return {key.removeprefix(prefix): extra[key] for key in sorted(extra) if key.startswith(prefix)}
