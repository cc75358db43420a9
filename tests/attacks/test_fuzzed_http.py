"""A short run of fuzz_http.py for each server: requests drawn from its OpenAPI document, answers as it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attacks import fuzz_http


@pytest.mark.parametrize(
    "start", [fuzz_http.centers, fuzz_http.dashboard, fuzz_http.phone], ids=lambda start: start.__name__
)
def test_no_request_is_a_server_error(tmp_path: Path, start: type) -> None:
    with start(tmp_path) as server:
        assert fuzz_http.fuzz(server, examples=10) >= len(server.document["paths"])
