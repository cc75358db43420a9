"""What the operator is told of certificates from elsewhere and of tokens, whose ends `--renew expiring` cannot move."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from coordinator.identity.provision_plan import ProvisionPlan
from coordinator.identity.provisioning import Provisioner
from edge_client.errors import ConfigError
from edge_client.transport.tls import read_certificate
from tests.coordinator.identity.test_provisioning import invoke
from tests.support.guarded_broker import now


def provisioned(folder: Path, days_ago: int = 0) -> Provisioner:
    plan = ProvisionPlan(federation="demo", hosts=("h",), page="https://h", web_port=8884)
    work = Provisioner(folder=folder, plan=plan, now=now() - dt.timedelta(days=days_ago))
    work.write_infrastructure()
    return work


@pytest.mark.parametrize(("days_ago", "said"), [(366, "expired"), (362, "expires in"), (340, "")])
def test_a_check_fails_for_a_browsers_certificate_from_elsewhere_that_ends_within_a_week(
    tmp_path: Path, days_ago: int, said: str
) -> None:
    work, other = provisioned(tmp_path / "keys"), provisioned(tmp_path / "other", days_ago)
    path = work.folder / "broker" / "web.crt"
    pem = read_certificate(other.folder / "broker" / "web.crt").public_bytes(serialization.Encoding.PEM)
    path.write_bytes(pem)
    found = invoke(str(work.folder), "--check")
    assert found.exit_code == (ConfigError.exit_code if said else 0)
    assert (f"{path} {said}" in found.stderr) == bool(said)
    assert ("start mosquitto again" in found.stderr) == bool(said)


def test_a_token_is_said_to_wait_for_a_day_and_to_have_ended_unused(tmp_path: Path) -> None:
    work = provisioned(tmp_path / "keys", days_ago=2)
    work.add_token("shed")
    assert (
        "the token of shed ended before it was used: --token shed makes another one"
        in invoke(str(work.folder), "--check").stdout
    )
    waits = "shed has a token that waits to be used, for 24 hours after it was made"
    assert waits in invoke(str(work.folder), "--token", "shed").stdout
    assert "ended before it was used" not in invoke(str(work.folder), "--check").stdout


def test_a_name_that_is_none_is_refused_in_words_for_people(tmp_path: Path) -> None:
    found = invoke(str(provisioned(tmp_path / "keys").folder), "--device", "a.b")
    assert found.stderr.startswith("error: device id 'a.b' is not of the form")


def test_a_name_without_a_certificate_is_answered_with_the_command_that_lists_the_names(tmp_path: Path) -> None:
    folder = str(provisioned(tmp_path / "keys").folder)
    for order in ("--renew", "--revoke"):
        assert "`provision --check --json` lists the names" in invoke(folder, order, "d9").stderr


def test_with_each_new_certificate_and_key_the_operator_is_told_what_is_left_to_do_by_hand(tmp_path: Path) -> None:
    folder = str(provisioned(tmp_path / "keys").folder)
    invoke(folder, "--device", "d1")
    assert "mosquitto reads its own at SIGHUP" in invoke(folder, "--renew", "d1").stderr
    assert "SIGHUP" not in invoke(folder, "--renew", "expiring").stderr  # there is none
    assert "when all have it, --switch-signing-key" in invoke(folder, "--next-signing-key").stderr
    assert "signing.key to the coordinator, and start it again" in invoke(folder, "--switch-signing-key").stderr
