"""A short run of fuzz_http.py for each server: requests drawn from its OpenAPI document, answers as it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.attacks import fuzz_http


@pytest.mark.parametrize(
    "start", [fuzz_http.centers, fuzz_http.dashboard, fuzz_http.phone], ids=lambda start: start.__name__
)
def test_no_request_is_a_server_error(tmp_path: Path, start: type) -> None:
    with start(tmp_path) as server:
        assert fuzz_http.fuzz(server, examples=10) >= len(server.document["paths"])


def test_requests_that_a_gate_refuses_one_and_all_are_no_check_of_the_pages(tmp_path: Path) -> None:
    steering = {**fuzz_http.DASHBOARD, "paths": {"/api/control": fuzz_http.DASHBOARD["paths"]["/api/control"]}}
    with fuzz_http.dashboard(tmp_path) as server:
        unknown = replace(server, document=steering, headers={"Authorization": "Bearer wrong"})
        with pytest.raises(RuntimeError, match="no request in to POST /api/control"):
            fuzz_http.fuzz(unknown, examples=3)
