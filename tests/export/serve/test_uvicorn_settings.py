"""What a server's settings do to the process that it runs in."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

from starlette.applications import Starlette

from export.serve.uvicorn_settings import uvicorn_config


def test_a_server_closes_no_log_of_the_process(tmp_path: Path) -> None:
    with closing(logging.FileHandler(tmp_path / "log")) as handler:
        uvicorn_config(Starlette())
        assert handler.stream is not None
        assert not handler.stream.closed
