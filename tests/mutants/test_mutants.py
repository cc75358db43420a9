"""A mutant is the module with one small fault; the tests that run for a module are those that import it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.__main__ import GOAL, modules_in
from tests.mutants.mutants import mutants_of
from tests.mutants.nearest_tests import ROOT, name_of, nearest_tests

SOURCE = '''"""Text."""

__all__ = ["least"]

def least(values: list[int], start: int = 0) -> int:
    assert values
    for value in values:
        if not value or value < start:
            raise ValueError(f"{start + 1}")
        print("seen", value)
        register(value, start)
    return min(values)
'''


def test_each_fault_of_a_small_function_is_named_and_nothing_else_changes() -> None:
    found = {str(one): one.of(SOURCE) for one in mutants_of(SOURCE)}
    assert list(found) == [
        "line 5: `0` -> `1`",
        "line 8: `not value or value < start` -> `not value and value < start`",
        "line 8: `not value` -> `value`",
        "line 8: `value < start` -> `value <= start`",
        "line 9: without `raise ValueError(f'{start + 1}')`",
        "line 11: without `register(value, start)`",
        "line 11: `register(value, start)` -> `register(start, value)`",
        "line 12: `return min(values)` returns None",
        "line 12: `min(values)` -> `max(values)`",
    ]
    whole = ast.unparse(ast.parse(SOURCE)).splitlines()
    for source in found.values():
        changed = [(a, b) for a, b in zip(whole, source.splitlines(), strict=True) if a != b]
        assert len(changed) == 1


@pytest.mark.parametrize("module", ["coordinator.rounds.silence", "edge_client.protocol.blocks"])
def test_the_tests_of_a_module_begin_with_its_own(module: str) -> None:
    first, *others = nearest_tests(module, 5)
    room, _, own = module.rpartition(".")
    assert first == ROOT / "tests" / room.replace(".", "/") / f"test_{own}.py"
    assert len({first, *others}) == len(others) + 1


def test_every_module_of_the_goal_has_tests_and_mutants() -> None:
    modules = modules_in([Path(place) for place in GOAL])
    assert len(modules) > 50
    assert [name_of(one) for one in modules if not nearest_tests(name_of(one), 1)] == []
    assert sum(not mutants_of(one.read_text(encoding="utf-8")) for one in modules) <= 3
