"""docs/dashboard.md is right: its command serves the page, its settings are some, and what it lists is there."""

from __future__ import annotations

import http.client
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from coordinator.config import read_config
from coordinator.dashboard.device_states import DEVICE_STATES
from coordinator.dashboard.endpoint import dashboard_endpoint
from coordinator.dashboard.event_hub import MAX_PAGES
from coordinator.dashboard.map_worker import MAX_MAPPED_DEVICES, REST_FACTOR
from tests.coordinator.dashboard.test_endpoint import token

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "dashboard.md").read_text(encoding="utf-8")
SERVICE = (ROOT / "docs" / "run-as-a-service.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)
CONFIG = next(text for kind, text in re.findall(r"```(\w+)\n(.*?)```", SERVICE, flags=re.DOTALL) if kind == "toml")


def test_the_command_serves_the_page_and_prints_its_link(tmp_path: Path, free_port: int) -> None:
    (command,) = (text.removeprefix("$ ").strip() for kind, text in BLOCKS if kind == "console")
    (tmp_path / "coordinator.toml").write_text(CONFIG.replace('"embedded"', '"mqtt://127.0.0.1:9"'), encoding="utf-8")
    arguments = shlex.split(command.replace("8080", str(free_port)))[1:]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-m", "coordinator", *arguments]
    with subprocess.Popen(program, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=env) as service:
        try:
            assert service.stderr is not None
            line = next(line for line in service.stderr if line.startswith("dashboard: "))
            link = line.removeprefix("dashboard: ").strip()
            assert link.startswith(f"http://127.0.0.1:{free_port}/#control=")
            connection = http.client.HTTPConnection("127.0.0.1", free_port, timeout=60)
            connection.request("GET", "/")
            assert b"<title>fedcenters</title>" in connection.getresponse().read()
            connection.close()
            assert (tmp_path / "runs" / "home" / "dashboard.url").read_text().strip() == link
        finally:
            service.kill()


def test_the_settings_for_others_to_see_are_some(tmp_path: Path) -> None:
    (lines,) = (text for kind, text in BLOCKS if kind == "toml")
    for name in ("read", "control"):
        token(tmp_path, name)
    path = tmp_path / "coordinator.toml"
    path.write_text(lines + CONFIG, encoding="utf-8")
    config = read_config(path)
    where = dashboard_endpoint(config)
    assert (where.host, where.port) == ("0.0.0.0", 8444)  # noqa: S104 - the page's
    assert where.read is not None
    assert dashboard_endpoint(replace(config, dashboard=replace(config.dashboard, address="8443"))).read is not None


def test_the_page_names_what_there_is() -> None:
    for state in DEVICE_STATES:
        assert state in PAGE
    assert f"more than {MAX_MAPPED_DEVICES:,} devices" in PAGE
    assert f"{MAX_PAGES} may look at once" in PAGE
    assert "at most a fifth of the time" in PAGE
    assert REST_FACTOR == 4.0
