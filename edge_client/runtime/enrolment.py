"""Enrolment: exchange a one-time token for this device's certificate.

The device makes its private key, keeps it, and sends a signing request. It trusts the answer because the server's
certificate comes from the authority in the join folder. The key is on disk before the request is sent, so a lost answer
is requested again with the same key. A used token is removed, and its hash is kept beside its place: a copy that comes
again, as in an archive that is unpacked twice, is no new token. One that renews a certificate may fail; the device then
goes on with the certificate that it has, as long as that is valid.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import http.client
import json
import logging
import os
import ssl
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from edge_client.config import ClientConfig, load_config
from edge_client.errors import ConfigError, Malformed, NetworkError, ProtocolError
from edge_client.protocol.messages import parse_json
from edge_client.transport import bounded_http
from edge_client.transport.blobs import write_atomically
from edge_client.transport.tls import (
    Credentials,
    check_private_file,
    check_subject,
    client_context,
    explain_failure,
)

if TYPE_CHECKING:
    from cryptography import x509

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 30.0
MAX_ANSWER_BYTES = 16_384
MAX_TOKEN_BYTES = 128
Tell = Callable[[str], None]  # prints a line


def has_token(config: ClientConfig) -> bool:
    """Whether there is a token that was not used yet."""
    if config.token is None or not config.token.is_file():
        return False
    used = _used(config.token)
    return not used.is_file() or used.read_bytes() != _hash(config.token)


def load_enrolled(path: Path, *, tell: Tell = log.info) -> ClientConfig:
    """A device's configuration; a one-time token in it is exchanged for a certificate first."""
    config = load_config(path, os.environ)
    if has_token(config):
        try:
            enrol(config, tell=tell)
        except (ConfigError, NetworkError, ProtocolError) as wrong:
            if not _has_valid_certificate(config):
                raise
            log.warning("%s; going on with the certificate that is here; %s", wrong.message, wrong.hint)
    return config


def enrol(config: ClientConfig, *, tell: Tell = log.info) -> None:
    """Use the token, and tell. Afterwards `config.certificate` and `config.key` are there, and the token is not.

    Raises ConfigError for an incomplete configuration, NetworkError when no answer comes, ProtocolError for a refusal.
    """
    if config.token is None or config.certificate is None or config.key is None or not config.enrol_url:
        raise ConfigError(
            "enrolling needs enrol-url, token, certificate and key", hint="use the join folder that `provision` made"
        )
    import fcntl

    from cryptography.hazmat.primitives.serialization import Encoding

    from edge_client.transport.keys import open_private_key, signing_request

    check_private_file(config.token)
    with config.token.open("rb") as file:
        with suppress(OSError):  # no file system has to lock
            fcntl.flock(file, fcntl.LOCK_EX)
        if not has_token(config):  # another process has used it
            return
        token = file.read(MAX_TOKEN_BYTES + 1).strip().decode("ascii", "replace")
        key = open_private_key(config.key)
        asked = {"token": token, "csr": signing_request(key, config.device_id, config.federation).decode("ascii")}
        answer = _post(config, json.dumps(asked).encode("utf-8"))
        certificate = _checked(answer.get("certificate"), config)
        if certificate.public_key() != key.public_key():
            raise ProtocolError("the certificate is for another key", hint="ask for a new token")
        write_atomically(config.certificate, certificate.public_bytes(Encoding.PEM))
        write_atomically(_used(config.token), _hash(config.token))
        config.token.unlink()
    until = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
    tell(f"{config.device_id}: enrolled; its certificate is {config.certificate}, valid until {until}")


def _used(token: Path) -> Path:
    """Where the hash of the last used token is; `flash` looks there, too."""
    return token.with_name(f"{token.name}.used")


def _hash(token: Path) -> bytes:
    return hashlib.sha256(token.read_bytes()).hexdigest().encode("ascii") + b"\n"


def _has_valid_certificate(config: ClientConfig) -> bool:
    if config.certificate is None:
        return False
    try:
        check_subject(config.certificate, name=config.device_id, federation=config.federation)
        held = Credentials(ca=config.ca, certificate=config.certificate, key=config.key)
        client_context(held, dt.datetime.now(dt.timezone.utc))
    except ConfigError:
        return False
    return True


def _post(config: ClientConfig, body: bytes) -> dict[str, object]:
    """-> the JSON object of a 200; anything else is an error."""
    parts = urlsplit(config.enrol_url)
    tls = client_context(Credentials(ca=config.ca), dt.datetime.now(dt.timezone.utc))
    where = parts.hostname or "", parts.port or 443
    try:
        with (
            bounded_http.Deadline() as deadline,
            closing(
                bounded_http.WatchedTlsConnection(*where, deadline=deadline, timeout=REQUEST_TIMEOUT_S, context=tls)
            ) as link,
        ):
            link.request("POST", "/enrol", body, {"Content-Type": "application/json"})
            response = link.getresponse()
            status, data = response.status, response.read(MAX_ANSWER_BYTES + 1)
    except bounded_http.SlowServer as slow:
        told = f"cannot enrol at {config.enrol_url}: no whole answer within {bounded_http.PATIENCE_S:g} s"
        raise NetworkError(told, hint="try again; the token is still good") from slow
    except (OSError, ssl.SSLError, http.client.HTTPException) as wrong:
        reason, hint = explain_failure(wrong, config.ca)
        raise NetworkError(
            f"cannot enrol at {config.enrol_url}: {reason}",
            hint=hint or "check the address, and that `fedcenters-coordinator enrol` is running",
        ) from wrong
    try:
        answer = parse_json(data, MAX_ANSWER_BYTES)
    except Malformed as wrong:
        raise ProtocolError(f"{config.enrol_url} answers no JSON", hint="is it the enrolment's port?") from wrong
    if status == http.HTTPStatus.SERVICE_UNAVAILABLE:
        hint = "try again when its operator, who was told, has seen to it; the token is still good"
        raise NetworkError(f"{config.enrol_url} cannot enrol devices now", hint=hint)
    if status != http.HTTPStatus.OK or not isinstance(answer, dict):
        detail = answer.get("detail", "") if isinstance(answer, dict) else ""
        raise ProtocolError(
            f"this device was not enrolled: {str(detail)[:200] or f'HTTP status {status}'}",
            hint="ask the federation's operator for a new token",
        )
    return answer


def _checked(pem: object, config: ClientConfig) -> x509.Certificate:
    from cryptography import x509

    from edge_client.transport.keys import subject_name

    try:
        certificate = x509.load_pem_x509_certificate(str(pem).encode("utf-8"))
    except ValueError as wrong:
        raise ProtocolError("the answer holds no certificate", hint="is it the enrolment's port?") from wrong
    if certificate.subject != subject_name(config.device_id, config.federation):
        raise ProtocolError("the certificate is for another device", hint="ask for a new token")
    return certificate
