"""A certificate that is renewed while its server runs."""

from __future__ import annotations

import datetime as dt
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from coordinator.identity.certificate_authority import CERTIFICATE_DAYS, CertificateAuthority, open_authority
from edge_client.transport.keys import open_private_key
from export.serve.renewed_certificate import renewal_watch
from tests.coordinator.dashboard.test_endpoint import token
from tests.support.served_dashboard import DashboardSite, serve_dashboard

NOW = dt.datetime.now(dt.timezone.utc)


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return open_authority(tmp_path / "ca", "test", NOW)


def issue(authority: CertificateAuthority, folder: Path, name: str) -> int:
    """server.pem for the key NAME.key; its serial number."""
    made = authority.issue_server(open_private_key(folder / f"{name}.key").public_key(), name, ["127.0.0.1"], NOW)
    (folder / "server.pem").write_bytes(made.public_bytes(Encoding.PEM))
    return made.serial_number


@pytest.fixture
def first(authority: CertificateAuthority, tmp_path: Path) -> int:
    return issue(authority, tmp_path, "server")


@pytest.fixture
def site(tmp_path: Path, first: int) -> Iterator[DashboardSite]:
    settings = {
        "dashboard": "127.0.0.1:0",
        "dashboard_certificate": tmp_path / "server.pem",
        "dashboard_key": tmp_path / "server.key",
        "dashboard_read_token": token(tmp_path, "read"),
        "dashboard_control_token": token(tmp_path, "control"),
    }
    with serve_dashboard(tmp_path, **settings) as found:
        yield found


def shown(site: DashboardSite) -> int:
    """The serial number of the certificate that a new client gets."""
    return x509.load_pem_x509_certificate(ssl.get_server_certificate(("127.0.0.1", site.port)).encode()).serial_number


def test_a_renewed_certificate_is_shown_without_a_restart(
    site: DashboardSite, authority: CertificateAuthority, first: int, tmp_path: Path
) -> None:
    assert shown(site) == first
    second = issue(authority, tmp_path, "server")
    assert [shown(site), shown(site)] == [second, second]


def test_a_renewed_certificate_for_another_kind_of_key_takes_the_place_of_the_first(
    site: DashboardSite, authority: CertificateAuthority, first: int, tmp_path: Path
) -> None:
    """OpenSSL keeps one of each kind, and clients prefer EC: the server showed it until it had ended."""
    key = rsa.generate_private_key(65537, 2048)
    public: Any = key.public_key()  # typed for EC keys
    made = authority.issue_server(public, "server", ["127.0.0.1"], NOW)
    (tmp_path / "server.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (tmp_path / "server.pem").write_bytes(made.public_bytes(Encoding.PEM))
    assert [shown(site), shown(site)] == [made.serial_number] * 2
    again = issue(authority, tmp_path, "other")
    (tmp_path / "other.key").replace(tmp_path / "server.key")
    assert [shown(site), shown(site)] == [again] * 2


def test_half_of_a_renewal_or_none_leaves_the_certificate_of_before(
    site: DashboardSite, authority: CertificateAuthority, first: int, tmp_path: Path
) -> None:
    second = issue(authority, tmp_path, "other")  # of another key, which comes a moment later
    assert [shown(site), shown(site)] == [first, first]
    (tmp_path / "server.pem").rename(tmp_path / "away.pem")
    assert [shown(site), shown(site)] == [first, first]
    (tmp_path / "away.pem").rename(tmp_path / "server.pem")
    (tmp_path / "other.key").rename(tmp_path / "server.key")
    assert [shown(site), shown(site)] == [second, second]


@pytest.mark.parametrize(("days", "told"), [(-1, "has ended"), (5, "ends in 5 days"), (20, "")])
def test_a_certificate_that_ends_is_told_in_the_servers_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, days: int, told: str
) -> None:
    """A server went on for ever with one that each client refused, and said nothing."""
    begun = NOW - dt.timedelta(days=CERTIFICATE_DAYS - days) + dt.timedelta(hours=1)
    authority = open_authority(tmp_path / "ca", "test", begun)
    key = open_private_key(tmp_path / "server.key").public_key()
    made = authority.issue_server(key, "server", ["127.0.0.1"], begun)
    (tmp_path / "server.pem").write_bytes(made.public_bytes(Encoding.PEM))
    renewal_watch(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), tmp_path / "server.pem", tmp_path / "server.key")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(told)
    assert all(f"server.pem {told}" in line for line in said)
