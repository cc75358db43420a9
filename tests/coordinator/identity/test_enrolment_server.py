"""A token becomes a certificate, once: the registrar's decisions, and the whole way over HTTPS."""

from __future__ import annotations

import datetime as dt
import json
import ssl
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from cryptography import x509

from coordinator.identity import enrolment_server
from coordinator.identity.cli import _facts
from coordinator.identity.enrolment_server import EnrolmentServer, Registrar, open_enrolment_server
from coordinator.identity.provision_plan import ProvisionPlan
from coordinator.identity.provisioning import Provisioner
from edge_client.cli import main
from edge_client.config import ClientConfig, load_config
from edge_client.errors import ConfigError, NetworkError, ProtocolError
from edge_client.runtime import enrolment
from edge_client.transport import bounded_http
from edge_client.transport.keys import open_private_key, signing_request
from edge_client.transport.tls import check_subject, read_certificate
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


@contextmanager
def listening(work: Provisioner, told: list[str]) -> Iterator[EnrolmentServer]:
    with open_enrolment_server(work.folder, "127.0.0.1", tell=told.append, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(30)


def address(server: EnrolmentServer) -> str:
    return f"https://localhost:{server.server_address[1]}"


def config_of(work: Provisioner, cid: str, server: EnrolmentServer) -> ClientConfig:
    file = work.folder / "devices" / cid / "client.toml"
    return load_config(file, {"FEDCENTERS_ENROL_URL": address(server)})


def test_a_device_enrols_over_https_and_its_key_never_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work, told = provision_federation(tmp_path / "keys"), list[str]()
    work.add_token("d1")
    home = work.folder / "devices" / "d1"
    with listening(work, told) as server:
        monkeypatch.setenv("FEDCENTERS_ENROL_URL", address(server))
        assert main(["enrol", "--config", str(home / "client.toml")]) == 0
        assert f"d1: enrolled; its certificate is {home / 'device.crt'}, valid until 20" in capsys.readouterr().err
        assert main(["enrol", "--config", str(home / "client.toml")]) == ConfigError.exit_code
    assert "no token to enrol with" in capsys.readouterr().err
    assert not (home / "token").exists()
    assert stat.S_IMODE((home / "device.key").stat().st_mode) == 0o600
    check_subject(home / "device.crt", name="d1", federation=FEDERATION)
    secret = "".join((home / "device.key").read_text().splitlines()[1:-1])
    assert secret not in "".join("".join(path.read_text().split()) for path in work.folder.glob("authority/**/*.crt"))


@pytest.mark.parametrize("command", ["join", "nearest"])
def test_a_device_with_a_token_enrols_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    work = provision_federation(tmp_path / "keys")
    work.add_token("d1")
    home = work.folder / "devices" / "d1"
    with listening(work, []) as server:
        monkeypatch.setenv("FEDCENTERS_ENROL_URL", address(server))
        assert main([command, "--config", str(home / "client.toml")]) == ConfigError.exit_code  # it has no data yet
    assert f"d1: enrolled; its certificate is {home / 'device.crt'}" in capsys.readouterr().err
    assert (home / "device.crt").exists()
    assert not (home / "token").exists()


def test_the_listener_takes_its_renewed_certificate_without_a_restart(tmp_path: Path) -> None:
    """A listener that runs for over a year; the client that finds the new file gets it."""
    work = provision_federation(tmp_path / "keys")
    with listening(work, []) as server:

        def shown() -> int:
            pem = ssl.get_server_certificate(("127.0.0.1", int(server.server_address[1])))
            return x509.load_pem_x509_certificate(pem.encode()).serial_number

        first = shown()
        work.renew("server.enrol")
        second = read_certificate(work.folder / "enrolment" / "server.crt").serial_number
        assert second != first
        assert shown() == second
        (work.folder / "enrolment" / "server.crt").write_text("half of")  # while it is copied
        assert shown() == second


def test_a_refusal_says_what_to_do_and_keeps_the_token(tmp_path: Path) -> None:
    work = provision_federation(tmp_path / "keys")
    work.add_token("d1")
    file = work.folder / "devices" / "d1" / "token"
    file.write_text("A" * 43)
    with listening(work, []) as server, pytest.raises(ProtocolError, match="never made for d1") as wrong:
        enrolment.enrol(config_of(work, "d1", server))
    assert "new token" in wrong.value.hint
    assert file.exists()


def test_a_token_that_renews_and_fails_leaves_the_device_its_certificate(
    tmp_path: Path, free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An archive was unpacked again, the operator's listener is down, or the token has expired: no reason to end."""
    work = provision_federation(tmp_path / "keys")
    work.add_token("d1")
    token = work.folder / "devices" / "d1" / "token"
    first = token.read_text()
    with listening(work, []) as server:
        config = config_of(work, "d1", server)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FEDCENTERS_ENROL_URL", address(server))
            file = work.folder / "devices" / "d1" / "client.toml"
            enrolment.load_enrolled(file)
            token.write_text(first)
            token.chmod(0o600)
            assert not enrolment.has_token(config)  # it is the one that was used
            token.write_text("of another day")
            token.chmod(0o644)  # as `scp` leaves it
            enrolment.load_enrolled(file)
            assert "can be read by others; going on with the certificate that is here; chmod 600" in caplog.text
            caplog.clear()
            token.chmod(0o600)
            enrolment.load_enrolled(file)
            assert "going on with the certificate that is here" in caplog.text
            caplog.clear()
            patch.setenv("FEDCENTERS_ENROL_URL", f"https://localhost:{free_port}")
            enrolment.load_enrolled(file)
            assert "going on with the certificate that is here" in caplog.text
            assert config.certificate is not None
            config.certificate.write_text("damaged")
            with pytest.raises(NetworkError):
                enrolment.load_enrolled(file)


def test_an_impostor_gets_no_token(tmp_path: Path) -> None:
    """A listener whose certificate comes from elsewhere is refused in the handshake, before anything is said."""
    work, strangers = provision_federation(tmp_path / "keys"), provision_federation(tmp_path / "strangers")
    work.add_token("d1")
    told: list[str] = []
    with listening(strangers, told) as server, pytest.raises(NetworkError, match="not from the authority in"):
        enrolment.enrol(config_of(work, "d1", server))
    assert told == []


def test_nobody_there_is_said_with_the_address(tmp_path: Path, free_port: int) -> None:
    work = provision_federation(tmp_path / "keys")
    work.add_token("d1")
    file = work.folder / "devices" / "d1" / "client.toml"
    config = load_config(file, {"FEDCENTERS_ENROL_URL": f"https://localhost:{free_port}"})
    with pytest.raises(NetworkError, match=str(free_port)) as wrong:
        enrolment.enrol(config)
    assert "is running" in wrong.value.hint


@pytest.mark.parametrize("patience_s", [0.0, 1.0])  # none: it is over before the connection stands
def test_a_listener_that_sends_a_byte_now_and_then_holds_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    left = threading.Event()

    def drip(handler: BaseHTTPRequestHandler, *_: object) -> None:
        with suppress(OSError):
            handler.wfile.write(b"HTTP/1.0 200 OK\r\nX: ")
            while not left.wait(0.02):
                handler.wfile.write(b"x")

    monkeypatch.setattr(enrolment_server._Handler, "_reply", drip)
    monkeypatch.setattr(bounded_http, "PATIENCE_S", patience_s)
    work = provision_federation(tmp_path / "keys")
    work.add_token("d1")
    with listening(work, []) as server:
        config = config_of(work, "d1", server)
        with pytest.raises(NetworkError, match="no whole answer within") as wrong:
            enrolment.enrol(config)
        left.set()
    assert "the token is still good" in wrong.value.hint
    assert enrolment.has_token(config)


def test_a_configuration_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    work = provision_federation(tmp_path / "keys")
    work.add_token("d1")
    config = load_config(work.folder / "devices" / "d1" / "client.toml", {})
    with pytest.raises(ConfigError, match="enrol-url, token, certificate and key"):
        enrolment.enrol(replace(config, enrol_url=""))


def test_an_enrolment_needs_a_provisioned_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not provisioned"):
        open_enrolment_server(tmp_path, "127.0.0.1", tell=lambda _: None)


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    work = provision_federation(tmp_path / "keys")
    with listening(work, []) as server, pytest.raises(NetworkError, match="cannot listen on"):
        open_enrolment_server(
            work.folder, "127.0.0.1", tell=lambda _: None, port=int(server.server_address[1])
        ).server_close()


@pytest.mark.parametrize("url", ["http://host", "https://", "https://host/path", "host:8443", "ftp://h"])
def test_a_token_is_only_ever_sent_over_https(tmp_path: Path, url: str) -> None:
    work = provision_federation(tmp_path / "keys")
    work.add_token("d1")
    with pytest.raises(ConfigError, match="enrol-url"):
        load_config(work.folder / "devices" / "d1" / "client.toml", {"FEDCENTERS_ENROL_URL": url})


def test_now_is_a_time_with_a_zone() -> None:
    assert now().utcoffset() == dt.timedelta()
