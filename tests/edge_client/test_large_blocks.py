"""Large blocks of a coordinator or a device leave its process when they are freed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.heap_use import heap_use

SCRIPT = """
from edge_client.malloc import give_back_large_blocks
from tests.support.heap_use import heap_use

told = {told} and give_back_large_blocks()
bytearray(4 << 20)  # the first large block that is freed
before = heap_use().hblkhd
block = bytearray(1 << 20)
print(told, heap_use().hblkhd - before >= len(block))
"""


@pytest.mark.skipif(heap_use() is None, reason="malloc is not glibc 2.33 or newer")
@pytest.mark.parametrize("told", [True, False])
def test_a_large_block_is_mapped_on_its_own_also_after_a_larger_one_was_freed(*, told: bool) -> None:
    """Of glibc's own choice it is not: then the second case says that the setting is no longer needed."""
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(told=told)], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(told), str(told)]
