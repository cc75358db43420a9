"""`attack-drill` says which bounds held, and fails when one did not."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from coordinator import cli
from coordinator.attack_drill import drill
from coordinator.attack_drill.drill import Attack
from edge_client.errors import FedcentersError


@pytest.mark.broker
@pytest.mark.filterwarnings("ignore:unclosed <s:ResourceWarning")  # paho leaves a failed handshake's socket
def test_every_bound_holds_on_a_copy_of_what_is_provisioned() -> None:
    found = CliRunner().invoke(cli.app, ["attack-drill", "--json"])
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [line["tried"] for line in lines if not line["held"]] == []
    assert [line["tried"] for line in lines] == [attack.tried for attack in drill.ATTACKS]
    assert found.exit_code == 0


@pytest.mark.broker
def test_a_bound_that_does_not_hold_is_named_and_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its access list gives every device every right."""
    monkeypatch.setattr("coordinator.identity.revocation.broker_acl.mosquitto_acl", lambda *_: "pattern readwrite #\n")
    wanted = "write to topics of others"
    attacks: tuple[Attack, ...] = tuple(a for a in drill.ATTACKS if a.tried == wanted)
    monkeypatch.setattr(drill.run_drill, "__defaults__", (attacks,))
    found = CliRunner().invoke(cli.app, ["attack-drill"])
    assert f"BROKEN  {wanted}" in found.stdout
    assert "0 of 1 bounds held" in found.stdout
    assert found.exit_code == FedcentersError.exit_code != 0


def test_without_mosquitto_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill, "find_mosquitto", lambda: None)
    found = CliRunner().invoke(cli.app, ["attack-drill"])
    assert found.exit_code != 0
    assert "apt install mosquitto" in found.stderr
