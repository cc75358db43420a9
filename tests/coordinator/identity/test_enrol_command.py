"""The command `enrol` as a process, from its first line to the signal that ends it."""

from __future__ import annotations

import signal
from pathlib import Path

from edge_client.cli import main
from tests.coordinator.test_service import PATIENCE_S, heard, started
from tests.support.guarded_broker import provision_federation


def test_tokens_become_certificates_until_a_signal_ends_the_command(tmp_path: Path, free_port: int) -> None:
    work = provision_federation(tmp_path / "keys", enrol_port=free_port)
    work.add_token("d1")
    home = work.folder / "devices" / "d1"
    with started("enrol", str(work.folder), "--listen", "127.0.0.1") as process:
        heard(process, f"tokens become certificates at port {free_port}")
        assert main(["enrol", "--config", str(home / "client.toml")]) == 0
        heard(process, "d1 has a certificate until")
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, rest) == (0, "")
    assert (home / "device.crt").exists()
