"""What a process keeps of the memory that a step frees."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from edge_client.malloc import keep_freed_memory

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


def test_keeping_freed_memory_changes_nothing_where_it_cannot_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert keep_freed_memory() is False


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
def test_a_step_maps_no_page_again_that_the_one_before_freed() -> None:
    """A step's new weights and activations are 96 MB here: 48 huge pages, or 23,437 small ones."""

    def faults(how: str) -> int:
        ran = subprocess.run([sys.executable, "-c", FAULTS, how], check=True, capture_output=True, text=True)
        return int(ran.stdout)

    assert faults("kept") < 10 < faults("given back")
