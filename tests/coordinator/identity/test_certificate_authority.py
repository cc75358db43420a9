"""What a certificate allows and how long it lasts, and which requests for one are read."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from coordinator.identity.certificate_authority import (
    CertificateAuthority,
    issue_time_s,
    open_authority,
    read_request,
    renew_certificate,
)
from edge_client.errors import ConfigError, Malformed
from edge_client.transport.keys import signing_request

NOW = dt.datetime(2026, 11, 30, 12, tzinfo=dt.timezone.utc)
HOUR, DAY = dt.timedelta(hours=1), dt.timedelta(days=1)
KEY = ec.generate_private_key(ec.SECP256R1())
REQUEST = signing_request(KEY, "d1", "demo")


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return open_authority(tmp_path / "authority", "demo", NOW)


def lifetime(certificate: x509.Certificate) -> tuple[dt.timedelta, dt.timedelta]:
    return NOW - certificate.not_valid_before_utc, certificate.not_valid_after_utc - NOW


def uses(certificate: x509.Certificate) -> tuple[bool, int | None, set[str]]:
    """Whether it is an authority's, how many others may follow it, and what its key may do."""
    basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage)
    assert basic.critical
    assert usage.critical
    words = ["digital_signature", "key_cert_sign", "crl_sign", "content_commitment", "key_encipherment"]
    words += ["data_encipherment", "key_agreement"]
    return basic.value.ca, basic.value.path_length, {word for word in words if getattr(usage.value, word)}


def test_an_authority_lasts_ten_years_and_signs_certificates_and_lists_only(authority: CertificateAuthority) -> None:
    assert lifetime(authority.certificate) == (HOUR, 3_650 * DAY)
    assert uses(authority.certificate) == (True, 0, {"key_cert_sign", "crl_sign"})


def test_a_certificate_lasts_a_year_at_most_as_long_as_its_authority(authority: CertificateAuthority) -> None:
    made = authority.issue_client(KEY.public_key(), "d1", NOW)
    assert lifetime(made) == (HOUR, 365 * DAY)
    assert uses(made) == (False, None, {"digital_signature"})
    assert issue_time_s(made) == NOW.timestamp()
    late = authority.issue_client(KEY.public_key(), "d1", NOW + 3_600 * DAY)
    assert late.not_valid_after_utc == authority.certificate.not_valid_after_utc
    assert authority.certificates_of("d1") == [made, late]
    assert authority.issued_names() == ["d1"]


def test_a_certificate_is_for_a_client_or_for_a_listener_at_its_addresses(authority: CertificateAuthority) -> None:
    client = authority.issue_client(KEY.public_key(), "d1", NOW)
    server = authority.issue_server(KEY.public_key(), "broker", ["broker.example", "10.0.0.7", "::1"], NOW)
    purposes = [
        [oid.dotted_string for oid in made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value]
        for made in (client, server)
    ]
    assert purposes == [["1.3.6.1.5.5.7.3.2"], ["1.3.6.1.5.5.7.3.1"]]
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["broker.example"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "::1"]
    with pytest.raises(x509.ExtensionNotFound):
        client.extensions.get_extension_for_class(x509.SubjectAlternativeName)


def test_a_renewed_authority_has_its_key_and_what_it_issued_stays_valid(authority: CertificateAuthority) -> None:
    made = authority.issue_client(KEY.public_key(), "d1", NOW)
    renewed = renew_certificate(authority, NOW + DAY)
    assert renewed.certificate.public_key() == authority.certificate.public_key()
    assert authority.current().certificate == renewed.certificate != authority.certificate
    made.verify_directly_issued_by(renewed.certificate)


def test_a_folder_is_the_authority_of_one_federation_with_its_key(authority: CertificateAuthority) -> None:
    assert open_authority(authority.folder, "demo", NOW).certificate == authority.certificate
    with pytest.raises(ConfigError, match="is not the authority of other"):
        open_authority(authority.folder, "other", NOW)
    (authority.folder / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"there is no .*ca\.key"):
        open_authority(authority.folder, "demo", NOW)


@pytest.mark.parametrize("size", [len(REQUEST), 8_192], ids=["as made", "the most"])
def test_a_request_of_8_kib_names_its_device_and_key(size: int) -> None:
    assert read_request(REQUEST.ljust(size, b"\n"), "demo") == ("d1", KEY.public_key())


@pytest.mark.parametrize(
    ("pem", "code"),
    [
        (REQUEST.ljust(8_193, b"\n"), "too_big"),
        (b"", "bad_field"),
        (signing_request(KEY, "d1", "other"), "bad_field"),
        (signing_request(ec.generate_private_key(ec.SECP384R1()), "d1", "demo"), "bad_field"),
        (signing_request(KEY, "coordinator.0", "demo"), "bad_field"),
    ],
)
def test_a_request_that_is_no_devices_of_this_federation_is_refused(pem: bytes, code: str) -> None:
    with pytest.raises(Malformed, match=f"^{code}: "):
        read_request(pem, "demo")
