"""What `provision` leaves in its folder, and that doing it again changes nothing."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import stat
from pathlib import Path

import pytest
import tomllib
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from coordinator.cli import app
from coordinator.identity.broker_acl import COORDINATOR_CLIENT_ID
from coordinator.identity.certificate_authority import CERTIFICATE_DAYS, open_authority
from coordinator.identity.cli import _in_words
from coordinator.identity.provision_plan import ProvisionPlan, open_plan
from coordinator.identity.provisioning import Provisioner
from coordinator.identity.signing_key import open_signing_key
from coordinator.local_broker import MOSQUITTO_CONF
from edge_client.config import load_config
from edge_client.errors import ConfigError
from edge_client.protocol.blocks import HEADER, MAX_BLOCK_BYTES
from edge_client.protocol.topics import MAX_TOPIC_BYTES
from edge_client.transport.tls import read_certificate
from tests.support.guarded_broker import now, provision_federation

ROOT = Path(__file__).parents[3]
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


@pytest.mark.parametrize("user", [0, 1000])
def test_root_is_told_how_mosquitto_can_read_its_files(
    user: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    keys = tmp_path / "closed" / "k"  # for its owner alone, so mosquitto must get through it too
    keys.parent.mkdir(mode=0o700)
    made, again = (invoke(str(keys), "--federation", "demo", "--host", "h") for _ in range(2))
    command = f"chown -R mosquitto {keys / 'broker'} && chgrp mosquitto {keys} && chmod g+x {keys}"
    assert (command in made.stderr, command in again.stderr) == (user == 0, False)
    for page in ("README.md", "docs/security.md"):
        assert command.replace(str(keys), "keys") in (ROOT / page).read_text(encoding="utf-8")
    assert (f"{keys.parent} is closed to that user, too" in made.stderr) == (user == 0)


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


def test_a_certificate_that_has_ended_is_not_told_to_end_in_less_than_no_days() -> None:
    found = {"folder": "keys", "federation": "demo", "broker": "", "names": [], "made": 0, "revoked": [], "phones": []}
    ended = [{"name": "pi-1", "days": -366}, {"name": "pi-2", "days": 14}]
    told = _in_words({**found, "expiring": ended, "tokens": [], "tokens_expired": [], "tokens_tried_twice": []})
    assert told.splitlines()[1:] == ["pi-1 expired 366 days ago", "pi-2 expires in 14 days"]


def test_a_folder_of_the_brokers_own_is_named_in_what_is_left_to_do(tmp_path: Path) -> None:
    keys, there = tmp_path / "keys", "/etc/mosquitto/fedcenters"
    said = invoke(str(keys), "--federation", "demo", "--host", "h", "--broker-folder", there).stderr
    assert f"copy the files of {keys / 'broker'} to {there} on the broker's machine" in said
    assert f"chown -R mosquitto {there}\n" in said
    assert f"chown -R mosquitto {keys}" not in said


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


def test_mosquittos_access_list_is_for_its_owner_alone_also_where_it_was_not(tmp_path: Path) -> None:
    acl = provision_federation(tmp_path / "keys", "d1").folder / "broker" / "mosquitto.acl"
    assert stat.S_IMODE(acl.stat().st_mode) == 0o600
    acl.chmod(0o644)  # as earlier versions wrote it
    provision_federation(tmp_path / "keys", "d1")
    assert stat.S_IMODE(acl.stat().st_mode) == 0o600


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give a file to another user")
def test_what_root_writes_again_stays_the_brokers(tmp_path: Path) -> None:
    """Also a new certificate, in whose place none is. A mosquitto that cannot read crl.pem goes on without one."""
    work = provision_federation(tmp_path / "keys", "d1")
    broker, user = work.folder / "broker", 54_321
    for path in (broker, *broker.iterdir()):
        os.chown(path, user, user)
    work.revoke("d1")
    work.renew("server.broker")
    assert "user d1" in (broker / "mosquitto.acl").read_text()
    assert {path.name: (path.stat().st_uid, path.stat().st_gid) for path in broker.iterdir()} == dict.fromkeys(
        (path.name for path in broker.iterdir()), (user, user)
    )


@pytest.mark.skipif(os.name != "posix", reason="files have other rights there")
def test_what_is_no_secret_can_be_read_by_the_brokers_user_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        work = provision_federation(tmp_path / "keys", "d1")
        work.revoke("d1")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (work.folder / "broker").iterdir()}
    assert {name for name, mode in modes.items() if mode == 0o600} == {"server.key", "mosquitto.acl"}
    assert set(modes.values()) == {0o600, 0o644}


def test_lines_that_were_added_to_the_brokers_configuration_are_kept_beside_it_and_that_is_told(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    made = invoke(str(keys), "--federation", "demo", "--host", "h", "--device", "d1")
    conf = keys / "broker" / "mosquitto.conf"
    written = conf.read_text()
    conf.write_text(f"{written}log_dest syslog\n")
    revoked = invoke(str(keys), "--revoke", "d1")
    assert (conf.read_text(), conf.with_suffix(".conf.old").read_text()) == (written, f"{written}log_dest syslog\n")
    assert "the one before is" not in made.stderr
    assert f"{conf} is another one now; the one before is {conf}.old" in revoked.stderr


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give a file to another user")
def test_root_is_told_of_mosquittos_user_until_every_file_of_the_broker_is_that_users(tmp_path: Path) -> None:
    keys, user = tmp_path / "keys", 54_321
    invoke(str(keys), "--federation", "demo", "--host", "h", "--device", "d1")
    broker = keys / "broker"
    for path in (broker, *broker.iterdir()):
        os.chown(path, user, user)
    assert "chown" not in invoke(str(keys), "--device", "d2").stderr
    os.chown(next(broker.glob("*.key")), 0, 0)
    assert "chown" in invoke(str(keys), "--device", "d3").stderr


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


def test_a_certificate_says_who_and_for_which_federation_and_no_more(tmp_path: Path) -> None:
    work = provision_federation(tmp_path / "keys", "d1")
    device = read_certificate(work.folder / "devices" / "d1" / "device.crt")
    server = read_certificate(work.folder / "broker" / "server.crt")
    assert device.subject.rfc4514_string() == "CN=d1,O=demo"
    assert purposes(device) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert purposes(server) == [ExtendedKeyUsageOID.SERVER_AUTH]
    for leaf in (device, server):
        assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert leaf.not_valid_after_utc - work.now == pytest.approx(
            dt.timedelta(days=CERTIFICATE_DAYS), abs=dt.timedelta(seconds=1)
        )
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == ["localhost", "127.0.0.1"]


def test_the_authority_signs_devices_and_no_other_authority(tmp_path: Path) -> None:
    signs = open_authority(tmp_path, "demo", now()).certificate.extensions
    found = signs.get_extension_for_class(x509.BasicConstraints)
    assert (found.critical, found.value.ca, found.value.path_length) == (True, True, 0)


def purposes(certificate: x509.Certificate) -> list[x509.ObjectIdentifier]:
    return list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def test_a_certificate_never_outlives_its_authority(tmp_path: Path) -> None:
    late = now() + dt.timedelta(days=3600)
    authority = open_authority(tmp_path, "demo", now())
    made = authority.issue_client(authority.key.public_key(), "d1", late)
    assert made.not_valid_after_utc == authority.certificate.not_valid_after_utc


def test_a_broker_that_is_dialled_by_another_name_gets_another_certificate(tmp_path: Path) -> None:
    work = provision_federation(tmp_path / "keys", "d1")
    device = (work.folder / "devices" / "d1" / "device.crt").read_bytes()
    moved = Provisioner(folder=work.folder, plan=ProvisionPlan(federation="demo", hosts=("new.example",)), now=now())
    moved.write_infrastructure()
    moved.add_device("d1")
    assert load_config(work.folder / "devices" / "d1" / "client.toml", {}).broker == "mqtts://new.example:8883"
    assert (work.folder / "devices" / "d1" / "device.crt").read_bytes() == device
    names = read_certificate(work.folder / "broker" / "server.crt").extensions
    assert [str(n.value) for n in names.get_extension_for_class(x509.SubjectAlternativeName).value] == ["new.example"]


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


@pytest.mark.parametrize("host", ["0:0:0:0:0:0:0:1", "::1", "127.0.0.1", "Broker.Example"])
def test_the_same_host_gets_no_second_certificate(tmp_path: Path, host: str) -> None:
    asked = (str(tmp_path / "k"), "--federation", "demo", "--host", host)
    assert invoke(*asked).exit_code == 0
    before = snapshot(tmp_path / "k")
    assert invoke(*asked).exit_code == 0
    assert snapshot(tmp_path / "k") == before


def test_whoever_ends_soon_is_told_and_renewed(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    plan = ProvisionPlan(federation="demo", hosts=("h",))
    old = Provisioner(folder=keys, plan=plan, now=now() - dt.timedelta(days=340))
    old.write_infrastructure()
    old.add_device("d1")
    failed = invoke(str(keys), "--check", "--json")
    assert failed.exit_code == ConfigError.exit_code
    ending = {each["name"] for each in json.loads(failed.stdout)["expiring"]}
    assert ending == {"d1", COORDINATOR_CLIENT_ID, "server.broker", "server.enrol"}
    assert "--renew expiring" in failed.stderr
    assert invoke(str(keys), "--renew", "expiring").exit_code == 0
    assert json.loads(invoke(str(keys), "--check", "--json").stdout)["expiring"] == []


def test_what_ends_soon_is_renewed_but_for_the_authority_and_revoked_devices(tmp_path: Path) -> None:
    work = provision_federation(tmp_path / "keys", "d1", "d2")
    work.revoke("d2")
    assert [work.has_key_of(name) for name in ("d1", "d2", "authority")] == [True, False, False]


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


def test_the_configuration_of_the_broker_says_where_its_files_will_be(tmp_path: Path) -> None:
    plan = ProvisionPlan(federation="demo", hosts=("h",), broker_folder="/etc/mosquitto/fedcenters", port=9000)
    work = Provisioner(folder=tmp_path, plan=plan, now=now())
    work.write_infrastructure()
    lines = (tmp_path / "broker" / "mosquitto.conf").read_text().splitlines()
    told = dict(line.split(maxsplit=1) for line in lines if not line.startswith("#"))
    assert told["listener"] == "9000"
    assert told["crlfile"] == "/etc/mosquitto/fedcenters/crl.pem"
    assert {key: told[key] for key in ("require_certificate", "use_identity_as_username", "allow_anonymous")} == {
        "require_certificate": "true",
        "use_identity_as_username": "true",
        "allow_anonymous": "false",
    }
    assert int(told["max_queued_messages"]) > 0


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


def test_the_largest_block_fits_whatever_the_brokers_default_is(tmp_path: Path) -> None:
    """Mosquitto's default went from 256 MB to 2,000,000 bytes in 2.1; the files name the number."""
    work = provision_federation(tmp_path / "k")
    for conf in ((work.folder / "broker" / "mosquitto.conf").read_text(), MOSQUITTO_CONF):
        (size,) = re.findall(r"^max_packet_size (\d+)$", conf, flags=re.MULTILINE)
        assert int(size) > MAX_BLOCK_BYTES + HEADER.size + MAX_TOPIC_BYTES
