"""Whether this device may train now, checked before each task. `DeviceRefused` says why not, and when to ask again.

`training_refusal` decides, from a device's status alone. `read_device_status` reads the status from Linux: sysfs,
/proc/meminfo, memory cgroups, and NetworkManager where it runs; on a phone with Termux from Android, through
Termux:API. A value that the system does not show is unknown, and refuses no task.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edge_client.config import ClientConfig, parse_hours
from edge_client.errors import DeviceRefused
from edge_client.transport.tls import is_loopback

BATTERY_RETRY_S = 600.0  # a battery does not change faster
TEMPERATURE_RETRY_S = 120.0
MEMORY_RETRY_S = 120.0
MINUTES_PER_DAY = 24 * 60
PLAUSIBLE_CELSIUS = range(-40, 200)  # °C; what a broken sensor says is not
BUSCTL_TIMEOUT_S = 5.0
METERED_VALUES = {
    1: True,
    2: False,
    3: True,
    4: False,
}  # NMMetered of NetworkManager's D-Bus API; 3 and 4 are its guesses
TERMUX_TIMEOUT_S = 5.0  # without the app Termux:API its commands wait for ever
TERMUX_COMMANDS = ("termux-battery-status", "termux-wifi-connectioninfo")
NETWORK_MANAGER = ("org.freedesktop.NetworkManager", "/org/freedesktop/NetworkManager")


@dataclass(frozen=True, kw_only=True)
class DeviceStatus:
    """The readings of a device; empty or None where it has none."""

    draining: tuple[tuple[str, int], ...] = ()  # batteries that are not charged: name, percent
    temperatures: tuple[tuple[str, float], ...] = ()  # sensors: name, °C
    free_mib: int | None = None
    metered: bool | None = None
    minute: int = 0  # of the day, local time


def training_refusal(status: DeviceStatus, config: ClientConfig) -> DeviceRefused | None:
    """Why the device will not train, the longest to wait for first; None when it may."""
    return (
        _quiet(status, config) or _power(status, config) or _link(status, config)
        or _heat(status, config) or _memory(status, config)
    )  # fmt: skip


def check_may_train(config: ClientConfig) -> None:
    """Raise DeviceRefused when this device may not train now."""
    refused = training_refusal(read_device_status(), config)
    if refused is not None:
        raise refused


def read_device_status(root: Path = Path("/")) -> DeviceStatus:
    """What the system under `root` shows now."""
    now, clock = time.localtime(), int(time.monotonic() // 60)
    running = (root / "run" / "NetworkManager").is_dir()
    phone = termux_status(*ask_termux(clock))  # Android hides most of sysfs
    return DeviceStatus(
        draining=phone.draining or _batteries(root / "sys" / "class" / "power_supply"),
        temperatures=phone.temperatures + _temperatures(root / "sys" / "class" / "thermal"),
        free_mib=_free_mib(root),
        metered=is_metered(clock) if running else phone.metered,
        minute=60 * now.tm_hour + now.tm_min,
    )


def has_termux() -> bool:
    """Whether this runs on a phone, in Termux or in a Debian under proot-distro there, with the package termux-api."""
    return shutil.which(TERMUX_COMMANDS[0]) is not None


@functools.lru_cache(maxsize=1)
def ask_termux(_minute: int) -> tuple[str, str]:
    """What Android says of the battery and of the Wi-Fi, as JSON; "" for no answer. Asked once a minute at most."""
    battery, wifi = (_output([path], TERMUX_TIMEOUT_S) if (path := shutil.which(c)) else "" for c in TERMUX_COMMANDS)
    return battery, wifi


def termux_status(battery: str, wifi: str) -> DeviceStatus:
    """A phone's readings. A link that is no Wi-Fi counts as metered; whether a Wi-Fi costs money is not told."""
    power, link = _object(battery), _object(wifi)
    percent, celsius, state = power.get("percentage"), power.get("temperature"), link.get("supplicant_state")
    draining = (("phone", percent),) if power.get("plugged") == "UNPLUGGED" and isinstance(percent, int) else ()
    plausible = isinstance(celsius, int | float) and int(celsius) in PLAUSIBLE_CELSIUS
    return DeviceStatus(
        draining=draining,
        temperatures=(("battery", float(celsius or 0)),) if plausible else (),
        metered=state != "COMPLETED" if isinstance(state, str) else None,
    )


@functools.lru_cache(maxsize=1)
def is_metered(_minute: int) -> bool | None:
    """Whether NetworkManager says that the link costs money; None: unknown. Asked once a minute at most."""
    busctl = shutil.which("busctl")
    if busctl is None:
        return None
    name, path = NETWORK_MANAGER
    said = _output([busctl, "--system", "get-property", name, path, name, "Metered"], BUSCTL_TIMEOUT_S).split()
    return METERED_VALUES.get(int(said[1])) if len(said) == 2 and said[1].isdecimal() else None  # noqa: PLR2004 - "u 1"


