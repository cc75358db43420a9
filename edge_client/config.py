"""ClientConfig: a TOML file plus FEDCENTERS_* variables, checked once.

Keys are kebab-case; relative paths are relative to the file. A variable such as FEDCENTERS_BROKER replaces the key
`broker`; that of `data` is FEDCENTERS_DEVICE_DATA, because FEDCENTERS_DATA names the emulator's data sets. Nothing is
created here, and no network is touched.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edge_client.engines.base import DEVICES
from edge_client.errors import ConfigError, FedcentersError, Malformed
from edge_client.protocol.program import ENGINES
from edge_client.protocol.secure.parameters import SECURE_MODES
from edge_client.protocol.topics import check_cid, check_federation
from edge_client.toml_files import parse_toml, variable_of, warn_of_mistyped

DATA_VARIABLE = variable_of("device-data")
EMULATOR_VARIABLE = variable_of("data")  # the emulator's data sets; a device does not read it
KEY_HEX_DIGITS = 64
log = logging.getLogger(__name__)
_HOURS = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-3]):([0-5][0-9])")


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """The settings of a device."""

    federation: str
    device_id: str
    broker: str  # mqtt://host:port or mqtts://host:port
    data: Path  # the folder of samples, see dataset.py
    state: Path  # folder that survives power cuts; one per device
    signing_keys: tuple[bytes, ...]  # raw Ed25519 public keys [32 bytes] whose programs may run here
    release_keys: tuple[bytes, ...] = ()  # raw Ed25519 public keys whose clients may run here; (): `signing_keys`
    secure: str = "off"  # "updates", "updates+membership": the least that a run must hide of this device
    engine: str = "onnx"
    device: str = "auto"  # where the engine runs: CUDA where it can be had, else the CPU
    threads: int = 1  # one per session: a board does other things, too
    ca: Path | None = None  # PEM file; None trusts the system's authorities
    certificate: Path | None = None  # with `key`, this device's identity for the broker
    key: Path | None = None
    enrol_url: str = ""  # where a token becomes a certificate, https://host:port
    token: Path | None = None  # file with the one-time token; gone once it was used
    cache_mib: int = 1024  # programs and models kept for later
    max_samples: int = 0  # the newest so many are read; 0: all
    min_battery_percent: int = 20  # 0: never look
    max_temperature: int = 100  # °C, of the hottest sensor; 0: never look
    min_free_memory_mib: int = 64  # 0: never look
    allow_metered: bool = False  # train over a connection that is paid by the byte
    quiet_hours: str = ""  # "22:00-06:30" in local time; "": none


def load_config(path: Path, environment: Mapping[str, str]) -> ClientConfig:
    """Read and check one file. Raises ConfigError naming the file and the key."""
    try:
        raw = parse_toml(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as missing:
        hint = "check the path; the operator's `provision` makes the file, in the folder keys/devices/NAME"
        raise ConfigError(f"there is no file {path}", hint=hint) from missing
    except (OSError, ValueError, RecursionError) as wrong:
        raise ConfigError(f"cannot read {path}: {wrong}", hint="the file must be TOML, see toml.io") from wrong
    config = config_from_mapping(raw | _overrides(environment), folder=path.parent, where=str(path))
    former = environment.get(EMULATOR_VARIABLE)
    if former and not environment.get(DATA_VARIABLE) and any((path.parent / former).glob("train*")):
        log.warning(
            "%s is the emulator's and not read here: this device's samples are in %s; %s names another folder",
            EMULATOR_VARIABLE,
            config.data,
            DATA_VARIABLE,
        )
    return config


def config_from_mapping(raw: Mapping[str, Any], *, folder: Path, where: str) -> ClientConfig:
    """Check the keys and values of one configuration; `where` is named in errors."""
    unknown = sorted(set(raw) - set(_KEYS))
    if unknown:
        near = difflib.get_close_matches(unknown[0], _KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(_KEYS)}"
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}", hint=hint)
    missing = [key for key in _REQUIRED if key not in raw]
    if missing:
        raise ConfigError(f"{where}: {missing[0]!r} is missing", hint=_KEYS[missing[0]][1])
    return ClientConfig(**{key.replace("-", "_"): _read(key, value, folder, where) for key, value in raw.items()})


def _read(key: str, value: object, folder: Path, where: str) -> Any:  # noqa: ANN401 - the type of the key's field
    reader, hint = _KEYS[key]
    try:
        return reader(value, folder)
    except (FedcentersError, ValueError) as wrong:
        message = wrong.words if isinstance(wrong, Malformed) else getattr(wrong, "message", str(wrong))
        raise ConfigError(f"{where}: {key} = {value!r}: {message}", hint=hint) from wrong


def _overrides(environment: Mapping[str, str]) -> dict[str, Any]:
    """FEDCENTERS_DEVICE_ID=x -> {"device-id": "x"}; numbers and lists are read by their key's reader."""
    names = {variable_of(key): key for key in _KEYS if key != "data"} | {DATA_VARIABLE: "data"}
    warn_of_mistyped(environment, names)
    return {key: environment[name] for name, key in names.items() if environment.get(name)}


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("expected a text")
    return value


