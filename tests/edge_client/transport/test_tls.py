"""What is checked before dialing, and how a handshake that failed is told."""

from __future__ import annotations

import datetime as dt
import logging
import os
import ssl
import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
)

from coordinator.identity.provisioning import Provisioner
from edge_client.errors import ConfigError, NetworkError
from edge_client.transport.keys import open_private_key
from edge_client.transport.mqtt import MqttTransport
from edge_client.transport.tls import (
    Credentials,
    client_context,
    expiry_warnings,
    explain_failure,
    is_loopback,
    read_certificate,
)
from tests.attacks.test_foreign_certificates import impostor
from tests.edge_client.transport.test_mqtt import listening
from tests.support.guarded_broker import now, provision_federation
from tests.support.size_limit import files_of_at_most
from tests.support.tls_listener import tls_listener

YEAR = dt.timedelta(days=366)
unclosed = pytest.mark.filterwarnings("ignore:unclosed <s:ResourceWarning")  # paho leaves a failed handshake's socket


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Provisioner:
    return provision_federation(tmp_path_factory.mktemp("tls") / "keys", "d1", "d2")


def credentials(keys: Provisioner, cid: str = "d1") -> Credentials:
    home = keys.folder / "devices" / cid
    return Credentials(ca=home / "ca.crt", certificate=home / "device.crt", key=home / "device.key")


def test_a_client_wants_the_name_the_authority_and_tls_1_2(keys: Provisioner) -> None:
    made = client_context(credentials(keys), now())
    assert made.check_hostname
    assert made.verify_mode == ssl.CERT_REQUIRED
    assert made.minimum_version == ssl.TLSVersion.TLSv1_2
    assert made.cert_store_stats()["x509_ca"] == 1  # the federation's authority, and none of the system's


@pytest.mark.parametrize("field", ["ca", "certificate", "key"])
def test_a_file_that_is_missing_is_named(keys: Provisioner, tmp_path: Path, field: str) -> None:
    absent = tmp_path / "absent.pem"
    with pytest.raises(ConfigError, match=f"at {absent}") as wrong:
        client_context(replace(credentials(keys), **{field: absent}), now())
    assert f"`{field}`" in wrong.value.hint


@pytest.mark.parametrize("field", ["ca", "certificate", "key"])
def test_a_file_that_holds_something_else_is_named(keys: Provisioner, tmp_path: Path, field: str) -> None:
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no PEM")
    garbage.chmod(0o600)
    with pytest.raises(ConfigError, match=str(garbage)):
        client_context(replace(credentials(keys), **{field: garbage}), now())


def test_a_key_that_others_can_read_is_refused(keys: Provisioner, tmp_path: Path) -> None:
    ours = credentials(keys)
    copy = tmp_path / "device.key"
    assert ours.key is not None
    copy.write_bytes(ours.key.read_bytes())
    copy.chmod(0o640)
    with pytest.raises(ConfigError, match=f"chmod 600 {copy}"):
        client_context(replace(ours, key=copy), now())


