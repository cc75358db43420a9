"""How a new device joins this federation or asks for its nearest center, as text that a person copies from the page.

It holds public facts only: the broker's address, the federation's name, the public signing keys. A device's certificate
or token comes from `fedcenters-coordinator provision`.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

from coordinator import local_broker as brokers
from coordinator.config import CoordinatorConfig
from coordinator.identity.join_links import phone_link, qr_svg
from coordinator.identity.signing_key import trusted_keys
from export.serve.listener import is_loopback

NEAREST_COMMAND = "fedcenters-edge nearest --config client.toml --json"
TLS_NOTE = (
    "`fedcenters-coordinator provision keys --device NAME` writes a device's whole folder: this file, ca.crt,"
    " device.crt and device.key, where keys is the folder of the federation's certificates; device-id must be the NAME"
    " that the certificate has."
)
# As `provision` names the files of a device's folder.
TLS_FILES = {"ca": "ca.crt", "certificate": "device.crt", "key": "device.key"}


def join_info(config: CoordinatorConfig, base: str, *, phone: bool) -> dict[str, Any]:
    """`base` is the address at which the page was opened, as http://host:port; `phone`: whether phones have a page."""
    url = brokers.broker_url(config.broker)
    tls = url.startswith(("mqtts://", "wss://"))
    facts = {
        "federation": config.federation,
        "device-id": "my-device",
        "broker": url,
        "engine": "onnx",
        "data": "data",
        "state": "state",
        "signing-keys": trusted_keys(config.signing_key_folder),
        **(TLS_FILES if tls else {}),
    }
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in facts.items())  # such JSON is TOML, too
    here = is_loopback(urlsplit(url).hostname or "")
    return {
        "config": text,
        "command": NEAREST_COMMAND,
        "local": here,
        "note": TLS_NOTE if tls else "",
        "phone": _phone(base) if phone else None,
    }


def _phone(base: str) -> dict[str, str]:
    link = phone_link(base)
    return {"url": link, "svg": qr_svg(link)}
