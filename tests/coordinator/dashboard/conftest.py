"""A dashboard that a browser can open, with four devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.coordinator.dashboard.test_displayed_metrics import joined
from tests.support.served_dashboard import DashboardSite, serve_dashboard


@pytest.fixture
def site(tmp_path: Path) -> Iterator[DashboardSite]:
    with serve_dashboard(tmp_path) as found:
        for number in range(4):
            found.hub.event(joined(number))
        yield found
