"""What `provision` is to make: the plan of a federation's files, which federation.toml keeps. It writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_client.errors import ConfigError, Malformed
from edge_client.protocol.topics import check_federation
from edge_client.toml_files import read_toml
from edge_client.transport.mqtt import PORTS

ENROL_PORT = 8443
READ_HINT = "correct it, or remove it to have it made again"


@dataclass(frozen=True, kw_only=True)
class ProvisionPlan:
    """The input of a federation's files. Devices dial the first of `hosts`."""

    federation: str
    hosts: tuple[str, ...]
    port: int = PORTS["mqtts"]
    enrol_port: int = ENROL_PORT
    broker_folder: str = ""  # of the broker's files on its machine; when empty, `broker` in the provisioned folder
    web_port: int = 0  # of the broker's listener for browsers; 0: none
    page: str = ""  # the address of the coordinator's web app, as phones reach it

    def __post_init__(self) -> None:
        try:
            check_federation(self.federation)
        except Malformed as wrong:
            raise ConfigError(wrong.words, hint="federation: 1 to 32 of a-z, 0-9 and '-'") from wrong
        if not self.hosts or any(not h.isascii() or not h or set(h) & set(" /@") for h in self.hosts):
            raise ConfigError(f"hosts are {list(self.hosts)}", hint="--host broker.example, as devices will dial it")

    @property
    def broker(self) -> str:
        return f"mqtts://{_bracketed(self.hosts[0])}:{self.port}"

    @property
    def enrol_url(self) -> str:
        return f"https://{_bracketed(self.hosts[0])}:{self.enrol_port}"


def open_plan(folder: Path, changes: Mapping[str, Any]) -> ProvisionPlan:
    """The plan of a folder, with the `changes` from the command line. Raises ConfigError."""
    path = folder / "federation.toml"
    known = _read_plan(path) if path.exists() else {}
    asked = {key: value for key, value in changes.items() if value}
    if {"federation"} <= known.keys() & asked.keys() and asked["federation"] != known["federation"]:
        raise ConfigError(f"{folder} belongs to {known['federation']}", hint="use one folder per federation")
    together = {**known, **asked}
    for needed, option in (("federation", "--federation NAME"), ("hosts", "--host NAME")):
        if needed not in together:
            raise ConfigError(f"{folder} is new, and {option} is not given", hint=f"add {option}")
    return ProvisionPlan(**{**together, "hosts": tuple(together["hosts"])})


def _read_plan(path: Path) -> dict[str, Any]:
    """The fields in the file. Raises ConfigError for a value that is none of them."""
    held = {key.replace("-", "_"): value for key, value in read_toml(path, hint=READ_HINT).items()}
    for key, value in held.items():
        kind = {"hosts": list, "port": int, "enrol_port": int, "web_port": int}.get(key, str)
        listed = value if isinstance(value, list) else []
        wrong = type(value) is not kind or any(not isinstance(host, str) for host in listed)  # True is an int
        if wrong or key not in ProvisionPlan.__dataclass_fields__:
            raise ConfigError(f"{path}: {key.replace('_', '-')} is {value!r}", hint=READ_HINT)
    return held


def plan_table(plan: ProvisionPlan) -> dict[str, Any]:
    """The plan as its file has it."""
    return {key.replace("_", "-"): value for key, value in vars(plan).items() if value} | {"hosts": list(plan.hosts)}


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
