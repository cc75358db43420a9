"""A connection to a database that counts what it reads."""

from __future__ import annotations

import sqlite3
from typing import Any


class CountedConnection(sqlite3.Connection):
    """Counts the steps of SQLite's machine: one or more for each row that it looks at, also for those not given."""

    steps = 0

    def __init__(self, *arguments: Any, **keywords: Any) -> None:  # noqa: ANN401 - as sqlite3's own
        super().__init__(*arguments, **keywords)
        self.set_progress_handler(self._step, 1)

    def _step(self) -> int:
        type(self).steps += 1
        return 0
