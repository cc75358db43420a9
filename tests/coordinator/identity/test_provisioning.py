"""What `provision` leaves in its folder, and that doing it again changes nothing."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import tomllib
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from coordinator.cli import app
from coordinator.identity.certificate_authority import open_authority
from coordinator.identity.provision_plan import ProvisionPlan, open_plan
from coordinator.identity.provisioning import Provisioner
from coordinator.identity.signing_key import open_signing_key
from edge_client.config import load_config
from edge_client.errors import ConfigError
from tests.support.guarded_broker import now, provision_federation

SECRETS = ("ca.key", "coordinator.key", "server.key", "device.key", "signing.key", "token")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["provision", *arguments])


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def test_a_fleet_is_one_command_and_repeating_it_changes_nothing(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    asked = ("--federation", "demo", "--host", "broker.example", "--devices", "3", "--device", "pump", "--token", "new")
    first = invoke(str(keys), *asked)
    assert first.exit_code == 0, first.output
    before = snapshot(keys)
    assert {f"devices/{cid}/device.crt" for cid in ("device-0000", "device-0002", "pump")} <= before.keys()
    again, shorter = invoke(str(keys), *asked), invoke(str(keys), "--json")
    assert (again.exit_code, shorter.exit_code) == (0, 0)
    assert json.loads(shorter.stdout)["made"] == 0
    assert snapshot(keys) == before


def test_devices_that_dial_an_address_without_a_certificate_are_named(tmp_path: Path) -> None:
    keys, host = str(tmp_path / "keys"), "192.0.2.2"
    assert "warning" not in invoke(keys, "--federation", "demo", "--host", host, "--devices", "7").stderr
    moved = invoke(keys, "--host", "broker.example", "--device", "device-0000").stderr
    assert "for broker.example, and device-0001, device-0002, device-0003, device-0004, device-0005 and 1 more" in moved
    assert f"dial {host}: they will refuse it. Keep both with --host broker.example --host {host}, or" in moved
    assert "device-0000" not in moved
    assert "warning" not in invoke(keys, "--host", "broker.example", "--host", host).stderr


def test_devices_that_dial_another_port_or_none_are_named(tmp_path: Path) -> None:
    keys = str(tmp_path / "keys")
    invoke(keys, "--federation", "demo", "--host", "broker.example", "--devices", "3")
    moved = invoke(keys, "--port", "18883", "--device", "device-0000").stderr
    assert "warning: the broker's port is 18883, and device-0001, device-0002 dial 8883. Name these" in moved
    assert "refuse" not in moved
    assert "warning" not in invoke(keys, "--device", "device-0001", "--device", "device-0002").stderr
    file = tmp_path / "keys" / "devices" / "device-0001" / "client.toml"
    file.write_text(file.read_text().replace(":18883", ":PORT"))
    found = CliRunner().invoke(app, ["provision", keys])
    assert (found.exit_code, f"{file}: broker is 'mqtts://broker.example:PORT'" in found.stderr) == (3, True)


def test_every_secret_is_for_its_owner_alone_and_is_never_printed(tmp_path: Path) -> None:
    old = os.umask(0)  # the widest
    try:
        said = invoke(str(tmp_path / "k"), "--federation", "demo", "--host", "h", "--devices", "1", "--token", "new")
    finally:
        os.umask(old)
    files = [path for path in (tmp_path / "k").rglob("*") if path.name in SECRETS]
    assert {path.name for path in files} == set(SECRETS)
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        inside = [line for line in path.read_text().splitlines() if "-----" not in line]
        assert not any(line in said.output for line in inside)
    assert stat.S_IMODE((tmp_path / "k" / "authority").stat().st_mode) == 0o700


def test_a_join_file_is_what_a_device_starts_from(tmp_path: Path) -> None:
    work = provision_federation(tmp_path / "keys", "d1")
    config = load_config(work.folder / "devices" / "d1" / "client.toml", {})
    assert (config.federation, config.device_id, config.broker) == ("demo", "d1", "mqtts://localhost:8883")
    assert config.signing_keys == (open_signing_key(work.folder / "coordinator").public,)
    assert config.ca == work.folder / "devices" / "d1" / "ca.crt"


def test_what_somebody_added_to_a_join_file_stays(tmp_path: Path) -> None:
    work = provision_federation(tmp_path / "keys", "d1")
    file = work.folder / "devices" / "d1" / "client.toml"
    file.write_text(file.read_text() + 'engine = "litert"\n')
    work.add_device("d1")
    assert load_config(file, {}).engine == "litert"


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("federation.toml", "is no TOML file"),
        ("authority/ca.key", "holds no private key"),
        ("authority/ca.crt", "holds no certificate"),
        ("authority/crl.pem", "is no revocation list"),
        ("coordinator/signing.key", "holds no hex key"),
        ("devices/d1/client.toml", "is no TOML file"),
        ("devices/d1/device.key", "holds no private key"),
    ],
)
def test_a_damaged_file_is_named_and_never_replaced(tmp_path: Path, file: str, said: str) -> None:
    work = provision_federation(tmp_path / "keys", "d1")
    (work.folder / file).write_text("= damaged")
    result = invoke(str(work.folder), "--device", "d1")
    assert result.exit_code == ConfigError.exit_code
    assert said in result.stderr
    assert (work.folder / file).read_text() == "= damaged"


def test_a_device_pins_both_signing_keys_before_the_new_one_is_used(tmp_path: Path) -> None:
    work = provision_federation(tmp_path / "keys", "d1")
    coordinator, join = work.folder / "coordinator", work.folder / "devices" / "d1" / "client.toml"
    old = open_signing_key(coordinator)
    early = invoke(str(work.folder), "--switch-signing-key")
    assert early.exit_code == ConfigError.exit_code
    assert invoke(str(work.folder), "--next-signing-key").exit_code == 0
    both = load_config(join, {}).signing_keys
    assert both[0] == old.public == open_signing_key(coordinator).public
    assert len(both) == 2
    assert invoke(str(work.folder), "--switch-signing-key").exit_code == 0
    assert load_config(join, {}).signing_keys == (both[1],) == (open_signing_key(coordinator).public,)


def test_one_folder_serves_one_federation(tmp_path: Path) -> None:
    work = provision_federation(tmp_path / "keys")
    with pytest.raises(ConfigError, match="belongs to demo"):
        open_plan(work.folder, {"federation": "other"})
    with pytest.raises(ConfigError, match="not the authority of other"):
        open_authority(work.folder / "authority", "other", now())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--federation NAME is not given"),
        (("--federation", "demo"), "--host NAME is not given"),
        (("--federation", "Demo!", "--host", "h"), "federation"),
        (("--federation", "demo", "--host", "a b"), "hosts are"),
        (("--federation", "demo", "--host", "h", "--host", "a b"), "hosts are"),
        (("--federation", "demo", "--host", "h", "--device", "a/b"), "device id"),
        (("--federation", "demo", "--host", "h", "--device", "coordinator.0"), "device id"),
        (("--federation", "demo", "--host", "h", "--token", "../x"), "device id"),
        (("--check",), "is not provisioned"),
        (("--federation", "demo", "--host", "h", "--list", "absent.txt"), "cannot read"),
    ],
)
def test_what_cannot_be_provisioned_is_named(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    result = invoke(str(tmp_path / "keys"), *arguments)
    assert result.exit_code == ConfigError.exit_code
    assert said in result.stderr
    assert "hint:" in result.stderr


def test_a_list_names_the_devices(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("\ufeff# the pumps\npump-1\n\n pump-2 \n  # the rest\n", encoding="utf-8")
    result = invoke(str(tmp_path / "k"), "--federation", "demo", "--host", "h", "--list", str(tmp_path / "names.txt"))
    assert result.exit_code == 0
    assert sorted(path.name for path in (tmp_path / "k" / "devices").iterdir()) == ["pump-1", "pump-2"]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Provisioner:
    plan = ProvisionPlan(federation="demo", hosts=("h",))
    return Provisioner(folder=tmp_path_factory.mktemp("bare") / "keys", plan=plan, now=now())


@given(st.text(max_size=80) | st.from_regex(r"[a-zA-Z0-9_./*\\-]{0,70}"))
def test_no_name_leaves_the_folder_of_devices(bare: Provisioner, name: str) -> None:
    try:
        place = bare._device_folder(name)
    except ConfigError:
        return
    assert place.resolve().parent == (bare.folder / "devices").resolve()
    assert place.name == name


def test_the_plan_is_kept_as_toml(tmp_path: Path) -> None:
    work = provision_federation(tmp_path / "keys")
    kept = tomllib.loads((work.folder / "federation.toml").read_text())
    assert kept == {"federation": "demo", "hosts": ["localhost", "127.0.0.1"], "port": 8883, "enrol-port": 8443}
    assert open_plan(work.folder, {}) == work.plan