def test_a_key_is_on_the_disk_before_it_has_its_name_and_so_is_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token allows one key: a device that lost its key in a power cut could not enrol with it any more."""
    flushed, key = [], tmp_path / "device.key"
    seen = lambda fd: flushed.append((Path(f"/proc/self/fd/{fd}").readlink().name, key.exists()))  # noqa: E731
    monkeypatch.setattr(os, "fsync", seen)
    open_private_key(key)
    assert flushed == [("device.key.tmp", False), (tmp_path.name, True)]


def test_a_full_disk_leaves_neither_a_key_nor_a_part_of_one(tmp_path: Path) -> None:
    with files_of_at_most(100), pytest.raises(OSError, match=f"File too large: '{tmp_path}/device.key'"):
        open_private_key(tmp_path / "device.key")
    assert list(tmp_path.iterdir()) == []


def test_a_key_of_another_certificate_is_refused(keys: Provisioner) -> None:
    with pytest.raises(ConfigError, match="is not the key of"):
        client_context(replace(credentials(keys), key=credentials(keys, "d2").key), now())


def test_a_key_with_a_passphrase_is_refused_without_a_prompt(keys: Provisioner, tmp_path: Path) -> None:
    ours, locked = credentials(keys), tmp_path / "locked.key"
    assert ours.key is not None
    locked.write_bytes(
        open_private_key(ours.key).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    )
    locked.chmod(0o600)
    with pytest.raises(ConfigError, match="is not the key of"):
        client_context(replace(ours, key=locked), now())


@pytest.mark.parametrize("half", ["certificate", "key"])
def test_half_a_name_is_refused(keys: Provisioner, half: str) -> None:
    with pytest.raises(ConfigError, match="needs its key"):
        client_context(replace(credentials(keys), **{half: None}), now())


@pytest.mark.parametrize(("when", "said"), [(YEAR, "expired on"), (-YEAR, "is not yet valid")])
def test_a_certificate_out_of_its_time_is_not_shown(keys: Provisioner, when: dt.timedelta, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as wrong:
        client_context(credentials(keys), now() + when)
    assert "clock" in wrong.value.hint


@unclosed
def test_a_renewed_certificate_is_shown_at_the_next_connection(tmp_path: Path) -> None:
    work = provision_federation(tmp_path / "keys", "d1")
    home, shown, swapped = work.folder / "devices" / "d1", list[int](), threading.Event()

    def jitter(_low: float, _high: float) -> float:
        if not swapped.is_set():
            work.renew("d1")
            swapped.set()
        return 0.0

    before = read_certificate(home / "device.crt").serial_number
    with asking(work, shown) as url:
        transport = MqttTransport(url, "x", credentials=credentials(work), connect_timeout_s=60, jitter=jitter)
        connecting = threading.Thread(target=transport.connect, daemon=True)
        connecting.start()
        assert swapped.wait(60)
        after = read_certificate(home / "device.crt").serial_number
        while after not in shown:
            assert connecting.is_alive()
        transport.wake()
        transport.close()
        connecting.join(60)
    assert shown[0] == before != after


def asking(work: Provisioner, shown: list[int]) -> AbstractContextManager[str]:
    """A listener that wants a client certificate, notes its serial number, and closes the connection."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(work.folder / "broker" / "server.crt", work.folder / "broker" / "server.key")
    tls.load_verify_locations(work.folder / "broker" / "ca.crt")
    tls.verify_mode = ssl.CERT_REQUIRED

    def note(link: ssl.SSLSocket) -> None:
        certificate = link.getpeercert(binary_form=True)
        assert certificate is not None
        shown.append(x509.load_der_x509_certificate(certificate).serial_number)

    return tls_listener(tls, note)


def test_a_warning_comes_thirty_days_before_the_end(keys: Provisioner) -> None:
    assert expiry_warnings(credentials(keys), now()) == []
    assert expiry_warnings(credentials(keys), now() + dt.timedelta(days=330)) == []
    said = expiry_warnings(credentials(keys), now() + dt.timedelta(days=340))
    assert len(said) == 1
    assert "in 24 days" in said[0]  # of 365
    both = expiry_warnings(credentials(keys), now() + dt.timedelta(days=3640))
    assert [one.rpartition("; ")[2] for one in both] == [
        "renew it with `provision --renew`",
        "renew it with `provision --renew authority`",
    ]


@unclosed
def test_a_device_warns_in_its_log_when_it_dials(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, free_port: int
) -> None:
    work = provision_federation(tmp_path / "keys")
    work.now -= dt.timedelta(days=340)
    work.add_device("old")
    home = work.folder / "devices" / "old"
    old = Credentials(ca=home / "ca.crt", certificate=home / "device.crt", key=home / "device.key")
    with caplog.at_level(logging.WARNING), pytest.raises(NetworkError):
        MqttTransport(f"mqtts://localhost:{free_port}", "x", credentials=old, connect_timeout_s=2.0).connect()
    assert f"{home / 'device.crt'} expires on" in caplog.text


