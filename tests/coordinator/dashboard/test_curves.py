"""The page's curves, in a browser: where their values lie, and what stands in the place of a curve without values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.coordinator.dashboard.test_displayed_metrics import round_event
from tests.support.browser import Open
from tests.support.served_dashboard import serve_dashboard

pytestmark = pytest.mark.browser
UNTESTED = {"accuracy": {"micro": None, "macro": None}, "per_device": {}, "per_center": [None, None]}
PLOT = """() => {
  const svg = document.querySelector("#loss svg");
  const ticks = [...svg.querySelectorAll("text[text-anchor=end]")].map((text) => Number(text.textContent));
  const heights = [...svg.querySelectorAll("line.axis")].map((line) => Number(line.getAttribute("y1")));
  const heightsOf = (path) => path.getAttribute("d").match(/ [\\d.-]+/g).map(Number);
  const drawn = [...svg.querySelectorAll("path.line")].map(heightsOf);
  return { ticks, heights, drawn, height: svg.viewBox.baseVal.height };
}"""


def with_losses(number: int, losses: list[float]) -> dict[str, Any]:
    """A round of a program that predicts numbers, with a loss of its own."""
    loss = {"micro": sum(losses) / len(losses), "macro": sum(losses) / len(losses)}
    return {**round_event(number, [0, 1]), **UNTESTED, "loss": loss, "loss_per_center": losses}


@pytest.mark.parametrize("losses", [([2.0, 1.0], [-1.0, 0.5]), ([-1.5, -2.0], [-2.5, -3.0])])
def test_losses_below_zero_are_drawn_inside_their_chart_the_lower_ones_lower(
    tmp_path: Path, visit: Open, losses: tuple[list[float], list[float]]
) -> None:
    """As a Gaussian likelihood's."""
    with serve_dashboard(tmp_path) as site:
        for number, each in enumerate(losses, 1):
            site.hub.event(with_losses(number, each))
        page = visit(site.link).page
        expect(page.locator("#loss path.line")).to_have_count(2)
        plot = page.evaluate(PLOT)
        assert len(plot["ticks"]) >= 2
        assert sorted(plot["ticks"]) == plot["ticks"]
        assert sorted(plot["heights"], reverse=True) == plot["heights"]
        assert all(0 < y < plot["height"] - 24 for curve in plot["drawn"] for y in curve)
        assert all(curve[0] < curve[1] for curve in plot["drawn"])  # both losses fall


def test_a_chart_without_values_says_why_also_after_the_first_round(tmp_path: Path, visit: Open) -> None:
    with serve_dashboard(tmp_path) as site:
        site.hub.event({**round_event(1, [0, 1]), **UNTESTED})
        page = visit(site.link).page
        for chart in ("#methods", "#accuracy", "#loss"):
            expect(page.locator(chart)).to_have_text("No test is over yet.")
        site.hub.event(with_losses(2, [0.5, 0.25]))
        for chart in ("#methods", "#accuracy"):
            expect(page.locator(chart)).to_have_text("The tests of this run tell no accuracy.")
        expect(page.locator("#loss path.line")).to_have_count(2)
        site.hub.event({**round_event(3, [0, 1]), "per_center": [0.5, 0.25]})
        expect(page.locator("#methods path.line")).to_have_count(1)
