"""A token becomes a certificate, once: the decisions of the registrar."""

from __future__ import annotations

import datetime as dt
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cryptography import x509

from coordinator.identity.cli import _facts
from coordinator.identity.enrolment_server import Registrar
from coordinator.identity.provision_plan import ProvisionPlan
from coordinator.identity.provisioning import Provisioner
from edge_client.transport.keys import open_private_key, signing_request
from edge_client.transport.tls import check_subject
from tests.coordinator.identity.test_provisioning import invoke
from tests.support.guarded_broker import FEDERATION, now, provision_federation


@dataclass
class Office:
    """A registrar with a clock that tests turn, and what it told its operator."""

    work: Provisioner
    told: list[str] = field(default_factory=list)
    hours: float = 0.0

    @property
    def registrar(self) -> Registrar:
        def clock() -> dt.datetime:
            return self.work.now + dt.timedelta(hours=self.hours)

        return Registrar(authority=self.work.authority, tokens=self.work.tokens, tell=self.told.append, now=clock)

    def token(self, cid: str) -> str:
        self.work.add_token(cid)
        return (self.work.folder / "devices" / cid / "token").read_text().strip()

    def ask(self, token: str, csr: bytes) -> tuple[int, str]:
        """-> (status, the certificate or the error's code)."""
        status, answer = self.registrar.handle(json.dumps({"token": token, "csr": csr.decode()}).encode())
        return status, answer.get("certificate") or answer["error"]


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(provision_federation(tmp_path / "keys"))


def csr(folder: Path, cid: str, *, key: str = "a.key", federation: str = FEDERATION) -> bytes:
    return signing_request(open_private_key(folder / key), cid, federation)


def test_a_token_gives_its_device_a_certificate_for_the_devices_own_key(office: Office, tmp_path: Path) -> None:
    status, pem = office.ask(office.token("d1"), csr(tmp_path, "d1"))
    assert status == 200
    (tmp_path / "made.crt").write_text(pem)
    check_subject(tmp_path / "made.crt", name="d1", federation=FEDERATION)
    made = x509.load_pem_x509_certificate(pem.encode())
    assert made.public_key() == open_private_key(tmp_path / "a.key").public_key()
    assert "d1 has a certificate until" in office.told[0]


def test_a_token_used_twice_is_refused_and_the_operator_is_told(office: Office, tmp_path: Path) -> None:
    token = office.token("d1")
    assert office.ask(token, csr(tmp_path, "d1"))[0] == 200
    assert office.ask(token, csr(tmp_path, "d1", key="thief.key")) == (403, "used")
    assert "used before, with another key" in office.told[-1]
    assert _facts(office.work)["tokens_tried_twice"] == ["d1"]
    assert len(office.work.authority.certificates_of("d1")) == 1


def test_a_lost_answer_is_given_again_to_the_same_key(office: Office, tmp_path: Path) -> None:
    token = office.token("d1")
    first, second = (office.ask(token, csr(tmp_path, "d1")) for _ in range(2))
    assert first == second
    assert first[0] == 200
    assert _facts(office.work)["tokens_tried_twice"] == []


