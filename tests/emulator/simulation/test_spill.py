from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.protocol.task import Flat
from emulator.simulation.spill import Slot, SpilledModels, SpilledRecords

KEYS = st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from(["main", "start"]))
VECTORS = st.builds(lambda n, fill: np.full(n, fill, np.float32), st.integers(0, 5), st.integers(0, 9))
READ_BY_TWO = """
import os
from emulator.simulation.spill import SpilledRecords

wanted, lines = [{"round": i, "x": "a" * (i * 37 % 500)} for i in range(200)], SpilledRecords()
for record in wanted:
    lines.append(record)
child = os.fork()
whole = all(list(lines) == wanted for _ in range(30))
if child == 0:
    os._exit(0 if whole else 1)
assert whole and os.waitpid(child, 0)[1] == 0
"""


@given(st.lists(st.tuples(KEYS, st.none() | VECTORS), max_size=30), st.sampled_from([0, 12, 40, 10_000]))
def test_with_any_memory_it_is_a_dictionary(changes: list[tuple[Slot, Flat | None]], memory: int) -> None:
    """None takes the key out."""
    kept, plain = SpilledModels(memory), dict[Slot, Flat]()
    for key, vector in changes:
        if vector is None:
            kept.pop(key, None)
            plain.pop(key, None)
        else:
            kept[key] = plain[key] = vector
        assert set(kept) == set(plain)
        assert len(kept) == len(plain)
        for known, expected in plain.items():
            np.testing.assert_array_equal(kept[known], expected)
            assert kept[known].dtype == expected.dtype


def test_more_than_the_memory_goes_to_a_file_whose_room_is_used_again() -> None:
    kept = SpilledModels(memory=80)
    for number in range(50):
        for who in ("a", "b", "c", "d"):
            kept[who, "main"] = np.full(10, float(number))
    assert kept._held_bytes <= 80
    assert kept._end <= 4 * 80
    assert [kept[who, "main"][0] for who in "abcd"] == [49.0] * 4


def test_who_has_nothing_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        SpilledModels()["a", "main"]
    with pytest.raises(KeyError):
        del SpilledModels()["a", "main"]


def test_lines_are_whole_while_other_threads_read() -> None:
    """As where a notebook shows the history of a run that goes on in a thread."""
    lines, before = SpilledRecords(), sys.getswitchinterval()
    wanted: list[Any] = [{"round": i, "x": "a" * (i % 50)} for i in range(4_000)]

    def read() -> bool:
        whole = True
        while len(seen := lines.so_far()) < len(wanted):
            whole &= seen[-3:] == wanted[: len(seen)][-3:]
        return whole

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor() as pool:
            readers = [pool.submit(read) for _ in range(3)]
            for record in wanted:
                lines.append(record)
    finally:
        sys.setswitchinterval(before)
    assert all(reader.result() for reader in readers)
    assert list(lines) == wanted


def test_lines_are_whole_in_processes_that_are_forked_from_one() -> None:
    """As where a script reads a result in workers of multiprocessing: each moved the other's place in the file."""
    subprocess.run([sys.executable, "-c", READ_BY_TWO], cwd=Path(__file__).parents[3], check=True)


def test_lines_come_back_as_they_were_in_any_order() -> None:
    lines = SpilledRecords()
    plain: list[Any] = [{"round": i, "x": [0.1 * i, None], "per_device": {"ä": 1 / 3}} for i in range(5)]
    for record in plain:
        lines.append(record)
        assert lines[-1] == record
    assert lines == plain
    assert list(lines) == plain
    assert lines[1:4:2] == plain[1:4:2]
    assert lines[::-1] == plain[::-1]
    assert lines != plain[1:]
    with pytest.raises(IndexError):
        lines[5]


def test_after_clear_nothing_is_there_and_the_file_is_written_from_its_beginning() -> None:
    kept = SpilledModels(memory=80)
    for who in ("a", "b", "c", "d"):
        kept[who, "main"] = np.full(10, 1.0)
    kept.clear()
    assert not list(kept)
    assert kept._end == kept._held_bytes == 0
    for who in ("b", "c", "d"):
        kept[who, "main"] = np.full(10, float(ord(who)))
    assert [kept[who, "main"][0] for who in ("b", "c", "d")] == [98, 99, 100]
