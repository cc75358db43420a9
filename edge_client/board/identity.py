"""Settings and identity of one device, read from the join folder that `provision` made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edge_client.board.board_files import DeviceIdentity
from edge_client.config import config_from_mapping
from edge_client.errors import ConfigError
from edge_client.toml_files import read_toml
from edge_client.transport.keys import open_private_key
from edge_client.transport.tls import check_private_file, check_subject, read_certificate

PROVISION_HINT = "fedcenters-coordinator provision KEYS --device ID (or --token ID) makes the folder KEYS/devices/ID"


def join_folder(path: Path, device_id: str) -> Path:
    """The device's folder: `path` itself, or the one in a provisioned folder. Raises ConfigError."""
    for folder in (path / "devices" / device_id, path):
        if (folder / "client.toml").is_file():
            return folder
    raise ConfigError(f"nothing was provisioned for {device_id} in {path}", hint=PROVISION_HINT)


def read_identity(folder: Path, *, device_id: str, federation: str) -> tuple[dict[str, Any], DeviceIdentity]:
    """-> (the keys of client.toml, the identity). `federation` is the address to dial, if another than the file's.

    Raises ConfigError for another device's folder, and for what would fail on the board.
    """
    path = folder / "client.toml"
    settings = read_toml(path, hint=PROVISION_HINT)
    if federation:
        settings["broker"] = _address(federation, settings)
    config = config_from_mapping({"data": "data", "state": "state", **settings}, folder=folder, where=str(path))
    if device_id and config.device_id != device_id:
        raise ConfigError(f"{path} is of {config.device_id}, not of {device_id}", hint=PROVISION_HINT)
    ca = None if config.ca is None else _bytes(config.ca)
    if config.token is not None and config.token.is_file():
        check_private_file(config.token)
        return settings, DeviceIdentity(ca=ca, token=_bytes(config.token))
    if config.certificate is None or config.key is None:
        if config.broker.startswith("mqtts://"):
            raise ConfigError(f"{path} names no certificate, but the broker speaks TLS", hint=PROVISION_HINT)
        return settings, DeviceIdentity(ca=ca)
    check_private_file(config.key)
    check_subject(config.certificate, name=config.device_id, federation=config.federation)
    if open_private_key(config.key).public_key() != read_certificate(config.certificate).public_key():
        raise ConfigError(f"{config.key} is not the key of {config.certificate}", hint="provision the device again")
    return settings, DeviceIdentity(ca=ca, certificate=_bytes(config.certificate), key=_bytes(config.key))


def _address(url: str, settings: Mapping[str, Any]) -> str:
    """`mqtts://host:port`, or `mqtts://host:port/NAME`, whose name must be the join file's."""
    parts = urlsplit(url)
    name = parts.path.strip("/")
    if name and name != settings.get("federation"):
        raise ConfigError(
            f"{url} is the federation {name!r}, the join file is of {settings.get('federation')!r}", hint=PROVISION_HINT
        )
    return f"{parts.scheme}://{parts.netloc}"


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as wrong:
        raise ConfigError(f"cannot read {path}: {wrong}", hint=PROVISION_HINT) from wrong
