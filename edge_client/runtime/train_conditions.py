"""May this device train now? Asked before each task; `DeviceRefused` says why not and when to ask again.

`refusal` decides, from readings alone. `read` takes them from what Linux shows: sysfs, /proc/meminfo, and
NetworkManager where it runs. What a system does not show is unknown, and what is unknown refuses nothing.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from edge_client.config import ClientConfig, minutes_of
from edge_client.errors import DeviceRefused
from edge_client.transport.tls import is_loopback

RETRY_S = 600.0  # a battery does not change faster
COOL_S = 120.0
MEMORY_S = 120.0
DAY = 24 * 60
PLAUSIBLE = range(-40, 200)  # °C; what a broken sensor says is not
BUSCTL_S = 5.0
METERED = {1: True, 2: False, 3: True, 4: False}  # NMMetered of NetworkManager's D-Bus API; 3 and 4 are its guesses
NETWORK_MANAGER = ("org.freedesktop.NetworkManager", "/org/freedesktop/NetworkManager")


@dataclass(frozen=True, kw_only=True)
class Readings:
    """What the device says of itself; empty or None where it says nothing."""

    draining: tuple[tuple[str, int], ...] = ()  # batteries that are not charged: name, percent
    temperatures: tuple[tuple[str, float], ...] = ()  # sensors: name, °C
    free_mib: int | None = None
    metered: bool | None = None
    minute: int = 0  # of the day, local time


def refusal(found: Readings, config: ClientConfig) -> DeviceRefused | None:
    """Why the device will not train, the longest to wait for first; None when it may."""
    return (
        _quiet(found, config) or _power(found, config) or _link(found, config)
        or _heat(found, config) or _memory(found, config)
    )  # fmt: skip


def may_train(config: ClientConfig) -> None:
    """Raise DeviceRefused when this device may not train now."""
    refused = refusal(read(), config)
    if refused is not None:
        raise refused


def read(root: Path = Path("/")) -> Readings:
    """What the system under `root` shows now."""
    now = time.localtime()
    running = (root / "run" / "NetworkManager").is_dir()
    return Readings(
        draining=_batteries(root / "sys" / "class" / "power_supply"),
        temperatures=_temperatures(root / "sys" / "class" / "thermal"),
        free_mib=_free_mib(root / "proc" / "meminfo"),
        metered=metered(int(time.monotonic() // 60)) if running else None,
        minute=60 * now.tm_hour + now.tm_min,
    )


@functools.lru_cache(maxsize=1)
def metered(_minute: int) -> bool | None:
    """Whether NetworkManager says that the link costs money; None: unknown. Asked once a minute at most."""
    busctl = shutil.which("busctl")
    if busctl is None:
        return None
    name, path = NETWORK_MANAGER
    command = [busctl, "--system", "get-property", name, path, name, "Metered"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=BUSCTL_S, check=False).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return METERED.get(int(said[1])) if len(said) == 2 and said[1].isdecimal() else None  # noqa: PLR2004 - "u 1"


def _quiet(found: Readings, config: ClientConfig) -> DeviceRefused | None:
    if not config.quiet_hours:
        return None
    begin, end = minutes_of(config.quiet_hours)
    inside = begin <= found.minute < end if begin < end else found.minute >= begin or found.minute < end
    if not inside:
        return None
    left_s = 60.0 * ((end - found.minute) % DAY)
    return DeviceRefused(f"quiet hours {config.quiet_hours}", retry_s=left_s, hint="change quiet-hours")


def _power(found: Readings, config: ClientConfig) -> DeviceRefused | None:
    for name, percent in found.draining:
        if percent < config.min_battery_percent:
            return DeviceRefused(
                f"battery {name} is at {percent} %, less than {config.min_battery_percent} %",
                retry_s=RETRY_S,
                hint="connect a charger, or lower min-battery-percent",
            )
    return None


def _link(found: Readings, config: ClientConfig) -> DeviceRefused | None:
    if not found.metered or config.allow_metered or is_loopback(urlsplit(config.broker).hostname or ""):
        return None
    return DeviceRefused("the link is metered", retry_s=RETRY_S, hint="set allow-metered = true to use it")


def _heat(found: Readings, config: ClientConfig) -> DeviceRefused | None:
    if not config.max_temperature or not found.temperatures:
        return None
    name, celsius = max(found.temperatures, key=lambda each: each[1])
    if celsius <= config.max_temperature:
        return None
    return DeviceRefused(
        f"{name} is at {celsius:.0f} °C, more than {config.max_temperature} °C",
        retry_s=COOL_S,
        hint="give it air, or raise max-temperature",
    )


def _memory(found: Readings, config: ClientConfig) -> DeviceRefused | None:
    if found.free_mib is None or found.free_mib >= config.min_free_memory_mib:
        return None
    return DeviceRefused(
        f"{found.free_mib} MiB of memory are free, less than {config.min_free_memory_mib} MiB",
        retry_s=MEMORY_S,
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
    return tuple((name, celsius) for name, celsius in read_ if int(celsius) in PLAUSIBLE)


def _free_mib(meminfo: Path) -> int | None:
    found = re.search(r"^MemAvailable:\s+([0-9]+) kB$", _text(meminfo), flags=re.MULTILINE)
    return int(found[1]) // 1024 if found else None


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
