"""docs/methods.md is right: a row for every method and no other, its settings with defaults, what it costs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coordinator.strategies.base import Strategy
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.documentation import setting_words
from coordinator.strategies.registry import METHODS, make_method, method_settings
from edge_client.protocol.task import Fit, Probe
from tests.support.methods import MethodWorld, build, world
from tests.support.softmax_program import grouped_fleet

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
LOCAL = grouped_fleet(6, 2, n=20)


def as_written(method: LocalSgd | Strategy) -> dict[str, str]:
    """The settings of a method as users write them."""
    settings = method_settings(method).items()
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings}


COMMON = as_written(LocalSgd())


def table(heading: str) -> dict[str, list[str]]:
    """The cells of each row below a heading, by the name in the first."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:3] == "| `"]
    return {cells[0].strip("`"): cells[1:] for cells in rows}


COSTS, EDGES = table("What it does, and what that costs"), table("Own settings and edge cases")
DIFFERENCES = table("Differences from the papers and their code")


@pytest.mark.parametrize("rows", [COSTS, EDGES], ids=["costs", "edges"])
def test_every_method_has_a_row_and_every_row_is_a_method(rows: dict[str, list[str]]) -> None:
    assert set(rows) == set(METHODS)


def test_every_row_of_the_differences_is_a_method() -> None:
    assert set(DIFFERENCES) <= set(METHODS)
    assert len(DIFFERENCES) > 10


def test_the_common_settings_are_those_of_local_sgd() -> None:
    assert {name: cells[0] for name, cells in table("Settings").items()} == COMMON


def test_the_command_of_the_page_names_a_method_and_settings_that_it_has() -> None:
    words = next(line for line in PAGE.splitlines() if line.startswith("$ ")).split()
    make_method(words[words.index("--method") + 1], **dict(word.split("=") for word in words if "=" in word))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_row_lists_the_methods_own_settings_and_defaults(name: str) -> None:
    settings = as_written(make_method(name))
    cell = EDGES[name][0]
    if cell.startswith("of the common ones only"):
        assert set(re.findall(r"`([\w-]+)`", cell)) == set(settings)
    else:
        assert set(settings) >= set(COMMON)
        assert dict(re.findall(r"`([\w-]+)=([\w.-]+)`", cell)) == {k: v for k, v in settings.items() if k not in COMMON}


def test_the_page_says_what_each_own_setting_means_in_the_words_of_the_docstrings() -> None:
    meant: dict[tuple[str, str], list[str]] = {}
    for name in sorted(METHODS):
        for key in (key for key in as_written(make_method(name)) if key not in COMMON):
            words = re.sub(r'"([^"]+)"', r"`\1`", setting_words(METHODS[name], key.replace("-", "_")))
            words = re.sub(r"\b(warm_up|eps_1|eps_2)\b", lambda found: f"`{found[0].replace('_', '-')}`", words)
            meant.setdefault((key, words), []).append(name)
    section = PAGE.split("## What the own settings mean\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows == [
        f"| `{key}` | {' '.join(f'`{name}`' for name in names)} | {words} |"
        for (key, words), names in sorted(meant.items())
    ]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_row_says_what_a_settled_round_costs(name: str) -> None:
    fleet = world(build(name, {"local-steps": 1, "first-steps": 1, "trial-rounds": 1}, k=3), LOCAL, rounds=3)
    fleet.round(last=False)
    settings = method_settings(fleet.strategy)
    k, r = int(settings.get("clusters", settings.get("runs", 1))), int(settings.get("local-rounds", 1))
    said = [sum({"K": k, "R": r}.get(t) or int(t) for t in c.split(";")[0].split(" + ")) for c in COSTS[name][1:4]]
    assert said == list(cost(fleet, "d03"))


def cost(fleet: MethodWorld, who: str) -> tuple[int, int, int]:
    """Exchanges of the last round, different models that the device fetched for them, models and gradients it sent."""
    tasks = [exchange[who] for exchange in fleet.exchanges[:-1] if who in exchange]
    down = {model.tobytes() for task in tasks for model in fleet.devices.fetched(who, task)}
    up = sum(task.upload if isinstance(task, Fit) else "grad" in task.want for task in tasks)
    assert all(isinstance(task, (Fit, Probe)) for task in tasks)
    return len(fleet.exchanges) - 1, len(down), up
