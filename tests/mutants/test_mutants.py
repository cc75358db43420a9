"""A mutant is the module with one small fault; the tests that run for a module are those that import it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.__main__ import GOAL, covering, within
from tests.mutants.draw import drawn, modules_in
from tests.mutants.equivalents import is_equivalent, listed
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


@pytest.mark.parametrize(
    "module",
    ["coordinator.rounds.silence", "edge_client.protocol.blocks", "coordinator.runtime.exchange.late_updates"],
)
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


def test_a_mutant_meets_the_tests_of_its_line_the_quickest_first_as_long_as_there_is_time() -> None:
    module = ROOT / "coordinator" / "rounds" / "silence.py"
    mutant = next(one for one in mutants_of(module.read_text(encoding="utf-8")) if one.line > 20)
    name, line = "coordinator.rounds.silence", {"coordinator.rounds.silence": [mutant.last_line]}
    known = {
        "elsewhere": {"seconds": 0.1, "lines": {name: [1]}},
        "slow": {"seconds": 5.0, "lines": line},
        "quick": {"seconds": 1.0, "lines": line},
        "other": {"seconds": 0.1, "lines": {}},
    }
    assert covering(name, mutant, known) == ["quick", "slow"]
    assert [within(["quick", "slow"], known, left_s) for left_s in (0.5, 5.5, 6)] == [[], ["quick"], ["quick", "slow"]]


def test_every_mutant_that_is_listed_as_equivalent_is_still_one_of_its_line_and_has_a_reason() -> None:
    entries = listed()
    for entry in entries:
        source = (ROOT / entry["module"].replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
        assert any(is_equivalent(entry["module"], one, [entry]) for one in mutants_of(source)), entry
        assert {"module", "line", "what", "reason"} <= entry.keys() <= {"module", "line", "what", "reason", "nth"}
    assert len({(entry["module"], entry["line"], entry["what"], entry.get("nth")) for entry in entries}) == len(entries)


def test_of_several_equal_changes_of_a_line_one_can_be_listed() -> None:
    found = mutants_of("def f(n):\n    return n > 1 or n < 1\n")
    one, other = (mutant for mutant in found if mutant.what == "`1` -> `2`")
    entry = {"module": "m", "line": "return n > 1 or n < 1", "what": "`1` -> `2`", "reason": "-"}
    assert [is_equivalent("m", mutant, [entry]) for mutant in (one, other)] == [True, True]
    assert [is_equivalent("m", mutant, [entry | {"nth": 2}]) for mutant in (one, other)] == [False, True]
    assert not is_equivalent("n", one, [entry])


def test_what_two_seeds_draw_is_the_union_of_what_each_draws_in_the_order_of_the_lines() -> None:
    module = ROOT / "coordinator" / "rounds" / "silence.py"
    both = drawn(module, 5, [2, 3])
    assert {one.place for one in both} == {one.place for seed in (2, 3) for one in drawn(module, 5, [seed])}
    assert [one.line for one in both] == sorted(one.line for one in both)
    assert 5 < len(both) <= 10


def test_a_change_of_another_line_leaves_the_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.mutants.nearest_tests.ROOT", tmp_path)
    module = tmp_path / "m.py"
    module.write_text(before := "".join(f"x{i} = {i}\n" for i in range(20)))
    first = {one.text for one in drawn(module, 5, [4])}
    gone = next(text for text in first)
    module.write_text("y = 'a text has no mutant'\n" + before.replace(gone + "\n", ""))
    assert first - {gone} < {one.text for one in drawn(module, 5, [4])}


def test_a_fork_tells_which_lines_a_test_executes_and_whether_all_passed(tmp_path: Path) -> None:
    (tmp_path / "halves.py").write_text("def half(n):\n    if n % 2:\n        raise ValueError\n    return n // 2\n")
    tests = "import halves\n\ndef test_even():\n    assert halves.half(4) == 2\n\ndef test_odd():\n    halves.half(3)\n"
    (tmp_path / "test_halves.py").write_text(tests)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    common = {"limit_s": 60, "profile": "few"}
    runs = [
        {"arguments": ["-q"], "traced": {str(tmp_path / "halves.py"): "halves"}, **common},
        {"arguments": ["-q", "-k", "even"], "traced": {}, **common},
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants.forks"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        input="".join(json.dumps(run) + "\n" for run in runs),
        capture_output=True,
        text=True,
        check=True,
    )
    traced, passed = map(json.loads, done.stdout.splitlines())
    assert (traced["status"], passed["status"]) == (1, 0)
    assert {test: seen["lines"] for test, seen in traced["tests"].items()} == {
        "test_halves.py::test_even": {"halves": [2, 4]}
    }
