"""May this device train now? Read from a folder that looks like a system's root; decided from readings alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.config import ClientConfig, parse_hours
from edge_client.errors import DeviceRefused
from edge_client.runtime import train_conditions
from edge_client.runtime.train_conditions import DeviceStatus, read_device_status, training_refusal

CONFIG = ClientConfig(
    federation="f", device_id="d", broker="mqtt://x", data=Path("x"), state=Path("x"), signing_keys=(b"k" * 32,)
)


def supply(root: Path, name: str, **files: str) -> None:
    folder = root / "sys" / "class" / "power_supply" / name
    folder.mkdir(parents=True)
    for file, text in files.items():
        (folder / file).write_text(text + "\n")


def zone(root: Path, number: int, kind: str, temp: str) -> None:
    folder = root / "sys" / "class" / "thermal" / f"thermal_zone{number}"
    folder.mkdir(parents=True)
    (folder / "type").write_text(kind + "\n")
    (folder / "temp").write_text(temp + "\n")


def refused(status: DeviceStatus, **settings: Any) -> DeviceRefused | None:  # noqa: ANN401
    return training_refusal(status, replace(CONFIG, **settings))


def test_a_low_battery_that_is_not_charging_refuses_and_says_when_to_ask_again(tmp_path: Path) -> None:
    supply(tmp_path, "BAT0", type="Battery", capacity="12", status="Discharging")
    why = refused(read_device_status(tmp_path))
    assert why is not None
    assert "battery BAT0 is at 12 %" in str(why)
    assert why.retry_s > 0
    assert "hint" in str(why)


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
    assert refused(read_device_status(tmp_path)) is None


def test_a_system_that_shows_nothing_may_train(tmp_path: Path) -> None:
    found = read_device_status(tmp_path / "absent")
    assert replace(found, minute=0) == DeviceStatus()
    assert refused(found) is None


def test_the_hottest_sensor_decides_and_broken_ones_are_passed_over(tmp_path: Path) -> None:
    zone(tmp_path, 0, "cpu-thermal", "81500")
    zone(tmp_path, 1, "gpu-thermal", "42000")
    zone(tmp_path, 2, "off", "-274000")
    zone(tmp_path, 3, "worse", "none")
    found = read_device_status(tmp_path)
    assert found.temperatures == (("cpu-thermal", 81.5), ("gpu-thermal", 42.0))
    why = refused(found, max_temperature=80)
    assert why is not None
    assert why.reason == "cpu-thermal is at 82 °C, more than 80 °C"
    assert refused(found, max_temperature=82) is None
    assert refused(found, max_temperature=0) is None


def test_too_little_available_memory_refuses(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:  900000 kB\nMemAvailable:   40960 kB\n")
    found = read_device_status(tmp_path)
    why = refused(found, min_free_memory_mib=64)
    assert why is not None
    assert why.reason == "40 MiB of memory are free, less than 64 MiB"
    assert refused(found, min_free_memory_mib=40) is None


def test_a_container_that_may_use_less_than_the_machine_has_counts_what_it_may_use(tmp_path: Path) -> None:
    """Its own group here has no limit, and the one above it has: what a process sees in a container of systemd's."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable:   8192000 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/box/inner\n")
    group = tmp_path / "sys" / "fs" / "cgroup" / "box"
    (group / "inner").mkdir(parents=True)
    for folder, limit in ((group, f"{256 << 20}\n"), (group / "inner", "max\n")):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(f"{240 << 20}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {24 << 20}\n")
    assert read_device_status(tmp_path).free_mib == 40
    (group / "memory.max").write_text("max\n")
    assert read_device_status(tmp_path).free_mib == 8_000


def test_a_metered_link_waits_unless_it_is_allowed_and_an_unknown_one_is_used() -> None:
    assert refused(DeviceStatus(metered=True)) is not None
    assert refused(DeviceStatus(metered=True), allow_metered=True) is None
    assert refused(DeviceStatus(metered=False)) is None
    assert refused(DeviceStatus(metered=None)) is None
    assert refused(DeviceStatus(metered=True), broker="mqtt://127.0.0.1:1883") is None


@pytest.mark.parametrize(
    ("says", "expected"), [("u 1", True), ("u 2", False), ("u 3", True), ("u 0", None), ("", None)]
)
def test_networkmanager_is_asked_whether_the_link_is_metered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, says: str, expected: bool | None
) -> None:
    (tmp_path / "busctl").write_text(f"#!/bin/sh\necho '{says}'\n")
    (tmp_path / "busctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "run" / "NetworkManager").mkdir(parents=True)
    train_conditions.is_metered.cache_clear()
    assert read_device_status(tmp_path).metered is expected
    train_conditions.is_metered.cache_clear()


@given(minute=st.integers(0, 1439), begin=st.integers(0, 1439), length=st.integers(1, 1439))
def test_quiet_hours_refuse_inside_and_say_when_they_end(minute: int, begin: int, length: int) -> None:
    end = (begin + length) % 1440
    hours = f"{begin // 60:02}:{begin % 60:02}-{end // 60:02}:{end % 60:02}"
    why = refused(DeviceStatus(minute=minute), quiet_hours=hours)
    inside = (minute - begin) % 1440 < length
    assert (why is not None) == inside
    if why is not None:
        after = DeviceStatus(minute=(minute + round(why.retry_s / 60)) % 1440)
        assert refused(after, quiet_hours=hours) is None


@pytest.mark.parametrize("hours", ["22-6", "25:00-06:00", "22:00-22:00", "22:00", "22:60-06:00"])
def test_hours_that_are_none_are_refused(hours: str) -> None:
    with pytest.raises(ValueError, match=r"expected|begin"):
        parse_hours(hours)


def test_a_phone_asks_android_for_its_battery_and_its_wifi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "termux-battery-status": {
            "plugged": "UNPLUGGED",
            "percentage": 15,
            "temperature": 31.5,
            "status": "DISCHARGING",
        },
        "termux-wifi-connectioninfo": {"supplicant_state": "DISCONNECTED", "ip": "0.0.0.0"},  # noqa: S104 - no address
    }
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(answer)}\nEND\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    train_conditions.ask_termux.cache_clear()
    status = read_device_status(tmp_path)
    train_conditions.ask_termux.cache_clear()
    assert (status.draining, status.temperatures, status.metered) == ((("phone", 15),), (("battery", 31.5),), True)
    assert "battery phone is at 15 %" in str(refused(status))
    assert "metered" in str(refused(replace(status, draining=())))


@pytest.mark.parametrize(
    ("battery", "wifi", "metered"),
    [
        ("", "", None),
        ("not JSON", "[]", None),
        (
            '{"plugged": "PLUGGED_USB", "percentage": 3, "temperature": 9999}',
            '{"supplicant_state": "COMPLETED"}',
            False,
        ),
        ('{"plugged": "UNPLUGGED", "percentage": "12"}', '{"supplicant_state": null}', None),
    ],
)
def test_a_phone_on_its_charger_trains_and_what_android_does_not_say_is_unknown(
    battery: str, wifi: str, *, metered: bool | None
) -> None:
    status = train_conditions.termux_status(battery, wifi)
    assert (status.draining, status.temperatures, status.metered) == ((), (), metered)
