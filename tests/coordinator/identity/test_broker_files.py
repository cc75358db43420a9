"""What `provision` writes for the broker: who may read it, what an operator added, and what is left to do."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

import pytest

from coordinator.identity import provisioning
from coordinator.identity.provision_plan import ProvisionPlan
from coordinator.identity.provisioning import Provisioner
from coordinator.local_broker import MOSQUITTO_CONF
from edge_client.protocol.blocks import HEADER, MAX_BLOCK_BYTES
from edge_client.protocol.topics import MAX_TOPIC_BYTES
from edge_client.transport.blobs import write_atomically
from tests.coordinator.identity.test_provisioning import invoke
from tests.support.guarded_broker import now, provision_federation
from tests.support.size_limit import files_of_at_most

ROOT = Path(__file__).parents[3]


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


def test_a_folder_of_the_brokers_own_is_named_in_what_is_left_to_do(tmp_path: Path) -> None:
    keys, there = tmp_path / "keys", "/etc/mosquitto/fedcenters"
    said = invoke(str(keys), "--federation", "demo", "--host", "h", "--broker-folder", there).stderr
    assert f"copy the files of {keys / 'broker'} to {there} on the broker's machine" in said
    assert f"chown -R mosquitto {there}\n" in said
    assert f"chown -R mosquitto {keys}" not in said


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


def test_a_full_disk_leaves_the_broker_its_configuration(tmp_path: Path) -> None:
    """It had been moved away, and a broker that was started again found none."""
    work = provision_federation(tmp_path / "keys")
    conf = tmp_path / "keys" / "broker" / "mosquitto.conf"
    before = conf.read_bytes() + b"log_dest syslog\n"
    conf.write_bytes(before)
    with files_of_at_most(100), pytest.raises(OSError, match="File too large"):
        work.write_infrastructure()
    assert conf.read_bytes() == before


def test_what_the_brokers_user_links_to_is_neither_written_nor_copied(tmp_path: Path) -> None:
    """Root runs `provision` on a folder that is the broker's."""
    work = provision_federation(tmp_path / "keys")
    conf, other = tmp_path / "keys" / "broker" / "mosquitto.conf", tmp_path / "other"
    old = conf.with_suffix(".conf.old")
    other.write_text("root's")
    conf.write_text("log_dest syslog\n")
    old.symlink_to(other)
    work.write_infrastructure()
    assert (other.read_text(), old.read_text()) == ("root's", "log_dest syslog\n")
    conf.unlink()
    conf.symlink_to(other)
    with old.open() as held:
        work.write_infrastructure()
        assert (other.read_text(), held.read()) == ("root's", "log_dest syslog\n")


@pytest.mark.skipif(os.name != "posix", reason="files have other rights there")
def test_a_link_that_comes_meanwhile_gives_no_rights_to_what_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, other = provision_federation(tmp_path / "keys"), tmp_path / "other"
    other.touch(0o600)
    conf = tmp_path / "keys" / "broker" / "mosquitto.conf"

    def write(path: Path, data: bytes) -> None:
        write_atomically(path, data)
        path.unlink()
        path.symlink_to(other)

    monkeypatch.setattr(provisioning, "write_atomically", write)
    conf.write_text("log_dest syslog\n")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        work.write_infrastructure()
    assert stat.S_IMODE(other.stat().st_mode) == 0o600


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


def test_the_largest_block_fits_whatever_the_brokers_default_is(tmp_path: Path) -> None:
    """Mosquitto's default went from 256 MB to 2,000,000 bytes in 2.1; the files name the number."""
    work = provision_federation(tmp_path / "k")
    for conf in ((work.folder / "broker" / "mosquitto.conf").read_text(), MOSQUITTO_CONF):
        (size,) = re.findall(r"^max_packet_size (\d+)$", conf, flags=re.MULTILINE)
        assert int(size) > MAX_BLOCK_BYTES + HEADER.size + MAX_TOPIC_BYTES
