"""`attack-drill` says which bounds held, and fails when one did not."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator import cli
from coordinator.attack_drill import drill
from coordinator.attack_drill.message_attacks import MESSAGE_ATTACKS
from coordinator.attack_drill.round_attacks import ROUND_ATTACKS
from coordinator.rounds import exchange_rules
from edge_client.errors import FedcentersError


@pytest.mark.broker
@pytest.mark.filterwarnings("ignore:unclosed <s:ResourceWarning")  # paho leaves a failed handshake's socket
def test_every_bound_holds_on_a_copy_of_what_is_provisioned() -> None:
    found = CliRunner().invoke(cli.app, ["attack-drill", "--json"])
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [line for line in lines if not line["held"]] == []
    assert [line["tried"] for line in lines] == [a.tried for a in (*MESSAGE_ATTACKS, *ROUND_ATTACKS)]
    assert found.exit_code == 0


@pytest.mark.broker
def test_a_bound_that_does_not_hold_is_named_and_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its access list gives every device every right."""
    monkeypatch.setattr("coordinator.identity.revocation.broker_acl.mosquitto_acl", lambda *_: "pattern readwrite #\n")
    wanted = "write to topics of others"
    monkeypatch.setattr(drill, "MESSAGE_ATTACKS", [a for a in MESSAGE_ATTACKS if a.tried == wanted])
    monkeypatch.setattr(drill, "ROUND_ATTACKS", ())
    found = CliRunner().invoke(cli.app, ["attack-drill"])
    assert f"BROKEN  {wanted}" in found.stdout
    assert "0 of 1 bounds held" in found.stdout
    assert found.exit_code == FedcentersError.exit_code != 0


@pytest.mark.broker
def test_each_bound_of_a_round_that_is_taken_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    validation, exchange = "coordinator.rounds.update_validation", "coordinator.runtime.exchange"
    monkeypatch.setattr(f"{exchange}.task_messages.max_samples", lambda *_: 2**40)
    monkeypatch.setattr(f"{validation}._check_shape", lambda *_: None)
    monkeypatch.setattr(f"{validation}.bounded_buffers", lambda update, *_: update)
    counted = itertools.count()
    monkeypatch.setattr(f"{exchange}.uploads.OpenUploads.blocks", lambda *_: next(counted))  # each block looks new
    monkeypatch.setattr("edge_client.transport.blobs.BlobFolder.drop_partials", lambda *_, **__: None)
    told = exchange_rules._final_status
    monkeypatch.setattr(exchange_rules, "_final_status", lambda *a: told(*a).replace("superseded", "dup"))
    monkeypatch.setattr(drill, "MESSAGE_ATTACKS", ())
    found = CliRunner().invoke(cli.app, ["attack-drill", "--json"])
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [(line["tried"], line["held"]) for line in lines] == [(attack.tried, False) for attack in ROUND_ATTACKS]


@pytest.mark.broker
def test_the_copy_has_a_users_own_model_method_and_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its small model travels in one block, and its program is compiled, which takes seconds."""
    path = tmp_path / "coordinator.toml"
    path.write_text(
        'federation = "mine"\nbroker = "mqtts://broker.example"\nfolder = "run"\nmax-samples-ratio = 3\n'
        'model = { name = "linear-regression" }\nruns = [{ method = "fesem", num-rounds = 9, clusters = 2 }]\n'
    )
    monkeypatch.setattr(drill, "MESSAGE_ATTACKS", ())
    wanted = ("answer with 2^31 samples", "hold the only credit with one block")
    monkeypatch.setattr(drill, "ROUND_ATTACKS", [a for a in ROUND_ATTACKS if a.tried in wanted])
    found = CliRunner().invoke(cli.app, ["attack-drill", str(path)])
    assert found.exit_code == 0
    assert "compiling model linear-regression" in found.stderr
    assert "weighs 120 samples" in found.stdout  # three times the others' 40
    assert "2 of 2 bounds held" in found.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.broker
def test_masked_sums_are_refused_and_no_bound_is_said_to_hold(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.toml"
    path.write_text(
        'federation = "mine"\nbroker = "mqtts://broker.example"\nfolder = "run"\n'
        '[model]\nname = "linear-regression"\n'
        '[[runs]]\nmethod = "fesem"\nname = "sums"\nnum-rounds = 9\nclusters = 2\nsecure = "updates"\n'
    )
    found = CliRunner().invoke(cli.app, ["attack-drill", str(path)])
    assert found.exit_code != 0
    assert "the run sums adds masked updates" in found.stderr
    assert "a copy of the file that has no `secure`; docs/privacy.md says" in found.stderr
    assert "held" not in found.stdout


def test_without_mosquitto_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill, "find_mosquitto", lambda: None)
    found = CliRunner().invoke(cli.app, ["attack-drill"])
    assert found.exit_code != 0
    assert "apt install mosquitto" in found.stderr
