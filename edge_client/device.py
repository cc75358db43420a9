"""May this device train now? Asked before each task; `DeviceRefused` says why not and when to ask again.

Reads the battery where the system shows one. A device without a battery, or on a charger, always may.
"""

from __future__ import annotations

from pathlib import Path

from edge_client.errors import DeviceRefused

POWER_SUPPLIES = Path("/sys/class/power_supply")
RETRY_S = 600.0  # a battery does not change faster


def may_train(*, min_battery_percent: int, supplies: Path = POWER_SUPPLIES) -> None:
    """Raise DeviceRefused when a battery that is not charging holds less than `min_battery_percent`; 0 never asks."""
    if min_battery_percent <= 0 or not supplies.is_dir():
        return
    for supply in sorted(supplies.iterdir()):
        if _read(supply / "type") != "Battery" or _read(supply / "scope") == "Device":  # a mouse has one, too
            continue
        level, status = _read(supply / "capacity"), _read(supply / "status")
        if status == "Discharging" and level.isdecimal() and int(level) < min_battery_percent:
            raise DeviceRefused(
                f"battery {supply.name} is at {level} %, less than {min_battery_percent} %",
                retry_s=RETRY_S,
                hint="connect a charger, or lower min-battery-percent",
            )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
