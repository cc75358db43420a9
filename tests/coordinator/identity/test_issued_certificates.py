"""The certificates that `provision` issues: for whom, for how long, and when again."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from coordinator.identity.broker_acl import COORDINATOR_CLIENT_ID
from coordinator.identity.certificate_authority import CERTIFICATE_DAYS, open_authority
from coordinator.identity.cli import _in_words
from coordinator.identity.provision_plan import ProvisionPlan
from coordinator.identity.provisioning import BROKER_NAME, Provisioner
from edge_client.config import load_config
from edge_client.errors import ConfigError
from edge_client.transport.tls import read_certificate
from tests.coordinator.identity.test_provisioning import invoke, snapshot
from tests.support.guarded_broker import now, provision_federation
from tests.support.size_limit import files_of_at_most


def test_a_certificate_that_has_ended_is_not_told_to_end_in_less_than_no_days() -> None:
    found = {"folder": "keys", "federation": "demo", "broker": "", "names": [], "made": 0, "revoked": [], "phones": []}
    ended = [{"name": "pi-1", "days": -366}, {"name": "pi-2", "days": 14}]
    told = _in_words({**found, "expiring": ended, "tokens": [], "tokens_expired": [], "tokens_tried_twice": []})
    assert told.splitlines()[1:] == ["pi-1 expired 366 days ago", "pi-2 expires in 14 days"]


def test_a_certificate_says_who_and_for_which_federation_and_no_more(tmp_path: Path) -> None:
    work = provision_federation(tmp_path / "keys", "d1")
    device = read_certificate(work.folder / "devices" / "d1" / "device.crt")
    server = read_certificate(work.folder / "broker" / "server.crt")
    assert device.subject.rfc4514_string() == "CN=d1,O=demo"
    assert purposes(device) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert purposes(server) == [ExtendedKeyUsageOID.SERVER_AUTH]
    for leaf in (device, server):
        assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert leaf.not_valid_after_utc - work.now == pytest.approx(
            dt.timedelta(days=CERTIFICATE_DAYS), abs=dt.timedelta(seconds=1)
        )
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == ["localhost", "127.0.0.1"]


def test_the_authority_signs_devices_and_no_other_authority(tmp_path: Path) -> None:
    signs = open_authority(tmp_path, "demo", now()).certificate.extensions
    found = signs.get_extension_for_class(x509.BasicConstraints)
    assert (found.critical, found.value.ca, found.value.path_length) == (True, True, 0)


def purposes(certificate: x509.Certificate) -> list[x509.ObjectIdentifier]:
    return list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def test_a_certificate_never_outlives_its_authority(tmp_path: Path) -> None:
    late = now() + dt.timedelta(days=3600)
    authority = open_authority(tmp_path, "demo", now())
    made = authority.issue_client(authority.key.public_key(), "d1", late)
    assert made.not_valid_after_utc == authority.certificate.not_valid_after_utc


def test_a_broker_that_is_dialled_by_another_name_gets_another_certificate(tmp_path: Path) -> None:
    work = provision_federation(tmp_path / "keys", "d1")
    device = (work.folder / "devices" / "d1" / "device.crt").read_bytes()
    moved = Provisioner(folder=work.folder, plan=ProvisionPlan(federation="demo", hosts=("new.example",)), now=now())
    moved.write_infrastructure()
    moved.add_device("d1")
    assert load_config(work.folder / "devices" / "d1" / "client.toml", {}).broker == "mqtts://new.example:8883"
    assert (work.folder / "devices" / "d1" / "device.crt").read_bytes() == device
    names = read_certificate(work.folder / "broker" / "server.crt").extensions
    assert [str(n.value) for n in names.get_extension_for_class(x509.SubjectAlternativeName).value] == ["new.example"]


@pytest.mark.parametrize("host", ["0:0:0:0:0:0:0:1", "::1", "127.0.0.1", "Broker.Example"])
def test_the_same_host_gets_no_second_certificate(tmp_path: Path, host: str) -> None:
    asked = (str(tmp_path / "k"), "--federation", "demo", "--host", host)
    assert invoke(*asked).exit_code == 0
    before = snapshot(tmp_path / "k")
    assert invoke(*asked).exit_code == 0
    assert snapshot(tmp_path / "k") == before


def test_whoever_ends_soon_is_told_and_renewed(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    plan = ProvisionPlan(federation="demo", hosts=("h",))
    old = Provisioner(folder=keys, plan=plan, now=now() - dt.timedelta(days=340))
    old.write_infrastructure()
    old.add_device("d1")
    failed = invoke(str(keys), "--check", "--json")
    assert failed.exit_code == ConfigError.exit_code
    ending = {each["name"] for each in json.loads(failed.stdout)["expiring"]}
    assert ending == {"d1", COORDINATOR_CLIENT_ID, "server.broker", "server.enrol"}
    assert "--renew expiring" in failed.stderr
    assert invoke(str(keys), "--renew", "expiring").exit_code == 0
    assert json.loads(invoke(str(keys), "--check", "--json").stdout)["expiring"] == []


def test_what_ends_soon_is_renewed_but_for_the_authority_and_revoked_devices(tmp_path: Path) -> None:
    work = provision_federation(tmp_path / "keys", "d1", "d2")
    work.revoke("d2")
    assert [work.has_key_of(name) for name in ("d1", "d2", "authority")] == [True, False, False]


@pytest.mark.parametrize(("name", "file"), [("d1", "devices/d1/device.crt"), (BROKER_NAME, "broker/server.crt")])
def test_a_damaged_certificate_is_renewed(tmp_path: Path, name: str, file: str) -> None:
    work = provision_federation(tmp_path, "d1")
    serial = read_certificate(tmp_path / file).serial_number
    (tmp_path / file).write_bytes(b"")
    work.renew(name)
    assert read_certificate(tmp_path / file).serial_number != serial


@pytest.mark.parametrize(("name", "file"), [("d1", "devices/d1/device.crt"), (BROKER_NAME, "broker/server.crt")])
def test_a_full_disk_leaves_the_certificate_that_was_to_be_renewed(tmp_path: Path, name: str, file: str) -> None:
    """It was removed first: a broker that was started again had none."""
    work = provision_federation(tmp_path, "d1")
    before = (tmp_path / file).read_bytes()
    with files_of_at_most(100), pytest.raises(OSError, match="File too large"):
        work.renew(name)
    assert (tmp_path / file).read_bytes() == before
    work.renew(name)
    renewed = read_certificate(tmp_path / file)
    assert renewed.public_key() == x509.load_pem_x509_certificate(before).public_key()
    assert renewed.serial_number != x509.load_pem_x509_certificate(before).serial_number
