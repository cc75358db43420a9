"""Graph networks of torch_geometric: a sample is the features of all nodes of one graph.

Loops of a node to itself are among the edges: layers that add them, pick the others by a mask first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.rows import ZooRow, table

NODES, FEATURES, WIDTH, CLASSES = 8, 5, 12, 3


class OverOneGraph(nn.Module):
    """All samples have the same edges: a ring, one edge across, loops. The mean over the nodes is classified."""

    edges: Tensor

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, CLASSES)
        ring = [(i, (i + 1) % NODES) for i in range(NODES)] + [(0, NODES // 2)]
        edges = [*ring, *[(b, a) for a, b in ring], *[(i, i) for i in range(NODES)]]
        self.register_buffer("edges", torch.tensor(edges).t().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.edges).relu()
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class Joined(OverOneGraph):
    """The samples of a batch as one large graph, as the library's loader joins them."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.arange(x.shape[0]).reshape(1, -1, 1) * NODES
        edges, h = (self.edges.unsqueeze(1) + first).flatten(1), x.flatten(0, 1)
        for layer in self.layers:
            h = layer(h, edges).relu()
        return self.head(h.reshape(x.shape[0], NODES, WIDTH).mean(1))  # type: ignore[no-any-return]


def convolutions(kind: str, form: type[OverOneGraph] = OverOneGraph, **settings: Any) -> Callable[[], nn.Module]:  # noqa: ANN401
    """Two layers of a class of torch_geometric.nn."""

    def make() -> nn.Module:
        from torch_geometric import nn as geometric

        layer = getattr(geometric, kind)
        return form([layer(FEATURES, WIDTH, **settings), layer(WIDTH, WIDTH, **settings)])

    return make


def isomorphism() -> nn.Module:
    """GIN, whose layers hold a small network each."""
    from torch_geometric import nn as geometric

    widths = (FEATURES, WIDTH)
    return OverOneGraph(
        [geometric.GINConv(nn.Sequential(nn.Linear(n, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))) for n in widths]
    )


GRAPHS = {
    "GCN": convolutions("GCNConv", add_self_loops=False),
    "GraphSAGE": convolutions("SAGEConv"),
    "GIN": isomorphism,
    "GraphConv, largest": convolutions("GraphConv", aggr="max"),
    "GCN, which adds loops": convolutions("GCNConv"),
    "GCN, joined": convolutions("GCNConv", Joined, add_self_loops=False),
    "GAT, joined": convolutions("GATConv", Joined, heads=2, concat=False, add_self_loops=False),
}


def rows() -> list[ZooRow]:
    """Rows of nodes and their features."""
    return table("torch_geometric", (NODES, FEATURES), GRAPHS)