@unclosed
@pytest.mark.parametrize(
    ("listener", "said"),
    [
        ("expired", "the broker's certificate is expired"),
        ("early", "the broker's certificate is not yet valid"),
        ("elsewhere", "the broker's certificate is not valid for 'localhost'"),
        ("stranger", "the broker's certificate is not from the authority in"),
    ],
)
def test_a_brokers_certificate_that_does_not_hold_is_explained(tmp_path: Path, listener: str, said: str) -> None:
    ours = provision_federation(tmp_path / "ours", "d1")
    theirs = provision_federation(tmp_path / "theirs") if listener == "stranger" else ours
    moment = now() + {"expired": -2 * YEAR, "early": YEAR}.get(listener, dt.timedelta())
    hosts = ["broker.example"] if listener == "elsewhere" else ["localhost"]
    key = open_private_key(tmp_path / "server.key")
    made = theirs.authority.issue_server(key.public_key(), "server.test", hosts, moment)
    (tmp_path / "server.crt").write_bytes(made.public_bytes(Encoding.PEM))
    with impostor(tmp_path / "server.crt", tmp_path / "server.key") as url, pytest.raises(NetworkError, match=said):
        MqttTransport(url, "x", credentials=credentials(ours), connect_timeout_s=2.0).connect()


@unclosed
def test_without_an_authority_the_hint_names_the_file_that_has_one(tmp_path: Path) -> None:
    broker = provision_federation(tmp_path / "theirs").folder / "broker"
    with impostor(broker / "server.crt", broker / "server.key") as url, pytest.raises(NetworkError) as refused:
        MqttTransport(url, "x", connect_timeout_s=2.0).connect()
    assert "point `ca` at this federation's ca.crt, in the file that --config or `serve` names" in refused.value.hint


@unclosed
def test_a_device_that_is_turned_away_at_its_start_says_so_in_its_error_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = provision_federation(tmp_path / "ours", "d1"), provision_federation(tmp_path / "theirs")
    broker = theirs.folder / "broker"
    with (
        impostor(broker / "server.crt", broker / "server.key") as url,
        caplog.at_level(logging.WARNING),
        pytest.raises(NetworkError, match="not from the authority"),
    ):
        MqttTransport(url, "x", credentials=credentials(ours), connect_timeout_s=2.0).connect()
    assert caplog.messages == []


@unclosed
def test_a_device_that_is_turned_away_later_says_so_once_in_its_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = provision_federation(tmp_path / "ours", "d1"), provision_federation(tmp_path / "theirs")
    broker = theirs.folder / "broker"
    attempts: list[float] = []
    third = threading.Event()

    def jitter(_low: float, high: float) -> float:
        attempts.append(high)
        if len(attempts) == 3:
            third.set()
        return 0.0

    with impostor(broker / "server.crt", broker / "server.key") as url, caplog.at_level(logging.WARNING):
        transport = MqttTransport(url, "x", credentials=credentials(ours), jitter=jitter)
        transport.wake()  # `connect` does not wait for the first connection then
        transport.connect()
        assert third.wait(60)
        transport.close()
    assert [message.count("not from the authority") for message in caplog.messages] == [1]


@unclosed
def test_a_listener_without_tls_is_told_as_such() -> None:
    with listening(b"HTTP/1.1 400 Bad Request") as url, pytest.raises(NetworkError, match="does not speak TLS"):
        MqttTransport(url.replace("mqtt:", "mqtts:"), "x", connect_timeout_s=2.0).connect()


def test_a_connection_that_ends_in_the_handshake_may_mean_a_revoked_certificate() -> None:
    reason, hint = explain_failure(ssl.SSLEOFError(8, "EOF occurred in violation of protocol (_ssl.c:2427)"))
    assert "our certificate was revoked" in reason
    assert "revoked" in hint


def test_what_is_not_about_tls_is_quoted_as_it_is() -> None:
    assert explain_failure(ConnectionRefusedError(111, "Connection refused")) == ("[Errno 111] Connection refused", "")
    assert explain_failure(KeyError(23)) == ("KeyError(23)", "")  # of paho, for a packet that it cannot read


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.0.0.1", "127.1.2.3", "::1"],
)
def test_loopback_cannot_leave_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["localhost.example", "0.0.0.0", "::", "10.0.0.1", "127.example", ""])  # noqa: S104
def test_everything_else_can(host: str) -> None:
    assert not is_loopback(host)
