"""Tries to come in with no certificate, a foreign, old, revoked or borrowed one, through a real mosquitto."""

from __future__ import annotations

import datetime as dt
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from coordinator.identity.broker_acl import COORDINATOR_CLIENT_ID
from edge_client.errors import ConfigError, NetworkError
from edge_client.protocol.topics import Topics
from edge_client.transport.keys import open_private_key, subject_name
from edge_client.transport.mqtt import MqttTransport
from edge_client.transport.tls import Credentials
from tests.support.guarded_broker import (
    FEDERATION,
    PATIENCE_S,
    Guarded,
    guarded_broker,
    now,
    provision_federation,
    try_connect,
)
from tests.support.tls_listener import tls_listener

MALLORY, VICTIM = "mallory", "victim"
TOPICS = Topics(FEDERATION)
YEAR = dt.timedelta(days=366)
broker_test = pytest.mark.broker
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <s:ResourceWarning")  # paho leaves a failed handshake's socket


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_broker(tmp_path_factory.mktemp("certificates"), MALLORY, VICTIM) as found:
        yield found


def none_at_all(broker: Guarded, folder: Path) -> Credentials:
    return Credentials(ca=broker.credentials(MALLORY).ca)


def of_another_federation(broker: Guarded, folder: Path) -> Credentials:
    work = provision_federation(folder / "other", MALLORY, federation="other")
    return in_folder(work.folder / "devices" / MALLORY, broker)


def of_an_authority_with_the_same_name(broker: Guarded, folder: Path) -> Credentials:
    work = provision_federation(folder / "twin", MALLORY)
    return in_folder(work.folder / "devices" / MALLORY, broker)


def the_coordinators_made_by_oneself(broker: Guarded, folder: Path) -> Credentials:
    key = open_private_key(folder / "device.key")
    name = subject_name(COORDINATOR_CLIENT_ID, FEDERATION)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now() - YEAR)
        .not_valid_after(now() + YEAR)
        .sign(key, hashes.SHA256())
    )
    (folder / "device.crt").write_bytes(made.public_bytes(Encoding.PEM))
    return in_folder(folder, broker)


def signed_by_ones_own_certificate(broker: Guarded, folder: Path) -> Credentials:
    """A device's certificate must not do as an authority."""
    home = broker.work.folder / "devices" / MALLORY
    issuer = x509.load_pem_x509_certificate((home / "device.crt").read_bytes())
    key = open_private_key(folder / "device.key")
    made = (
        x509.CertificateBuilder()
        .subject_name(subject_name(COORDINATOR_CLIENT_ID, FEDERATION))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(2)
        .not_valid_before(now() - YEAR)
        .not_valid_after(now() + YEAR)
        .sign(open_private_key(home / "device.key"), hashes.SHA256())
    )
    chain = made.public_bytes(Encoding.PEM) + issuer.public_bytes(Encoding.PEM)
    (folder / "device.crt").write_bytes(chain)
    return in_folder(folder, broker)


def issued_at(moment: dt.datetime) -> Callable[[Guarded, Path], Credentials]:
    def issued(broker: Guarded, folder: Path) -> Credentials:
        key = open_private_key(folder / "device.key")
        made = broker.work.authority.issue_client(key.public_key(), "elsewhen", moment)
        (folder / "device.crt").write_bytes(made.public_bytes(Encoding.PEM))
        return in_folder(folder, broker)

    return issued


def the_brokers_own(broker: Guarded, folder: Path) -> Credentials:
    home = broker.work.folder / "broker"
    return Credentials(ca=home / "ca.crt", certificate=home / "server.crt", key=home / "server.key")


def in_folder(home: Path, broker: Guarded) -> Credentials:
    """The right authority for the broker's side, and what lies in a folder for ours."""
    return Credentials(ca=broker.credentials(VICTIM).ca, certificate=home / "device.crt", key=home / "device.key")


@broker_test
@pytest.mark.parametrize(
    "borrowed",
    [
        none_at_all,
        of_another_federation,
        of_an_authority_with_the_same_name,
        the_coordinators_made_by_oneself,
        signed_by_ones_own_certificate,
        the_brokers_own,
        pytest.param(issued_at(now() - 2 * YEAR), id="expired"),
        pytest.param(issued_at(now() + YEAR), id="not_yet_valid"),
    ],
)
def test_nobody_comes_in_with_a_certificate_that_is_not_ones_own(
    broker: Guarded, tmp_path: Path, borrowed: Callable[[Guarded, Path], Credentials]
) -> None:
    assert try_connect(broker.url, borrowed(broker, tmp_path)) != ""
    assert try_connect(broker.url, broker.credentials(VICTIM)) == ""  # it is not the knocking that fails


