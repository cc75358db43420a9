"""The CPU seconds of each test, with its fixtures and the processes that it waits for, and of the collection.

CPU_OF_TESTS=cpu.tsv pytest -p tests.support.cpu_of_tests -n 2; sort -rn cpu.tsv | head
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest


def _spent_s() -> float:
    told = os.times()
    return told.user + told.system + told.children_user + told.children_system


def _note(seconds: float, what: str) -> None:
    with Path(os.environ["CPU_OF_TESTS"]).open("a", encoding="utf-8") as file:
        file.write(f"{seconds:.2f}\t{what}\n")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    before_s = _spent_s()
    try:
        return (yield)
    finally:
        _note(_spent_s() - before_s, "collection")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before_s = _spent_s()
    try:
        return (yield)
    finally:
        _note(_spent_s() - before_s, item.nodeid)
