"""Enrolment: exchange a one-time token for this device's certificate.

The device makes its private key, keeps it, and sends a signing request. It trusts the answer because the server's
certificate comes from the authority in the join folder. The key is on disk before the request is sent, so a lost answer
is requested again with the same key. A used token is removed.
"""

from __future__ import annotations

import datetime as dt
import http.client
import json
import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from edge_client.config import ClientConfig, load_config
from edge_client.errors import ConfigError, Malformed, NetworkError, ProtocolError
from edge_client.protocol.messages import parse_json
from edge_client.transport.blobs import write_atomically
from edge_client.transport.keys import open_private_key, signing_request, subject_name
from edge_client.transport.tls import Credentials, check_private_file, client_context, explain_failure

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 30.0
MAX_ANSWER_BYTES = 16_384
MAX_TOKEN_BYTES = 128
Tell = Callable[[str], None]  # prints a line


def has_token(config: ClientConfig) -> bool:
    """Whether there is a token that was not used yet."""
    return config.token is not None and config.token.is_file()


def load_enrolled(path: Path, *, tell: Tell = log.info) -> ClientConfig:
    """A device's configuration; a one-time token in it is exchanged for a certificate first."""
    config = load_config(path, os.environ)
    if has_token(config):
        enrol(config, tell=tell)
    return config


def enrol(config: ClientConfig, *, tell: Tell = log.info) -> None:
    """Use the token, and tell. Afterwards `config.certificate` and `config.key` are there, and the token is not.

    Raises ConfigError for an incomplete configuration, NetworkError when no answer comes, ProtocolError for a refusal.
    """
    if config.token is None or config.certificate is None or config.key is None or not config.enrol_url:
        raise ConfigError(
            "enrolling needs enrol-url, token, certificate and key", hint="use the join folder that `provision` made"
        )
    check_private_file(config.token)
    token = config.token.read_bytes()[: MAX_TOKEN_BYTES + 1].strip().decode("ascii", "replace")
    key = open_private_key(config.key)
    asked = {"token": token, "csr": signing_request(key, config.device_id, config.federation).decode("ascii")}
    answer = _post(config, json.dumps(asked).encode("utf-8"))
    certificate = _checked(answer.get("certificate"), config)
    if certificate.public_key() != key.public_key():
        raise ProtocolError("the certificate is for another key", hint="ask for a new token")
    write_atomically(config.certificate, certificate.public_bytes(Encoding.PEM))
    config.token.unlink()
    until = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
    tell(f"{config.device_id}: enrolled; its certificate is {config.certificate}, valid until {until}")


def _post(config: ClientConfig, body: bytes) -> dict[str, object]:
    """-> the JSON object of a 200; anything else is an error."""
    parts = urlsplit(config.enrol_url)
    tls = client_context(Credentials(ca=config.ca), dt.datetime.now(dt.timezone.utc))
    link = http.client.HTTPSConnection(parts.hostname or "", parts.port or 443, timeout=REQUEST_TIMEOUT_S, context=tls)
    try:
        link.request("POST", "/enrol", body, {"Content-Type": "application/json"})
        response = link.getresponse()
        status, data = response.status, response.read(MAX_ANSWER_BYTES + 1)
    except (OSError, ssl.SSLError, http.client.HTTPException) as wrong:
        reason, hint = explain_failure(wrong, config.ca)
        raise NetworkError(
            f"cannot enrol at {config.enrol_url}: {reason}",
            hint=hint or "check the address, and that `fedcenters-coordinator enrol` is running",
        ) from wrong
    finally:
        link.close()
    try:
        answer = parse_json(data, MAX_ANSWER_BYTES)
    except Malformed as wrong:
        raise ProtocolError(f"{config.enrol_url} answers no JSON", hint="is it the enrolment's port?") from wrong
    if status != http.HTTPStatus.OK or not isinstance(answer, dict):
        detail = answer.get("detail", "") if isinstance(answer, dict) else ""
        raise ProtocolError(
            f"this device was not enrolled: {str(detail)[:200] or f'HTTP status {status}'}",
            hint="ask the federation's operator for a new token",
        )
    return answer


def _checked(pem: object, config: ClientConfig) -> x509.Certificate:
    try:
        certificate = x509.load_pem_x509_certificate(str(pem).encode("utf-8"))
    except ValueError as wrong:
        raise ProtocolError("the answer holds no certificate", hint="is it the enrolment's port?") from wrong
    if certificate.subject != subject_name(config.device_id, config.federation):
        raise ProtocolError("the certificate is for another device", hint="ask for a new token")
    return certificate
