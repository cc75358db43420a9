"""Tables of results: a pandas DataFrame where pandas is installed, else a small table that can become one."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
LEAST_SHOWN = 1e-3  # of a number with four digits after the point: of a smaller one they tell little
NEEDS_PANDAS = "is what a DataFrame has: pip install pandas, and tables are DataFrames"


class Table(Sequence[Row]):
    """Rows with the same columns. `table["accuracy"]` is a column as a list, `table[0]` a row as a mapping.

    >>> table = Table([{"round": 1, "accuracy": 0.5}, {"round": 2, "accuracy": 0.75}])
    >>> table
    round  accuracy
        1    0.5000
        2    0.7500
    >>> table["accuracy"]
    [0.5, 0.75]
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = tuple(rows)
        self.columns: list[str] = list(dict.fromkeys(key for row in rows for key in row))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 - a row, rows, or a column
        if isinstance(key, str):
            if key not in self.columns:
                raise KeyError(f"no column {key!r}; there are {', '.join(self.columns)}")
            return [row.get(key) for row in self._rows]
        if isinstance(key, list):
            raise TypeError(f"a list of columns {NEEDS_PANDAS}")
        return self._rows[key]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - never returns
        """What a DataFrame has and this has not. Raises AttributeError."""
        raise AttributeError(f"{name} {NEEDS_PANDAS}")

    def to_pandas(self) -> Any:  # noqa: ANN401 - pandas is no dependency
        """A pandas DataFrame. Raises ImportError without pandas."""
        import pandas as pd

        unknown = [c for c in self.columns if all(row.get(c) is None for row in self._rows)]
        return pd.DataFrame(list(self._rows), columns=self.columns).astype(dict.fromkeys(unknown, float))

    def __repr__(self) -> str:
        cells = [self.columns, *([show(row.get(c)) for c in self.columns] for row in self._rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        return "\n".join("  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in cells)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(c)}</th>" for c in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(show(row.get(c)))}</td>" for c in self.columns) + "</tr>"
            for row in self._rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def show(value: object) -> str:
    """A number with four digits after the point, a small one with four of its own; nothing for None.

    >>> show(0.5), show(0.0), show(-0.0000125), show(3), show(None)
    ('0.5000', '0.0000', '-1.25e-05', '3', '')
    """
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.4g}" if 0 < abs(value) < LEAST_SHOWN else f"{value:.4f}"


def frame(rows: Sequence[Row]) -> Any:  # noqa: ANN401 - a DataFrame or a `Table`
    """A pandas DataFrame, or a `Table` without pandas."""
    table = Table(rows)
    return _with_pandas(lambda _: table.to_pandas(), table)


def series(values: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401 - a Series or a dict
    """A pandas Series by name, or a dict without pandas."""
    return _with_pandas(lambda pd: pd.Series(values, name=name, dtype=None if values else object), dict(values))


def _with_pandas(make: Callable[[Any], Any], otherwise: object) -> Any:  # noqa: ANN401
    try:
        import pandas as pd
    except ImportError:
        return otherwise
    return make(pd)
