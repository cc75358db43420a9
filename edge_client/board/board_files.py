"""The list of files that make a board a device: one pure function from profile, settings and identity.

A writer (targets.py, remote.py) writes the list to a target; the list does not depend on the target. Entries hold
bytes, not paths, so nothing of the workstation leaks into them. /var/lib holds the board's own state: the only
file that is written there is a one-time token, and it replaces no existing file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from edge_client.board import systemd_unit
from edge_client.board.profiles import BoardProfile
from edge_client.errors import ConfigError

CONFIG_FOLDER = "/etc/fedcenters"
SITE_FOLDER = f"{systemd_unit.INSTALL_FOLDER}/site"
PYTHON_FOLDER = f"{systemd_unit.INSTALL_FOLDER}/python"
MANIFEST_PATH = f"{systemd_unit.INSTALL_FOLDER}/MANIFEST"
IDENTITY_FOLDER = f"{systemd_unit.STATE_FOLDER}/identity"
DATA_FOLDER = f"{systemd_unit.STATE_FOLDER}/data"
SERVICE_LINK = f"/etc/systemd/system/multi-user.target.wants/{systemd_unit.SERVICE_NAME}"
MAX_PATH_CHARS = 255
HOME_FOLDERS = ("/home", "/root", "/run/user")
_PLAIN = re.compile(r"(/[^/\x00-\x1f\x7f\\]+)+")


@dataclass(frozen=True, kw_only=True)
class BoardFile:
    """One file: an absolute `path`, its permissions, its owner, and its bytes or where it links to."""

    path: str
    mode: int = 0o644
    owner: str = "root"
    data: bytes = field(default=b"", repr=False)
    link: str = ""
    memory: bool = False  # the board's own from then on: not written again where `unless` holds its SHA-256
    unless: str = ""

    def __post_init__(self) -> None:
        if (
            not _PLAIN.fullmatch(self.path)
            or {".", ".."} & set(self.path.split("/"))
            or len(self.path) > MAX_PATH_CHARS
        ):
            raise ConfigError(f"a file cannot be called {self.path!r}", hint="is one of the wheels damaged?")

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True, kw_only=True)
class DeviceIdentity:
    """The device's identity: a certificate with its key, or a token that is exchanged for one; neither without TLS."""

    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    token: bytes | None = field(default=None, repr=False)


def board_files(  # noqa: PLR0913 - the facts of a board
    profile: BoardProfile,
    settings: Mapping[str, Any],
    identity: DeviceIdentity,
    site: Iterable[BoardFile],
    *,
    launcher: bytes,
    python: Sequence[BoardFile] = (),
    hardware_watchdog: bool = False,
) -> tuple[BoardFile, ...]:
    """All files of the board, sorted by path; the last one lists the others with their hashes.

    `settings` are the keys of client.toml; `site` the client and its wheels below /opt/fedcenters/site; `python` an
    interpreter of the board's own below /opt/fedcenters/python. Raises ConfigError.
    """
    table = client_settings(profile, settings, identity)
    home_is_read = str(table["data"]).startswith(tuple(f"{home}/" for home in HOME_FOLDERS))
    interpreter = f"{PYTHON_FOLDER}/bin/python3" if python else "/usr/bin/python3"
    service = systemd_unit.service_unit(python=interpreter, groups=profile.groups, home_is_read=home_is_read)
    made = [
        BoardFile(path=systemd_unit.CONFIG_PATH, data=to_toml(table)),
        *_identity(identity),
        BoardFile(path=f"{systemd_unit.INSTALL_FOLDER}/launch.py", data=launcher),
        BoardFile(path=f"/etc/systemd/system/{systemd_unit.SERVICE_NAME}", data=service.encode()),
        BoardFile(path=SERVICE_LINK, mode=0o777, link=f"../{systemd_unit.SERVICE_NAME}"),
        BoardFile(path="/usr/lib/sysusers.d/fedcenters.conf", data=systemd_unit.sysusers_conf().encode()),
        *site,
        *python,
    ]
    if hardware_watchdog:
        path = "/etc/systemd/system.conf.d/fedcenters-watchdog.conf"
        made.append(BoardFile(path=path, data=systemd_unit.watchdog_conf().encode()))
    made.append(BoardFile(path="/usr/lib/tmpfiles.d/fedcenters.conf", data=_tmpfiles(made).encode()))
    return _complete(made)


