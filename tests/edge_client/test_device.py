"""May this device train now? Read from a folder that looks like /sys/class/power_supply."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_client.device import may_train
from edge_client.errors import DeviceRefused


def supply(folder: Path, name: str, **files: str) -> None:
    (folder / name).mkdir()
    for file, text in files.items():
        (folder / name / file).write_text(text + "\n")


def test_a_low_battery_that_is_not_charging_refuses_and_says_when_to_ask_again(tmp_path: Path) -> None:
    supply(tmp_path, "BAT0", type="Battery", capacity="12", status="Discharging")
    with pytest.raises(DeviceRefused, match="battery BAT0 is at 12 %") as refused:
        may_train(min_battery_percent=20, supplies=tmp_path)
    assert refused.value.retry_s > 0
    assert "hint" in str(refused.value)


@pytest.mark.parametrize(
    "files",
    [
        {"type": "Battery", "capacity": "12", "status": "Charging"},
        {"type": "Battery", "capacity": "20", "status": "Discharging"},
        {"type": "Mains", "online": "1"},
        {"type": "Battery", "scope": "Device", "capacity": "1", "status": "Discharging"},  # a mouse
        {"type": "Battery", "capacity": "?", "status": "Discharging"},
    ],
)
def test_a_charger_enough_charge_or_no_battery_of_its_own_may_train(tmp_path: Path, files: dict[str, str]) -> None:
    supply(tmp_path, "X", **files)
    may_train(min_battery_percent=20, supplies=tmp_path)


def test_a_system_without_power_supplies_may_train(tmp_path: Path) -> None:
    may_train(min_battery_percent=20, supplies=tmp_path / "absent")


def test_zero_percent_never_looks(tmp_path: Path) -> None:
    supply(tmp_path, "BAT0", type="Battery", capacity="1", status="Discharging")
    may_train(min_battery_percent=0, supplies=tmp_path)
