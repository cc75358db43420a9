"""A run that was cut off goes on, and looks again only at what a change may have altered."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.journal import Journal
from tests.mutants.mutants import Mutant, mutants_of
from tests.mutants.score import FOUND, SURVIVED


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for place in ("tests.mutants.nearest_tests.ROOT", "tests.mutants.journal.ROOT"):
        monkeypatch.setattr(place, tmp_path)
    (tmp_path / "m.py").write_text("x = 1\ny = 2\n")
    (tmp_path / "test_m.py").write_text("")
    return tmp_path


def mutants(tree: Path) -> list[Mutant]:
    return mutants_of((tree / "m.py").read_text())


def opened(tree: Path) -> Journal:
    return Journal(tree / "build" / "mutants.jsonl", [tree / "m.py"])


def verdicts(tree: Path) -> list[str | None]:
    return [opened(tree).verdict(tree / "m.py", one, [tree / "test_m.py"]) for one in mutants(tree)]


def write(tree: Path, *found: str) -> None:
    journal = opened(tree)
    for one, verdict in zip(mutants(tree), found, strict=False):
        journal.add_verdict(tree / "m.py", one, [tree / "test_m.py"], verdict)


def test_what_was_judged_before_an_interruption_is_known_after_it(tree: Path) -> None:
    write(tree, FOUND)
    path = tree / "build" / "mutants.jsonl"
    path.write_text(path.read_text() + '{"mutant": ["m", "y = 2"')
    assert verdicts(tree) == [FOUND, None]
    write(tree, FOUND, SURVIVED)
    assert verdicts(tree) == [FOUND, SURVIVED]


def test_after_a_new_test_survivors_are_judged_again_and_after_a_change_of_the_module_all(tree: Path) -> None:
    write(tree, FOUND, SURVIVED)
    (tree / "test_m.py").write_text("a = 1\n")
    assert verdicts(tree) == [FOUND, None]
    (tree / "m.py").write_text("x = 1\n\ny = 2\n")
    assert verdicts(tree) == [None, None]


def test_the_lines_of_tests_are_known_until_a_module_or_the_tests_change(tree: Path) -> None:
    file, seen = tree / "test_m.py", {"test_m.py::test_x": {"seconds": 0.1, "lines": {"m": [1]}}}
    opened(tree).add_tests(file, seen)
    assert opened(tree).tests(file) == seen
    for changed in (file, tree / "m.py"):
        text = changed.read_text()
        changed.write_text(text + "z = 1\n")
        assert opened(tree).tests(file) is None
        changed.write_text(text)
