"""Revoking a name: what the list and the broker's files say afterwards, and that the name never comes back."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from cryptography import x509

from coordinator.identity.broker_acl import emqx_acl
from coordinator.identity.revocation import CRL_FILE, locked, revoked_serials
from coordinator.identity.revoked_list import REVOKED_FILE, RevokedList
from edge_client.errors import ConfigError
from edge_client.transport.tls import read_certificate
from tests.coordinator.identity.test_provisioning import invoke, snapshot
from tests.support.guarded_broker import now, provision_federation


def test_revoking_writes_the_list_and_takes_every_right(tmp_path: Path) -> None:
    work = provision_federation(tmp_path / "keys", "d1", "d2")
    said = invoke(str(work.folder), "--revoke", "d1")
    assert said.exit_code == 0
    assert "SIGHUP" in said.stderr
    assert work.revoked_names() == ["d1"]
    listed = x509.load_pem_x509_crl((work.folder / "broker" / "crl.pem").read_bytes())
    assert listed.is_signature_valid(work.authority.key.public_key())
    serial = read_certificate(work.folder / "devices" / "d1" / "device.crt").serial_number
    assert [entry.serial_number for entry in listed] == [serial]
    acl = (work.folder / "broker" / "mosquitto.acl").read_text()
    assert acl.startswith("user d1\ntopic deny #\n")
    before = snapshot(work.folder)
    assert invoke(str(work.folder), "--revoke", "d1").exit_code == 0
    assert snapshot(work.folder) == before


def test_who_was_revoked_is_told_as_a_state_in_one_line(tmp_path: Path) -> None:
    """A line for each, at each run, read as if it were new."""
    work = provision_federation(tmp_path / "keys", "d1", "d2")
    for name in ("d2", "d1"):
        work.revoke(name)
    said = invoke(str(work.folder)).stdout
    assert [line for line in said.splitlines() if line.endswith(("revoked", "d1", "d2"))] == ["revoked: d1, d2"]


def test_every_list_begins_later_than_the_one_before(tmp_path: Path) -> None:
    """Of two lists a broker takes the later one; two revocations may come in one second."""
    work = provision_federation(tmp_path / "keys", "d1", "d2", "d3")
    begins = []
    for cid in ("d1", "d2", "d3"):
        work.revoke(cid)
        begins.append(x509.load_pem_x509_crl((work.authority.folder / CRL_FILE).read_bytes()).last_update_utc)
    assert sorted(set(begins)) == begins
    assert begins[-1] < now()  # also for a broker whose clock is a little late


def test_a_list_has_its_number_and_its_issuer_and_a_broker_that_knows_neither_takes_it(tmp_path: Path) -> None:
    """RFC 5280, 5.2: of what is critical all has to be understood, and neither of these two may be."""
    work = provision_federation(tmp_path / "keys", "d1", "d2")
    for count, cid in enumerate(("d1", "d2"), 1):
        work.revoke(cid)
        listed = x509.load_pem_x509_crl((work.authority.folder / CRL_FILE).read_bytes())
        assert {extension.critical for extension in listed.extensions} == {False}
        assert listed.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number == count
        issuer = listed.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
        own = work.authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        assert issuer.key_identifier == own.digest


def test_a_fleet_is_provisioned_again_without_those_that_were_revoked(tmp_path: Path) -> None:
    asked = (str(tmp_path / "k"), "--federation", "demo", "--host", "h", "--devices", "2")
    assert invoke(*asked).exit_code == 0
    assert invoke(*asked[:1], "--revoke", "device-0001").exit_code == 0
    before = snapshot(tmp_path / "k")
    assert invoke(*asked).exit_code == 0
    assert snapshot(tmp_path / "k") == before
    assert invoke(*asked[:1], "--device", "device-0001").exit_code == ConfigError.exit_code


def test_a_revoked_name_stays_revoked_and_a_stranger_cannot_be_revoked(tmp_path: Path) -> None:
    work = provision_federation(tmp_path / "keys", "d1")
    work.revoke("d1")
    for again in (work.add_device, work.add_token, work.renew):
        with pytest.raises(ConfigError, match="d1 was revoked"):
            again("d1")
    with pytest.raises(ConfigError, match="no certificate was made for 'd9'"):
        work.revoke("d9")


def test_a_renewed_certificate_is_revoked_with_the_old_one(tmp_path: Path) -> None:
    work = provision_federation(tmp_path / "keys", "d1")
    key = (work.folder / "devices" / "d1" / "device.key").read_bytes()
    work.renew("d1")
    assert (work.folder / "devices" / "d1" / "device.key").read_bytes() == key
    work.revoke("d1")
    assert len(revoked_serials(work.authority)) == 2


def test_two_revocations_at_once_wait_for_each_other(tmp_path: Path) -> None:
    with locked(tmp_path), (tmp_path / "lock").open("w") as second, pytest.raises(BlockingIOError):
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / "lock").open("w") as second:
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_access_list_of_emqx_says_the_same(tmp_path: Path) -> None:
    work = provision_federation(tmp_path / "keys", "d1")
    work.revoke("d1")
    assert (work.folder / "broker" / "emqx.acl.conf").read_text() == emqx_acl("demo", ["d1"])


def test_the_coordinator_reads_who_is_revoked_beside_its_key_and_keeps_it_when_the_file_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    work = provision_federation(tmp_path / "keys", "d1", "d2")
    told = RevokedList(work.folder / "coordinator")
    assert told.names() == set()
    work.revoke("d1")
    assert told.names() == {"d1"}
    work.revoke("d2")
    assert told.names() == {"d1", "d2"}
    (work.folder / "coordinator" / REVOKED_FILE).write_bytes(b"\xff")
    for _ in range(2):  # it says so at the first look, and once
        assert told.names() == {"d1", "d2"}
        assert len(caplog.records) == 1
    assert "make it readable" in caplog.text


@pytest.mark.parametrize("name", ["coordinator.0", "server.broker", "server.enrol", "server.web"])
def test_the_name_of_a_server_cannot_be_revoked(name: str, tmp_path: Path) -> None:
    """No other coordinator could have its name: the access lists would deny it for ever."""
    work = provision_federation(tmp_path / "keys", "d1")
    before = snapshot(work.folder)
    said = invoke(str(work.folder), "--revoke", name)
    assert said.exit_code == ConfigError.exit_code
    assert "provision another folder" in said.stderr
    assert (snapshot(work.folder), work.revoked_names()) == (before, [])


def test_a_last_line_without_an_end_counts_when_the_file_is_the_same_at_the_next_look(tmp_path: Path) -> None:
    told, path = RevokedList(tmp_path), tmp_path / REVOKED_FILE
    path.write_text("d10\nd1")  # is being copied
    assert told.names() == {"d10"}
    path.write_text("d10\nd11\nd12")  # an editor that ends no last line
    assert told.names() == {"d10", "d11"}
    assert told.names() == {"d10", "d11", "d12"}


def test_a_list_that_grows_within_one_moment_of_the_clock_is_read_again(tmp_path: Path) -> None:
    told, path = RevokedList(tmp_path), tmp_path / REVOKED_FILE
    for names in ("d1\n", "d1\nd2\n"):
        path.write_text(names)
        os.utime(path, ns=(1, 1))
        assert told.names() == set(names.split())