@broker_test
def test_a_version_of_tls_before_1_2_is_refused(broker: Guarded) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        old.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", broker.work.plan.port), timeout=PATIENCE_S) as plain,
        pytest.raises(OSError, match=r"(?i)version|reset|eof"),
    ):
        old.wrap_socket(plain)


@broker_test
def test_a_stolen_client_id_is_replaced_by_the_certificates_name(broker: Guarded) -> None:
    victim, coordinator = broker.client(VICTIM), broker.client(COORDINATOR_CLIENT_ID)
    coordinator.subscribe(*TOPICS.coordinator_filters())
    coordinator.settle(TOPICS.request("ready"))
    for stolen in (f"{FEDERATION}.{VICTIM}", VICTIM, COORDINATOR_CLIENT_ID):
        thief = broker.client(MALLORY, client_id=stolen)
        thief.publish(TOPICS.request(VICTIM), b"forged")
        assert coordinator.until(thief.mark(TOPICS.request(MALLORY))) == []
        assert coordinator.until(victim.mark(TOPICS.request(VICTIM))) == []  # still connected
        thief.transport.close()  # the next one has the same name at the broker: the two would evict each other
    broker.leave()


@broker_test
def test_a_revoked_device_loses_its_rights_at_once_and_does_not_come_back(tmp_path: Path) -> None:
    with guarded_broker(tmp_path, MALLORY, VICTIM, "scout") as broker:
        mallory, victim, coordinator = (
            broker.client(MALLORY),
            broker.client(VICTIM),
            broker.client(COORDINATOR_CLIENT_ID),
        )
        coordinator.subscribe(*TOPICS.coordinator_filters())
        coordinator.settle(TOPICS.request("ready"))
        coordinator.until(mallory.mark(TOPICS.request(MALLORY)))
        coordinator.publish(TOPICS.coord(), b"record", retain=True)
        for device in (mallory, victim):
            device.subscribe(*TOPICS.device_filters(device.name))
            device.until(b"record")  # the subscriptions stand
        for name in (MALLORY, "scout"):
            broker.work.revoke(name)
        broker.reload()
        while try_connect(broker.url, broker.credentials("scout")) == "":  # until the broker has taken the signal
            pass
        coordinator.publish(TOPICS.down(MALLORY), b"a task")
        victim.until(coordinator.mark(TOPICS.coord()))
        mallory.publish(TOPICS.state(MALLORY), b"still here")
        assert mallory.transport.drain(0, PATIENCE_S)
        assert mallory.transport.receive(0.0) is None  # neither the task nor the record
        assert coordinator.until(victim.mark(TOPICS.request(VICTIM))) == []
        mallory.transport.close()
        with pytest.raises(NetworkError, match="the broker says that our certificate was revoked"):
            MqttTransport(broker.url, "x", credentials=broker.credentials(MALLORY), connect_timeout_s=2.0).connect()
        with pytest.raises(ConfigError, match="a revoked one never comes back"):
            broker.work.add_device(MALLORY)


def test_a_device_cannot_pose_as_the_broker(tmp_path: Path) -> None:
    """Its certificate comes from the right authority, but does not serve to listen."""
    work = provision_federation(tmp_path / "keys", MALLORY, VICTIM)
    home, victim = work.folder / "devices" / MALLORY, work.folder / "devices" / VICTIM
    credentials = Credentials(ca=victim / "ca.crt", certificate=victim / "device.crt", key=victim / "device.key")
    with (
        impostor(home / "device.crt", home / "device.key") as url,
        pytest.raises(NetworkError, match=r"certificate is refused|is not valid for"),
    ):
        MqttTransport(url, "x", credentials=credentials, connect_timeout_s=2.0).connect()


def impostor(certificate: Path, key: Path) -> AbstractContextManager[str]:
    """A listener that speaks TLS with this certificate, and nothing else."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    return tls_listener(tls, lambda link: link.recv(1))


def test_the_files_of_another_device_are_named_before_anything_is_dialled(tmp_path: Path) -> None:
    from edge_client.config import load_config
    from edge_client.runtime.factory import make_dialer

    work = provision_federation(tmp_path / "keys", MALLORY, VICTIM)
    config = load_config(work.folder / "devices" / VICTIM / "client.toml", {})
    theirs = work.folder / "devices" / MALLORY / "device.crt"
    with pytest.raises(ConfigError, match=r"CN=mallory.*not to victim of demo"):
        make_dialer(replace(config, certificate=theirs))
    with pytest.raises(ConfigError, match="not to victim of other"):
        make_dialer(replace(config, federation="other"))


@pytest.mark.parametrize("curve", [ec.SECP384R1()])
def test_a_key_of_another_kind_is_refused(tmp_path: Path, curve: ec.EllipticCurve) -> None:
    from cryptography.hazmat.primitives.serialization import NoEncryption, PrivateFormat

    path = tmp_path / "device.key"
    pem = ec.generate_private_key(curve).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(pem)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="another kind"):
        open_private_key(path)
