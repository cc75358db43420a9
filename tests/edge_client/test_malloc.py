"""What a process keeps of the memory that a step frees."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from edge_client.malloc import keep_freed_memory, share_one_heap

FAULTS = """
import resource, sys
import numpy as np
from edge_client.malloc import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()
for step in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(3_000_000, np.float32) for _ in range(8)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

HEAP = """
import ctypes, sys, threading
from edge_client.malloc import share_one_heap

assert sys.argv[1] == "own" or share_one_heap()
libc, places = ctypes.CDLL(None), []
libc.malloc.restype = ctypes.c_void_p
thread = threading.Thread(target=lambda: places.append(libc.malloc(10_000)))
thread.start()
thread.join()
heap = next(line for line in open("/proc/self/maps") if line.rstrip().endswith("[heap]"))
first, end = (int(place, 16) for place in heap.split()[0].split("-"))
print(first <= places[0] < end)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
@pytest.mark.parametrize(("whose", "in_the_first"), [("own", "False"), ("shared", "True")])
def test_a_thread_of_a_device_allocates_from_the_heap_of_the_first(whose: str, in_the_first: str) -> None:
    ran = subprocess.run([sys.executable, "-c", HEAP, whose], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == in_the_first


def test_keeping_freed_memory_changes_nothing_where_it_cannot_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert keep_freed_memory() is share_one_heap() is False


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
def test_a_step_maps_no_page_again_that_the_one_before_freed() -> None:
    """A step's new weights and activations are 96 MB here: 48 huge pages, or 23,437 small ones."""

    def faults(how: str) -> int:
        ran = subprocess.run([sys.executable, "-c", FAULTS, how], check=True, capture_output=True, text=True)
        return int(ran.stdout)

    assert faults("kept") < 10 < faults("given back")
