"""Bench: one masked sum with 30 % of the devices dropped: CPU seconds, bytes and memory of both sides.

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
from typing import TypeVar

import numpy as np

from coordinator.rounds.secure_sum import MaskedVectorStored, StageDeadline, SumReady, unmask_into
from edge_client.protocol.secure.device_sums import RelayArrived, RosterArrived, VectorReady
from edge_client.protocol.secure.masks import add_packed_into
from edge_client.protocol.secure.sum_messages import SumForm, read_upload
from tests.support.secure_cohort import SecureCohort, cids

SIZES = {"29k": 29_000, "1.15M": 1_150_000}
MB = 1e6
TRACED = 200  # devices up to which the memory is traced, which makes the step several times slower

T = TypeVar("T")


def cpu_seconds(step: Callable[[], T]) -> tuple[T, float]:
    """What `step` gives, and its CPU seconds."""
    start = time.process_time()
    return step(), time.process_time() - start


def peak_mb(step: Callable[[], object]) -> float:
    """The most MB that `step` held beyond what was there."""
    tracemalloc.start()
    step()
    peak = tracemalloc.get_traced_memory()[1] / MB
    tracemalloc.stop()
    return peak


def measure(devices: int, words: int) -> str:
    """One row: a device's and the coordinator's cost of a sum of `devices` vectors of `words` words."""
    form = SumForm(federation="demo", run="r1", round=0, exchange=0, words=words, bits=32)
    cohort = SecureCohort.of(devices, form)
    kept = cids(devices)[: devices - 3 * devices // 10]
    first = kept[0]
    _, dealing = cpu_seconds(lambda: cohort.on_device(first, RosterArrived(cohort.sent["roster"][first])))
    cohort.deal()
    vector = np.random.default_rng(0).integers(0, 2**32, words, np.uint32)
    _, opening = cpu_seconds(lambda: cohort.on_device(first, RelayArrived(cohort.sent["relay"][first])))
    ready_vector = VectorReady(cohort.server.roster, vector)
    blob, masking = cpu_seconds(lambda: cohort.on_device(first, ready_vector))
    device_peak = peak_mb(lambda: cohort.on_device(first, ready_vector))
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

    _, unmasking = cpu_seconds(unmask)
    server_peak = f"{peak_mb(unmask):.1f}" if devices <= TRACED else "-"
    sent = [cohort.sent[kind][first] for kind in ("roster", "relay", "unmask")]
    state = cohort.server
    answers = [state.dealt[first].to_bytes(), state.revealed[first].to_bytes()]
    keys = sum(map(len, [*sent, *answers])) / 1e3
    return (
        f"{devices:>6} {words:>9} {state.parameters.neighbours:>4} {state.parameters.threshold:>4} {keys:>8.1f} "
        f"{len(blob) / MB:>7.2f} {dealing:>7.3f} {opening:>7.3f} {masking:>7.3f} {device_peak:>8.1f} "
        f"{unmasking:>9.2f} {server_peak:>9}"
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
