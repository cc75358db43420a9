"""The fleet of the dashboard's bench tells the page what a coordinator tells it."""

from __future__ import annotations

from pathlib import Path

from tests.benches.dashboard import BusyFleet
from tests.support.served_dashboard import serve_dashboard


def test_the_bench_feeds_the_page_as_a_coordinator_does(tmp_path: Path) -> None:
    with serve_dashboard(tmp_path) as site:
        fleet = BusyFleet(site, 20)
        fleet.look()
        fleet.round()
        assert len(fleet.map()["devices"]) == 20