def test_of_two_keys_at_once_one_wins(office: Office, tmp_path: Path) -> None:
    token, statuses = office.token("d1"), list[int]()
    asks = [csr(tmp_path, "d1", key=f"{i}.key") for i in range(8)]
    threads = [threading.Thread(target=lambda a=ask: statuses.append(office.ask(token, a)[0])) for ask in asks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(statuses) == [200] + [403] * 7


def test_a_token_ends_after_a_day(office: Office, tmp_path: Path) -> None:
    token = office.token("d1")
    office.hours = 24.5
    assert office.ask(token, csr(tmp_path, "d1")) == (403, "expired")
    assert "older than 24 hours" in office.told[-1]


@pytest.mark.parametrize("token", ["", "x", "A" * 43, "\ud800"])
def test_a_guessed_token_gives_nothing(office: Office, tmp_path: Path, token: str) -> None:
    office.token("d1")
    status, answer = office.ask(token, csr(tmp_path, "d1"))
    assert (status, answer) in ((403, "unknown"), (400, "bad_json"))


def test_a_token_of_one_device_gives_no_other_a_name(office: Office, tmp_path: Path) -> None:
    token = office.token("d1")
    assert office.ask(token, csr(tmp_path, "d2")) == (403, "unknown")
    assert office.ask(token, csr(tmp_path, "d1"))[0] == 200  # and is not spent by the attempt


def test_only_the_hash_of_a_token_is_kept(office: Office) -> None:
    token = office.token("d1")
    assert token.encode() not in office.work.tokens.path.read_bytes()


def test_a_new_token_ends_the_one_before(office: Office, tmp_path: Path) -> None:
    first = office.token("d1")
    assert office.token("d1") == first  # it waits still: nothing changes
    (office.work.folder / "devices" / "d1" / "token").unlink()
    second = office.token("d1")
    assert office.ask(first, csr(tmp_path, "d1")) == (403, "unknown")
    assert office.ask(second, csr(tmp_path, "d1"))[0] == 200


def test_asking_for_a_token_again_makes_none_once_the_device_is_in(office: Office, tmp_path: Path) -> None:
    token = office.token("d1")
    assert office.ask(token, csr(tmp_path, "d1"))[0] == 200
    assert office.token("d1") == token
    assert office.ask(token, csr(tmp_path, "d1", key="other.key")) == (403, "used")
    said = invoke(str(office.work.folder), "--token", "d1").stderr
    assert "d1 has a certificate, so it gets no token; --renew d1 makes a new token" in said  # its card was lost
    assert "has a certificate" not in invoke(str(office.work.folder), "--token", "d2").stderr


def test_a_renewed_token_gives_the_same_key_a_later_certificate(office: Office, tmp_path: Path) -> None:
    first = office.ask(office.token("d1"), csr(tmp_path, "d1"))[1]
    office.work.now += dt.timedelta(days=340)
    office.work.renew("d1")
    second = office.ask(office.token("d1"), csr(tmp_path, "d1"))[1]
    ends = [x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc for pem in (first, second)]
    assert (ends[1] - ends[0]).days >= 340


def test_a_check_that_fails_says_what_helps_each_certificate(tmp_path: Path) -> None:
    """`--renew expiring` gives a device that keeps its key nothing, and no certificate outlives its authority."""

    def checked(years: int) -> tuple[Path, str]:
        plan = ProvisionPlan(federation=FEDERATION, hosts=("localhost",))
        then = now() - dt.timedelta(days=365 * years - 10)
        office = Office(Provisioner(folder=tmp_path / f"keys-{years}", plan=plan, now=then))
        office.work.write_infrastructure()
        assert office.ask(office.token("d1"), csr(tmp_path, "d1"))[0] == 200
        return office.work.folder, invoke(str(office.work.folder), "--check").stderr

    folder, said = checked(1)
    assert "provision --renew expiring; --renew NAME makes a new token for d1, whose keys are not here" in said
    assert invoke(str(folder), "--renew", "expiring").exit_code == 0
    assert "hint: --renew NAME makes a new token for d1" in invoke(str(folder), "--check").stderr
    assert invoke(str(folder), "--renew", "d1").exit_code == 0
    assert "hint: bring the token that waits to d1" in invoke(str(folder), "--check").stderr
    assert "no certificate outlives the authority" in checked(10)[1]


def test_a_name_that_was_revoked_since_gets_no_certificate(office: Office, tmp_path: Path) -> None:
    token = office.token("d1")
    assert office.ask(token, csr(tmp_path, "d1"))[0] == 200
    office.work.revoke("d1")
    assert office.ask(token, csr(tmp_path, "d1")) == (403, "revoked")


def test_an_unused_token_that_was_stolen_is_taken_back(office: Office, tmp_path: Path) -> None:
    """Nothing is on the revocation list: no certificate was made. The name may get a new token."""
    stolen = office.token("d1")
    said = invoke(str(office.work.folder), "--revoke", "d1")
    assert (said.exit_code, said.stdout.count("waits to be used")) == (0, 0)
    assert "the unused token of d1 is taken back; --token d1 makes a new one" in said.stderr
    assert office.ask(stolen, csr(tmp_path, "d1")) == (403, "unknown")
    fresh = office.token("d1")
    assert fresh != stolen
    assert office.ask(fresh, csr(tmp_path, "d1"))[0] == 200


def test_who_is_revoked_loses_the_token_of_a_renewal_too(office: Office, tmp_path: Path) -> None:
    office.ask(office.token("d1"), csr(tmp_path, "d1"))
    office.work.renew("d1")
    office.work.revoke("d1")
    assert office.work.revoked_names() == ["d1"]
    assert not _facts(office.work)["tokens"]
