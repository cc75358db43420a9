"""`python -m tests.faults.write_store tests/faults/stores/N`: the store of this code, left in the middle of a round.

For test_upgrade.py: a change of the store's schema, or of what a task message holds, begins with writing one here.
"""

from __future__ import annotations

import shutil
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from tests.support.virtual_federation import Federation

SIGNING_KEY = bytes(range(32))  # of the golden vectors; nobody else's


def write_key(folder: Path) -> None:
    """The signing key of these stores, as a coordinator keeps it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "signing.key").write_text(SIGNING_KEY.hex() + "\n", encoding="ascii")
    (folder / "signing.key").chmod(0o600)


def leave(work: Path) -> Path:
    """A run folder whose coordinator died in round 2, when three of four devices had answered."""
    write_key(work / "run")
    fed = Federation.of(work)
    fed.start_coordinator()
    fed.start_devices(4)
    fed.world.run(lambda: fed.happened("round"))
    fed.world.kill("d03")
    fed.world.run(lambda: fed.live_since(1.0))
    fed.world.end()
    return work / "run"


def write(run: Path, out: Path) -> None:
    """The store in files that can be read and compared: the database as text."""
    for name in ("blobs", "updates"):
        shutil.copytree(run / "store" / name, out / name, ignore=shutil.ignore_patterns("partial"))
    shutil.copy(run / "metrics.jsonl", out)
    with closing(sqlite3.connect(run / "store" / "coordinator.sqlite")) as db:
        (out / "coordinator.sql").write_text("\n".join(db.iterdump()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        write(leave(Path(scratch)), Path(sys.argv[1]))
