"""Enrolment over HTTPS: a device with a token, a listener, and what goes wrong between them."""

from __future__ import annotations

import datetime as dt
import ssl
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from cryptography import x509

from coordinator.identity import enrolment_server
from coordinator.identity.enrolment_server import EnrolmentServer, open_enrolment_server
from coordinator.identity.provisioning import Provisioner
from edge_client.cli import main
from edge_client.config import ClientConfig, load_config
from edge_client.errors import ConfigError, NetworkError, ProtocolError
from edge_client.runtime import enrolment
from edge_client.transport import bounded_http
from edge_client.transport.tls import check_subject, read_certificate
from tests.support.guarded_broker import FEDERATION, now, provision_federation


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
