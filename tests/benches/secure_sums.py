"""Bench: one masked sum. Seconds, bytes and memory of a device and the coordinator, with 30 % of the devices dropped.

    python -m tests.benches.secure_sums 50 200 1000

All devices deal and answer for real. Uploads are random words of the right size, because their sum costs the same;
tests/coordinator/rounds/test_secure_sum.py has the sums. Words have 32 bits. Memory is the peak of what is allocated
in a step, by tracemalloc; the coordinator's messages are counted apart.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from coordinator.rounds.secure_sum import MaskedVectorStored, StageDeadline, SumReady, unmask_into
from edge_client.protocol.secure.device_sums import RelayArrived, RosterArrived, VectorReady
from edge_client.protocol.secure.masks import add_packed_into
from edge_client.protocol.secure.sum_messages import SumForm, read_upload
from tests.support.secure_cohort import SecureCohort, cids

SIZES = {"29k": 29_000, "1.15M": 1_150_000}
MB = 1e6


def timed_peak(step: Callable[[], Any]) -> tuple[Any, float, float]:
    """What `step` gives, its seconds, and the most MB that it held beyond what was there."""
    tracemalloc.start()
    start = time.perf_counter()
    found = step()
    seconds = time.perf_counter() - start
    peak = tracemalloc.get_traced_memory()[1] / MB
    tracemalloc.stop()
    return found, seconds, peak


def measure(devices: int, words: int) -> str:
    """One row: a device's and the coordinator's cost of a sum of `devices` vectors of `words` words."""
    form = SumForm(federation="demo", run="r1", round=0, exchange=0, words=words, bits=32)
    cohort = SecureCohort.of(devices, form)
    kept = cids(devices)[: devices - 3 * devices // 10]
    first = kept[0]
    start = time.perf_counter()
    cohort.on_device(first, RosterArrived(cohort.sent["roster"][first]))
    dealing = time.perf_counter() - start
    cohort.deal()
    vector = np.random.default_rng(0).integers(0, 2**32, words, np.uint32)
    start = time.perf_counter()
    cohort.on_device(first, RelayArrived(cohort.sent["relay"][first]))
    opening = time.perf_counter() - start
    blob, masking, device_peak = timed_peak(lambda: cohort.on_device(first, VectorReady(cohort.server.roster, vector)))
    masked(cohort, kept, blob)
    cohort.reveal()
    ready = cohort.outcome
    if not isinstance(ready, SumReady):
        raise TypeError(ready)
    total = np.zeros(words, np.uint32)

    def unmask() -> None:
        for _ in kept:
            packed = read_upload(blob, roster=cohort.server.roster, words=words, bits=32)
            add_packed_into(total, packed, 32)
        unmask_into(cohort.server, ready, total)

    _, unmasking, server_peak = timed_peak(unmask)
    sent = [cohort.sent[kind][first] for kind in ("roster", "relay", "unmask")]
    state = cohort.server
    answers = [state.dealt[first].to_bytes(), state.revealed[first].to_bytes()]
    keys = sum(map(len, [*sent, *answers])) / 1e3
    return (
        f"{devices:>6} {words:>9} {state.parameters.neighbours:>4} {state.parameters.threshold:>4} {keys:>8.1f} "
        f"{len(blob) / MB:>7.2f} {dealing:>7.3f} {opening:>7.3f} {masking:>7.3f} {device_peak:>8.1f} "
        f"{unmasking:>9.2f} {server_peak:>9.1f}"
    )


def masked(cohort: SecureCohort, kept: list[str], blob: bytes) -> None:
    """Every kept device has uploaded `blob`; that it masked nothing itself is the one thing that is not real."""
    for cid in kept:
        cohort.on_device(cid, RelayArrived(cohort.sent["relay"][cid]))
        state = cohort.devices[cid]
        name = cohort.server.roster
        cohort.devices[cid] = replace(state, sums={name: replace(state.sums[name], upload="stored")})
        cohort.uploads[cid] = blob
        cohort.tell_server(MaskedVectorStored(cid))
    cohort.tell_server(StageDeadline("uploads"))


def main() -> None:
    """Print one row for each cohort and size."""
    header = "devices     words    k    t  keys,kB  up,MB  deal,s  open,s  mask,s  dev,MB  unmask,s  coord,MB"
    sys.stdout.write(header + "\n")
    for devices in [int(arg) for arg in sys.argv[1:]] or [50, 200, 1000]:
        for words in SIZES.values():
            sys.stdout.write(measure(devices, words) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
