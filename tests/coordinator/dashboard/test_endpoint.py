"""A dashboard that others can reach needs tokens and TLS, or there is none; the error says what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.dashboard.endpoint import dashboard_endpoint
from edge_client.errors import ConfigError
from tests.support.virtual_federation import config


def token(folder: Path, name: str, text: str = "") -> Path:
    path = folder / f"{name}.token"
    path.write_text(text or f"{name}-" + "x" * 32, encoding="ascii")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("8080", "127.0.0.1", 8080),
        ("localhost:0", "localhost", 0),
        ("[::1]:9", "::1", 9),
        ("127.0.0.2:9", "127.0.0.2", 9),
    ],
)
def test_on_this_machine_a_port_is_enough(tmp_path: Path, text: str, host: str, port: int) -> None:
    where = dashboard_endpoint(config(tmp_path, dashboard=text))
    assert (where.host, where.port, where.read) == (host, port, None)
    assert len(where.control) >= 32
    assert where.control in where.link(80)
    assert where.control not in repr(where)


@pytest.mark.parametrize("text", ["", "host", "host:", "1:2:x", "host:70000", ":-1"])
def test_what_is_no_address_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="dashboard is a port"):
        dashboard_endpoint(config(tmp_path, dashboard=text))


def test_elsewhere_both_tokens_and_tls_are_needed(tmp_path: Path) -> None:
    read, control = token(tmp_path, "read"), token(tmp_path, "control")
    tls: dict[str, Any] = {"dashboard_certificate": tmp_path / "c.pem", "dashboard_key": tmp_path / "k.pem"}
    tokens: dict[str, Any] = {"dashboard_read_token": read, "dashboard_control_token": control}
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org", ""):  # noqa: S104 - what it is about
        address = f"[{host}]:8080" if ":" in host else f"{host}:8080"
        if not host:
            assert dashboard_endpoint(config(tmp_path, dashboard=address)).host == "127.0.0.1"
            continue
        for less in ({}, tls, {**tls, "dashboard_read_token": read}):
            with pytest.raises(ConfigError, match="it needs two tokens"):
                dashboard_endpoint(config(tmp_path, dashboard=address, **less))
        with pytest.raises(ConfigError, match="it needs TLS"):
            dashboard_endpoint(config(tmp_path, dashboard=address, **tokens))
        where = dashboard_endpoint(config(tmp_path, dashboard=address, **tokens, **tls))
        assert where.link(8080).startswith("https://")


def test_a_token_that_lasts_is_in_the_link_and_not_in_the_log(tmp_path: Path) -> None:
    control = token(tmp_path, "control")
    own = dashboard_endpoint(config(tmp_path, dashboard="8080", dashboard_control_token=control))
    assert own.link(8080) == f"http://127.0.0.1:8080/#control={control.read_text().strip()}"
    assert own.link_in_logs(8080).startswith("http://127.0.0.1:8080/ ")
    assert control.read_text().strip() not in own.link_in_logs(8080)
    assert control.read_text().strip() not in repr(own)
    drawn = dashboard_endpoint(config(tmp_path, dashboard="8080"))
    assert drawn.link_in_logs(8080) == drawn.link(8080)


def test_one_token_for_both_rights_is_refused(tmp_path: Path) -> None:
    read, control = token(tmp_path, "read", "a" * 40), token(tmp_path, "control", "a" * 40)
    tokens: dict[str, Any] = {"dashboard_read_token": read, "dashboard_control_token": control}
    with pytest.raises(ConfigError, match="are the same"):
        dashboard_endpoint(config(tmp_path, dashboard="8080", **tokens))


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = token(tmp_path, "read")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        dashboard_endpoint(config(tmp_path, dashboard="8080", dashboard_read_token=path))