def _broker(value: object, _folder: Path) -> str:
    from edge_client.transport.mqtt import parse_url  # paho is needed only where a broker is

    parse_url(_text(value))
    return _text(value)


def _enrol_url(value: object, _folder: Path) -> str:
    parts = urlsplit(_text(value))
    if parts.scheme != "https" or not parts.hostname or parts.path.strip("/"):
        raise ValueError("expected https://host:port")
    return _text(value).rstrip("/")


def _one_of(names: Sequence[str]) -> Callable[[object, Path], str]:
    def read(value: object, _folder: Path) -> str:
        if value not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return str(value)

    return read


def _path(value: object, folder: Path) -> Path:
    return folder / _text(value)


def _keys(value: object, _folder: Path) -> tuple[bytes, ...]:
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise ValueError("expected a list with at least one key")
    if any(not isinstance(text, str) or len(text) != KEY_HEX_DIGITS for text in texts):
        raise ValueError(f"a key is {KEY_HEX_DIGITS} hex digits")
    return tuple(bytes.fromhex(text) for text in texts)


def _count(low: int, high: int) -> Callable[[object, Path], int]:
    def read(value: object, _folder: Path) -> int:
        number = int(value) if isinstance(value, str) and value.isdecimal() else value
        if not isinstance(number, int) or isinstance(number, bool) or not low <= number <= high:
            raise ValueError(f"expected a whole number from {low} to {high}")
        return number

    return read


def _switch(value: object, _folder: Path) -> bool:
    words = {"true": True, "false": False}
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value not in words:
        raise ValueError("expected true or false")
    return words[value]


def _hours(value: object, _folder: Path) -> str:
    if value == "":
        return ""
    parse_hours(_text(value))
    return _text(value)


# Key -> its reader (from the value and the folder of the file), and the hint for a wrong value.
_KEYS: Mapping[str, tuple[Callable[[Any, Path], Any], str]] = {
    "federation": (
        lambda value, _: check_federation(value),
        "the name that the coordinator uses: lower-case letters, digits and '-', at most 32",
    ),
    "device-id": (
        lambda value, _: check_cid(value),
        "letters, digits, '_' and '-', at most 64; unique in the federation",
    ),
    "broker": (_broker, 'for example broker = "mqtts://broker.example:8883"'),
    "data": (
        _path,
        f"the folder of samples: train.npz, or a folder train (docs/flash-a-board.md); or {DATA_VARIABLE}",
    ),
    "state": (_path, "a folder of this device's own that survives a restart"),
    "signing-keys": (_keys, "the coordinator's public keys in hex; it writes them to signing.pub"),
    "release-keys": (_keys, "the public key in hex that `provision` writes to release/signing.pub"),
    "secure": (_one_of(SECURE_MODES), "updates: take part in runs with `secure` alone; docs/privacy.md"),
    "engine": (_one_of(ENGINES), f"one of {', '.join(ENGINES)}"),
    "device": (_one_of(DEVICES), f"one of {', '.join(DEVICES)}; auto is right unless you measure"),
    "threads": (_count(1, 1024), "1 is right for most boards"),
    "ca": (_path, "the PEM file of the authority that signed the broker's certificate"),
    "certificate": (_path, "the PEM file that `provision` or `enrol` made for this device"),
    "key": (_path, "the PEM file of the certificate's private key, readable by its owner only"),
    "enrol-url": (_enrol_url, "the address that `fedcenters-coordinator enrol` prints"),
    "token": (_path, "the file with this device's one-time token"),
    "cache-mib": (_count(16, 1 << 24), "how much disk programs and models may take, in MiB"),
    "max-samples": (_count(0, 2**31), "0 to read all; the newest are kept"),
    "min-battery-percent": (_count(0, 100), "0 to train at any charge"),
    "max-temperature": (_count(0, 150), "degrees Celsius; 0 to train at any temperature"),
    "min-free-memory-mib": (_count(0, 1 << 24), "0 to train with any"),
    "allow-metered": (_switch, "true to train over a link that is paid by the byte"),
    "quiet-hours": (_hours, 'for example quiet-hours = "22:00-06:30", in local time'),
}
_REQUIRED = ("federation", "device-id", "broker", "data", "state", "signing-keys")


def parse_hours(hours: str) -> tuple[int, int]:
    """The text 22:00-06:30 -> (1320, 390): minutes of the day, the end excluded. Raises ValueError."""
    found = _HOURS.fullmatch(hours)
    if found is None:
        raise ValueError("expected HH:MM-HH:MM")
    h1, m1, h2, m2 = map(int, found.groups())
    if (h1, m1) == (h2, m2):
        raise ValueError("these hours begin when they end")
    return 60 * h1 + m1, 60 * h2 + m2
