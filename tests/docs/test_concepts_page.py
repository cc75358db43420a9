"""docs/concepts.md is right: its commands give its figures, and its other figures stand in RESULTS.md and its pages."""

from __future__ import annotations

import re

import pytest

import fedcenters as fc
from coordinator.strategies.registry import METHODS
from emulator.data.fleet_split import digits_fleet
from emulator.testbed.demo import DemoSettings
from tests.support.doc_pages import DOCS, ROOT, PageReader

PAGE = "concepts.md"
pytestmark = pytest.mark.timeout(600)
TEXT = (DOCS / PAGE).read_text(encoding="utf-8")
POINTS = 3.0  # other BLAS libraries sum in another order, and ten rounds of a small problem amplify that


def told(method: str) -> list[float]:
    """The two figures in the row of a method: with three groups, with one."""
    row = next(line for line in TEXT.splitlines() if f"(`{method}`)" in line and line.startswith("| "))
    return [float(figure) for figure in re.findall(r"([\d.]+) %", row)]


@pytest.mark.parametrize("method", ["nonfed", "fedavg", "fesem"])
def test_the_first_table_is_what_the_commands_print(reader: PageReader, method: str) -> None:
    printed = [text for command, text in reader.printed.items() if f"--method {method} " in command]
    seen = [float(re.findall(r"accuracy(?: as served)? \(micro, macro\) +([\d.]+)%", text)[0]) for text in printed]
    assert seen == pytest.approx(told(method), abs=POINTS)


def test_the_devices_of_the_first_table_have_so_many_samples() -> None:
    (groups, alike) = re.findall(r"(\d+) or (\d+) (?:training )?samples", TEXT)
    for told_sizes, partition in ((groups, "label-permutations:groups=3"), (alike, "iid")):
        fleet = fc.fleets.digits(devices=12, partition=partition)
        assert {len(fleet[name].train) for name in fleet} == {int(size) for size in told_sizes}


def test_the_demos_twelve_devices_hold_the_digits_of_the_fleet_that_the_readme_names() -> None:
    assert "The twelve hold the digits of `fc.fleets.digits(devices=12)`" in (ROOT / "README.md").read_text()
    demo, fleet = digits_fleet(DemoSettings().devices, DemoSettings().new_devices), fc.fleets.digits(devices=12)
    assert all((fleet[name].train.x == local.train.x).all() for name, local in demo.devices.items())


def test_the_table_of_numbers_of_centers_is_what_the_command_prints(reader: PageReader) -> None:
    printed = reader.printed["fedcenters-emulator choose-k --devices 12 --most 5"]
    shown, seen = (
        [float(share) for share in re.findall(r"^ +\d +\d +([\d.]+)%", text, flags=re.MULTILINE)]
        for text in (TEXT, printed)
    )
    assert len(shown) == 5
    assert seen == pytest.approx(shown, abs=POINTS)
    assert "take 3 centers" in printed


def test_figures_from_results_stand_there() -> None:
    pages = (ROOT / "RESULTS.md", DOCS / "results-trials.md")
    results = "".join(page.read_text(encoding="utf-8") for page in pages)
    for row in ("NoFed |  | 90.41", "FedAvg |  | 84.27", "80.1 %, FedAvg 68.7", "| 97.50 |", "22 of them"):
        assert row in results


def test_every_method_that_is_recommended_exists() -> None:
    section = TEXT.split("## Which method")[1].split("\n## ")[0]
    named = {name for row in section.splitlines() if row.startswith("| ") for name in re.findall(r"`([a-z-]+)`", row)}
    assert named <= set(METHODS)
