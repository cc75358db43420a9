"""A tree of centers as a newcomer walks it: splits lead to splits or to centers. Pure.

Methods that split centers (CFL, FL+HC) leave one. Split 0 is the root; branch e leads from split `edges[e][0]` to
`edges[e][1]`, a split or, below zero, center ~edges[e][1], as in coordinator/strategies/common/center_tree.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edge_client.errors import Malformed
from edge_client.protocol import validators
from edge_client.protocol.message_schemas import MAX_CENTERS
from edge_client.protocol.task import Array

NODE_FIELD = validators.integer(-MAX_CENTERS, MAX_CENTERS - 1)
EDGES_FIELD = validators.list_of(validators.list_of(NODE_FIELD, 2, 2), 2, 2 * MAX_CENTERS)


@dataclass(frozen=True)
class CenterTree:
    """The branches, each split's together and in order. Raises Malformed for what is no tree over these centers."""

    edges: tuple[tuple[int, int], ...]
    centers: int

    def __post_init__(self) -> None:
        """Each split but the root has one branch to it, each branch an end that exists, and every walk an end."""
        splits, ends = {start for start, _ in self.edges}, [end for _, end in self.edges]
        if splits != set(range(len(splits))) or len(set(ends)) < len(ends):
            raise Malformed("bad_field", "a tree needs splits from 0 on, and one way to each node")
        inner, leaves = {e for e in ends if e >= 0}, {~e for e in ends if e < 0}
        if inner != splits - {0} or leaves != set(range(self.centers)):
            raise Malformed("bad_field", f"the tree's branches do not lead to all of {self.centers} centers")
        if any(end <= start for start, end in self.edges if end >= 0):
            raise Malformed("bad_field", "a split of a tree comes after the one that leads to it")

    @property
    def splits(self) -> int:
        return len({start for start, _ in self.edges})

    def walk(self, far: Callable[[Sequence[int]], Array]) -> int:
        """The center at the end; `far` gives the distance to each of a split's children, the least is taken."""
        at = 0
        while at >= 0:
            children = [end for start, end in self.edges if start == at]
            at = children[int(far(children).argmin())]
        return ~at

    def to_json(self) -> list[list[int]]:
        return [list(edge) for edge in self.edges]

    @staticmethod
    def from_json(raw: Any, centers: int) -> CenterTree:  # noqa: ANN401 - JSON from anyone
        """What `to_json` gave, checked. Raises Malformed."""
        return CenterTree(tuple((a, b) for a, b in EDGES_FIELD(raw, "tree")), centers)