def client_settings(profile: BoardProfile, settings: Mapping[str, Any], identity: DeviceIdentity) -> dict[str, Any]:
    """The keys of the board's client.toml: what the join file says, with paths of the board."""
    paths = ("ca", "certificate", "key", "token", "enrol-url", "state", "data")
    table = {key: value for key, value in settings.items() if key not in paths}
    table |= {"data": str(settings.get("data", DATA_FOLDER)), "state": systemd_unit.STATE_FOLDER + "/state"}
    table.setdefault("engine", profile.engine)
    table.setdefault("max-temperature", profile.max_temperature)
    if not PurePosixPath(table["data"]).is_absolute():
        raise ConfigError(f"the data folder {table['data']!r} is not absolute", hint="--data /srv/samples")
    if identity.ca is not None:
        table["ca"] = f"{CONFIG_FOLDER}/ca.crt"
    if identity.token is not None:
        table |= {"certificate": f"{IDENTITY_FOLDER}/device.crt", "key": f"{IDENTITY_FOLDER}/device.key"}
        table |= {"token": f"{IDENTITY_FOLDER}/token", "enrol-url": settings["enrol-url"]}
    elif identity.certificate is not None:
        table |= {"certificate": f"{CONFIG_FOLDER}/device.crt", "key": f"{CONFIG_FOLDER}/device.key"}
    return table


def to_toml(table: Mapping[str, Any]) -> bytes:
    """Texts, whole numbers, booleans and lists of texts as TOML; sorted, so that the same table is the same bytes."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in sorted(table.items())).encode()


def hash_list(entries: Iterable[BoardFile]) -> bytes:
    """`sha256sum --check` reads it in the root folder. Links and the board's memory are not listed."""
    lines = [f"{e.sha256}  .{e.path}\n" for e in entries if not e.link and not e.memory and e.path != MANIFEST_PATH]
    return "".join(sorted(lines)).encode()


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(each) for each in value)}]"
    if not isinstance(value, str):
        raise ConfigError(f"cannot write {value!r} into client.toml", hint="use texts, whole numbers, true and false")
    return json.dumps(value, ensure_ascii=False).replace(
        "\x7f", "\\u007f"
    )  # a JSON string is a TOML string but for DEL


def _identity(identity: DeviceIdentity) -> list[BoardFile]:
    made = []
    if identity.ca is not None:
        made.append(BoardFile(path=f"{CONFIG_FOLDER}/ca.crt", data=identity.ca))
    if identity.token is not None:
        unless = f"{IDENTITY_FOLDER}/token.used"
        made.append(
            BoardFile(
                path=f"{IDENTITY_FOLDER}/token",
                mode=0o600,
                owner=systemd_unit.SERVICE_USER,
                data=identity.token,
                memory=True,
                unless=unless,
            )
        )
    elif identity.certificate is not None and identity.key is not None:
        made.append(BoardFile(path=f"{CONFIG_FOLDER}/device.crt", data=identity.certificate))
        made.append(
            BoardFile(
                path=f"{CONFIG_FOLDER}/device.key", mode=0o600, owner=systemd_unit.SERVICE_USER, data=identity.key
            )
        )
    return made


def _tmpfiles(made: Iterable[BoardFile]) -> str:
    """Owners that a foreign host cannot set; systemd-tmpfiles sets them at boot."""
    folders = (systemd_unit.STATE_FOLDER, IDENTITY_FOLDER, DATA_FOLDER)
    lines = [f"d {folder} 0700 {systemd_unit.SERVICE_USER} {systemd_unit.SERVICE_USER} -" for folder in folders]
    lines += [f"z {e.path} {e.mode:04o} {e.owner} {e.owner} -" for e in made if e.owner != "root"]
    return "\n".join(lines) + "\n"


def _complete(made: Sequence[BoardFile]) -> tuple[BoardFile, ...]:
    by_path: dict[str, BoardFile] = {}
    for entry in made:
        if entry.path in by_path and by_path[entry.path] != entry:
            raise ConfigError(f"two wheels bring {entry.path}, and not the same", hint="leave one of them out")
        by_path[entry.path] = entry
    ordered = [by_path[path] for path in sorted(by_path)]
    return (*ordered, BoardFile(path=MANIFEST_PATH, data=hash_list(ordered)))
