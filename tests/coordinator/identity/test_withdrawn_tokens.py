"""A token that waits loses its worth when its name gets a certificate otherwise, or is revoked, at any moment."""

from __future__ import annotations

import datetime as dt
import fcntl
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

from coordinator.identity.certificate_authority import CertificateAuthority
from coordinator.identity.provisioning import Provisioner
from coordinator.identity.revocation import revoked_serials
from edge_client.config import load_config
from tests.coordinator.identity.test_enrolment_server import Office, csr
from tests.coordinator.identity.test_provisioning import invoke
from tests.support.guarded_broker import provision_federation


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(provision_federation(tmp_path / "keys"))


def test_a_certificate_from_the_operator_takes_the_token_back(office: Office, tmp_path: Path) -> None:
    token = office.token("d1")
    said = invoke(str(office.work.folder), "--device", "d1")
    assert "the unused token of d1 is taken back; it has a certificate" in said.stderr
    assert "waits to be used" not in said.stdout
    assert office.ask(token, csr(tmp_path, "d1")) == (403, "unknown")


def test_a_device_that_keeps_its_key_gets_no_second_certificate_with_its_fleet(office: Office, tmp_path: Path) -> None:
    """The end of the second one would hide that of the device's own."""
    assert office.ask(office.token("device-0000"), csr(tmp_path, "device-0000"))[0] == 200
    office.work.renew("device-0000")
    folder = office.work.folder / "devices" / "device-0000"
    (folder / "client.toml").unlink()
    assert invoke(str(office.work.folder), "--devices", "2").exit_code == 0
    said = invoke(str(office.work.folder), "--device", "device-0000").stderr
    assert "a key of its own; --renew device-0000 makes a new token" in said
    assert len(office.work.authority.certificates_of("device-0000")) == 1
    assert load_config(folder / "client.toml", {}).token == folder / "token"
    assert office.ask((folder / "token").read_text().strip(), csr(tmp_path, "device-0000"))[0] == 200


class SlowAuthority(CertificateAuthority):
    """Does not issue before what was begun meanwhile has ended, or waits for its turn."""

    meanwhile: Callable[[], object]

    def current(self) -> SlowAuthority:
        return self

    def issue_client(self, public: EllipticCurvePublicKey, name: str, now: dt.datetime) -> x509.Certificate:
        self.meanwhile()
        return super().issue_client(public, name, now)


@pytest.fixture
def revoked_meanwhile(office: Office, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowAuthority]:
    """The office's authority, with whose next certificate a revocation of d1 begins; it has ended afterwards."""
    waits, flock = threading.Event(), fcntl.flock

    def take(file: IO[str], how: int) -> None:
        try:
            flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            waits.set()
            flock(file, how)

    def revoke() -> None:
        Provisioner(folder=office.work.folder, plan=office.work.plan, now=office.work.now).revoke("d1")
        waits.set()

    def meanwhile() -> None:
        thread.start()
        assert waits.wait(30)

    monkeypatch.setattr(fcntl, "flock", take)
    thread, plain = threading.Thread(target=revoke), office.work.authority
    authority = SlowAuthority(**vars(plain))
    vars(authority)["meanwhile"] = meanwhile
    yield authority
    thread.join(30)
    certificates = plain.certificates_of("d1")
    assert len(certificates) == 2
    assert {c.serial_number for c in certificates} == revoked_serials(plain)


def test_a_revocation_during_an_enrolment_finds_its_certificate(
    office: Office, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A device renews while it is revoked: its new certificate must not be one that the list lacks."""
    office.ask(office.token("d1"), csr(tmp_path, "d1"))
    office.work.renew("d1")
    token, office.hours = office.token("d1"), 1
    registrar = replace(office.registrar, authority=request.getfixturevalue("revoked_meanwhile"))
    status, _ = registrar.handle(json.dumps({"token": token, "csr": csr(tmp_path, "d1").decode()}).encode())
    assert status == 200


def test_a_revocation_while_another_process_renews_finds_the_new_certificate(
    office: Office, request: pytest.FixtureRequest
) -> None:
    office.work.add_device("d1")
    office.work.authority = request.getfixturevalue("revoked_meanwhile")
    office.work.renew("d1")


def test_a_token_whose_certificate_could_not_be_written_is_taken_back_too(office: Office, tmp_path: Path) -> None:
    """The device may ask again with its key, and would get a certificate after the operator wanted it to have none."""
    token = office.token("d1")
    issued = office.work.authority.folder / "issued" / "d1"
    issued.write_bytes(b"")  # as on a disk that takes no more
    assert office.ask(token, csr(tmp_path, "d1")) == (503, "no_space")
    issued.unlink()
    office.work.revoke("d1")
    assert office.ask(token, csr(tmp_path, "d1")) == (403, "unknown")