def _quiet(status: DeviceStatus, config: ClientConfig) -> DeviceRefused | None:
    if not config.quiet_hours:
        return None
    begin, end = parse_hours(config.quiet_hours)
    inside = begin <= status.minute < end if begin < end else status.minute >= begin or status.minute < end
    if not inside:
        return None
    left_s = 60.0 * ((end - status.minute) % MINUTES_PER_DAY)
    return DeviceRefused(f"quiet hours {config.quiet_hours}", retry_s=left_s, hint="change quiet-hours")


def _power(status: DeviceStatus, config: ClientConfig) -> DeviceRefused | None:
    for name, percent in status.draining:
        if percent < config.min_battery_percent:
            return DeviceRefused(
                f"battery {name} is at {percent} %, less than {config.min_battery_percent} %",
                retry_s=BATTERY_RETRY_S,
                hint="connect a charger, or lower min-battery-percent",
            )
    return None


def _link(status: DeviceStatus, config: ClientConfig) -> DeviceRefused | None:
    if not status.metered or config.allow_metered or is_loopback(urlsplit(config.broker).hostname or ""):
        return None
    return DeviceRefused("the link is metered", retry_s=BATTERY_RETRY_S, hint="set allow-metered = true to use it")


def _heat(status: DeviceStatus, config: ClientConfig) -> DeviceRefused | None:
    if not config.max_temperature or not status.temperatures:
        return None
    name, celsius = max(status.temperatures, key=lambda each: each[1])
    if celsius <= config.max_temperature:
        return None
    return DeviceRefused(
        f"{name} is at {celsius:.0f} °C, more than {config.max_temperature} °C",
        retry_s=TEMPERATURE_RETRY_S,
        hint="give it air, or raise max-temperature",
    )


def _memory(status: DeviceStatus, config: ClientConfig) -> DeviceRefused | None:
    if status.free_mib is None or status.free_mib >= config.min_free_memory_mib:
        return None
    return DeviceRefused(
        f"{status.free_mib} MiB of memory are free, less than {config.min_free_memory_mib} MiB",
        retry_s=MEMORY_RETRY_S,
        hint="stop something else, or lower min-free-memory-mib",
    )


def _batteries(supplies: Path) -> tuple[tuple[str, int], ...]:
    """A battery with the scope "Device" is a mouse's."""
    own = [s for s in _listed(supplies) if _text(s / "type") == "Battery" and _text(s / "scope") != "Device"]
    levels = [(s.name, _text(s / "capacity")) for s in own if _text(s / "status") == "Discharging"]
    return tuple((name, int(level)) for name, level in levels if level.isdecimal())


def _temperatures(thermal: Path) -> tuple[tuple[str, float], ...]:
    """Linux gives thousandths of a degree; a zone that is switched off gives an error or nonsense."""
    zones = [zone for zone in _listed(thermal) if zone.name.startswith("thermal_zone")]
    told = [(_text(zone / "type") or zone.name, _text(zone / "temp")) for zone in zones]
    read_ = [(name, int(text) / 1000) for name, text in told if re.fullmatch(r"-?[0-9]{1,9}", text)]
    return tuple((name, celsius) for name, celsius in read_ if int(celsius) in PLAUSIBLE_CELSIUS)


def _free_mib(root: Path) -> int | None:
    """What the machine has, or less where a container or a service may not use it all."""
    found = re.search(r"^MemAvailable:\s+([0-9]+) kB$", _text(root / "proc" / "meminfo"), flags=re.MULTILINE)
    left = [int(found[1]) // 1024] if found else []
    return min([*left, *_left_by_cgroups(root)], default=None)


def _left_by_cgroups(root: Path) -> Iterator[int]:
    """MiB that the memory cgroups (v2) of this process leave, from its own up to the topmost that is seen here.

    Pages of files that were not used lately count as free, as the kernel drops them first.
    """
    top = root / "sys" / "fs" / "cgroup"
    own = re.search(r"^0::/(.*)$", _text(root / "proc" / "self" / "cgroup"), flags=re.MULTILINE)
    names = [name for name in own[1].split("/") if name not in ("", "..")] if own else []
    for depth in range(len(names), -1, -1):
        group = top.joinpath(*names[:depth])
        limit, used = _text(group / "memory.max"), _text(group / "memory.current")
        if limit.isdecimal() and used.isdecimal():
            cached = re.search(r"^inactive_file ([0-9]+)$", _text(group / "memory.stat"), flags=re.MULTILINE)
            yield max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0)) >> 20


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _output(command: list[str], timeout_s: float) -> str:
    """What a program writes; "" where it fails or takes longer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
