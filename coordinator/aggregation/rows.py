"""Updates as rows [m, width], each of which is read when it is needed, so that one of them is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from coordinator.clustering.column_store import ColumnStore
from edge_client.protocol.task import Array, Flat

BLOCK_VALUES = 2**20  # of a block of columns, 8 MiB of float64
ColumnReader = Callable[[slice], Array]  # columns -> [m, c], not to be written


@dataclass(frozen=True)
class Rows:
    """`count` rows of `width` numbers, read by number. `held`: they are in memory anyway, and reading makes no copy."""

    count: int
    width: int
    read: Callable[[int], Flat]
    held: bool = False

    @classmethod
    def of(cls, rows: Array | Rows) -> Rows:
        """The rows of an array [m, width]; rows stay what they are."""
        return rows if isinstance(rows, Rows) else cls(len(rows), rows.shape[1], rows.__getitem__, held=True)

    @property
    def shape(self) -> tuple[int, int]:
        return self.count, self.width

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Flat:
        """Read one row; it is not to be written."""
        return self.read(range(self.count)[index])

    def __iter__(self) -> Iterator[Flat]:
        return map(self.read, range(self.count))

    def select(self, indices: Iterable[int]) -> Rows:
        """The rows with these numbers, in this order."""
        chosen = [int(i) for i in indices]
        return Rows(len(chosen), self.width, lambda i: self.read(chosen[i]), held=self.held)

    def map(self, change: Callable[[Flat], Flat], width: int | None = None) -> Rows:
        """These rows, each changed when it is read."""
        return Rows(self.count, self.width if width is None else width, lambda i: change(self.read(i)))

    def then(self, more: Rows) -> Rows:
        """These rows and `more` behind them."""
        first = self.count

        def read(index: int) -> Flat:
            return self.read(index) if index < first else more.read(index - first)

        return Rows(first + more.count, self.width, read, held=self.held and more.held)

    def by_columns(self) -> ColumnReader:
        """A function that reads blocks of columns. Rows that are not in memory are first read, once, into a file."""
        if self.held:
            rows = list(self)
            return lambda block: np.stack([row[block] for row in rows])
        store: ColumnStore | None = None
        for index, row in enumerate(self):
            store = store or ColumnStore(self.count, self.width, row.dtype)
            store.put(index, row)
        if store is None:
            raise ValueError("there are no rows")
        kept = store
        return lambda block: kept.columns(block.start, block.stop)


def column_blocks(start: int, stop: int, rows: int, most: int) -> Iterator[slice]:
    """Blocks of at most `most` columns that cover start..stop, narrower where the `rows` are many."""
    width = max(1, min(most, BLOCK_VALUES // max(rows, 1)))
    return (slice(left, min(left + width, stop)) for left in range(start, stop, width))
