"""`python -m tests.benches.replies`: replies per second of a coordinator whose messages wait for it, by its disk.

`one by one` waits for the disk after each message, `together` as the event loop does, for all updates that have come.
The coordinator's parts are those of a server without its broker; all messages wait from the beginning. The disk is that
of TMPDIR. A model of a slower one adds milliseconds to each flush: those that wait at the same time wait
together, as with ext4, whose journal commits once for all of them. The two sides take turns; the best of the repeats,
with its milliseconds of CPU for each reply.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from coordinator.storage.exchange_store import ExchangeKey
from edge_client.transport.base import Message
from tests.benches.machine import described, load
from tests.support import wired_coordinator
from tests.support.virtual_federation import BALLAST
from tests.support.virtual_time import VirtualClock

KEY = ExchangeKey("run1", 1, 0)


def main() -> None:
    """Print one line for each kind of reply, disk and side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=300)
    parser.add_argument("--disk-ms", type=float, nargs="*", default=[0.0, 12.0], help="added to each flush")
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    sys.stderr.write(f"{described()}, load {load():.1f}, a flush takes {_flush_ms():.2f} ms\n")
    for kind, ballast in (("inline", 0), ("in blocks", BALLAST)):
        for added in asked.disk_ms:
            runs: dict[str, list[tuple[float, float]]] = {"one by one": [], "together": []}
            for _ in range(asked.repeats):
                for side, found in runs.items():
                    found.append(_rate(asked.devices, ballast, added, together=side == "together"))
            row = {"replies": kind, "devices": asked.devices, "added ms": added}
            best = {side: dict(zip(("per s", "CPU ms"), max(found), strict=True)) for side, found in runs.items()}
            sys.stdout.write(json.dumps(row | best) + "\n")
            sys.stdout.flush()


def _rate(devices: int, ballast: int, added_ms: float, *, together: bool) -> tuple[float, float]:
    """Replies per second that were acknowledged, and milliseconds of CPU for each."""
    names = tuple(f"d{i}" for i in range(devices))
    with (
        tempfile.TemporaryDirectory(prefix="bench-replies-") as folder,
        patch.multiple(wired_coordinator, DEVICES=names, LIMIT=devices),
    ):
        made = wired_coordinator.WiredCoordinator(Path(folder), VirtualClock(), ballast, devices)
        made.store.database.execute("pragma synchronous = full")
        made.ask(KEY, None)
        waiting = _messages(made)
        for cid in names:
            made.store.updates(cid)  # its folder, as after a first round
        with _slower_disk(made, added_ms):
            began_s, cpu_s = time.perf_counter(), time.process_time()
            for message in waiting:
                made.dispatcher.dispatch(message, more=together)
            made.dispatcher.exchange.sync()
            seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        acknowledged = sum(message["k"] == "ack" and message["status"] == "ok" for _, message in made.said())
        made.store.close()
    return round(acknowledged / seconds, 1), round(1_000 * cpu_s / acknowledged, 2)


def _messages(made: wired_coordinator.WiredCoordinator) -> list[Message]:
    """What all devices say: an announcement, and the blocks of an update that is too large for it."""
    said: list[Message] = []
    with patch.object(made.dispatcher, "dispatch", lambda message, **_: said.append(message)):
        for cid in wired_coordinator.DEVICES:
            made.announce(cid, 0, KEY)
            manifest, _ = made.update(KEY, cid, 0)
            if manifest.inline is None:
                made.send(KEY, cid, 0, list(range(manifest.total)))
    return said


@contextmanager
def _slower_disk(made: wired_coordinator.WiredCoordinator, added_ms: float) -> Iterator[None]:
    """A model of a disk whose flush takes longer; SQLite's is that of a commit."""
    fsync, commit = os.fsync, made.store.exchanges.put_replies

    def slow_fsync(descriptor: int) -> None:
        time.sleep(added_ms / 1_000)
        fsync(descriptor)

    def slow_commit(*args: object) -> None:
        time.sleep(added_ms / 1_000)
        commit(*args)  # type: ignore[arg-type]

    with patch.object(os, "fsync", slow_fsync), patch.object(made.store.exchanges, "put_replies", slow_commit):
        yield


def _flush_ms(times: int = 20) -> float:
    """What the disk takes for a small file."""
    with tempfile.NamedTemporaryFile(buffering=0) as file:
        began_s = time.perf_counter()
        for _ in range(times):
            file.write(b"x")
            os.fsync(file.fileno())
        return (time.perf_counter() - began_s) / times * 1_000


if __name__ == "__main__":
    main()
