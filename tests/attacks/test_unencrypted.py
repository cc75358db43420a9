"""Tries to have a password, a key or a token travel in the open: plain MQTT elsewhere, or a setting that allows it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from coordinator import cli as coordinator_cli
from coordinator.config import read_config
from edge_client import cli as edge_cli
from edge_client.config import config_from_mapping, load_config
from edge_client.errors import ConfigError
from emulator.testbed import testbed_files

ELSEWHERE = "mqtt://203.0.113.1:1883"  # an address that documentation may use (RFC 5737)


def device(folder: Path) -> Path:
    (folder / "data").mkdir()
    np.savez(folder / "data" / "train.npz", x=np.zeros((4, 2), np.float32), y=np.zeros(4, np.int64))
    table = {
        "federation": "demo",
        "device-id": "d1",
        "broker": ELSEWHERE,
        "data": "data",
        "state": "state",
        "signing-keys": ["00" * 32],
    }
    testbed_files.write_toml(folder / "client.toml", table)
    return folder / "client.toml"


@pytest.mark.parametrize("command", ["join", "nearest"])
def test_a_device_does_not_dial_in_the_open(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert edge_cli.main([command, "--config", str(device(tmp_path))]) == ConfigError.exit_code
    said = capsys.readouterr().err
    assert "is not encrypted" in said
    assert "--insecure" in said


def test_a_coordinator_does_not_dial_in_the_open(tmp_path: Path) -> None:
    runs = [{"method": "fedavg", "num-rounds": 1}]
    testbed_files.write_coordinator(
        tmp_path / "c.toml", tmp_path / "run", broker=ELSEWHERE, devices=1, runs=runs, seed=0, engines=("onnx",)
    )
    result = CliRunner().invoke(coordinator_cli.app, ["serve", str(tmp_path / "c.toml")])
    assert result.exit_code == ConfigError.exit_code
    assert "is not encrypted" in result.stderr


@pytest.mark.parametrize("key", ["insecure", "tls-insecure", "verify"])
def test_no_setting_allows_it(tmp_path: Path, key: str) -> None:
    raw = {"federation": "demo", key: True}
    with pytest.raises(ConfigError, match=f"unknown key '{key}'"):
        config_from_mapping(raw, folder=tmp_path, where="client.toml")
    (tmp_path / "c.toml").write_text(f'federation = "demo"\n{key} = true\n')
    with pytest.raises(ConfigError, match=f"unknown key {key}"):
        read_config(tmp_path / "c.toml", environ={})


def test_no_variable_allows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCENTERS_INSECURE", "true")
    path = device(tmp_path)
    assert not hasattr(load_config(path, {"FEDCENTERS_INSECURE": "true"}), "insecure")
    assert edge_cli.main(["join", "--config", str(path)]) == ConfigError.exit_code
