"""`python -m tests.faults.write_store tests/faults/stores/N` writes a store that is in the middle of a round.

test_upgrade.py reads it. A change of the store's schema or of the task message begins with this command.
"""

from __future__ import annotations

import shutil
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from tests.support.virtual_federation import Federation

SIGNING_KEY = bytes(range(32))  # the key of the golden vectors


def write_key(folder: Path) -> None:
    """Write the signing key of these stores as a coordinator does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "signing.key").write_text(SIGNING_KEY.hex() + "\n", encoding="ascii")
    (folder / "signing.key").chmod(0o600)


def leave(work: Path) -> Path:
    """A run folder whose coordinator died in round 2, after three of four devices had replied."""
    write_key(work / "run")
    fed = Federation.of(work)
    fed.start(4)
    fed.world.run(lambda: fed.happened("round"))
    fed.world.kill("d03")
    fed.world.run(lambda: fed.live_since(1.0))
    fed.world.end()
    return work / "run"


def write(run: Path, out: Path) -> None:
    """Copy the store to files of text and blobs; the database becomes an SQL dump."""
    for name in ("blobs", "updates"):
        shutil.copytree(run / "store" / name, out / name, ignore=shutil.ignore_patterns("partial"))
    shutil.copy(run / "metrics.jsonl", out)
    with closing(sqlite3.connect(run / "store" / "coordinator.sqlite")) as db:
        (out / "coordinator.sql").write_text("\n".join(db.iterdump()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        write(leave(Path(scratch)), Path(sys.argv[1]))
