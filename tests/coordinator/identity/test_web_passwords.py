"""The password of a phone: its hash is Mosquitto's, and a damaged line is no password."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from coordinator.identity.web_passwords import WebDevices, hash_password, verify_password

SALT = bytes(range(12))
STORED = hash_password("secret", SALT)


def test_a_hash_names_its_kind_its_iterations_and_its_salt() -> None:
    digest = base64.b64encode(hashlib.pbkdf2_hmac("sha512", b"secret", SALT, 101, dklen=64)).decode()
    assert f"$7$101$AAECAwQFBgcICQoL${digest}" == STORED
    assert verify_password(STORED, "secret")
    assert verify_password(hash_password("secret", SALT, 7), "secret")


@pytest.mark.parametrize(
    "stored",
    ["", "secret", STORED[:-1], STORED + "$", STORED.replace("$7$", "$6$"), STORED.replace("$101$", "$102$"),
     STORED.replace("$101$", "$x$"), STORED.replace("$101$", "$0$"), STORED.replace("AAEC", "AA$C")],
)  # fmt: skip
def test_a_damaged_hash_belongs_to_no_password(stored: str) -> None:
    assert not verify_password(stored, "secret")
    assert not verify_password(STORED, "another")


def test_a_phone_has_a_link_until_it_is_revoked_and_a_line_that_stays_the_same(tmp_path: Path) -> None:
    devices = WebDevices(tmp_path)
    for place in ("authority", "broker", "devices/p1", "devices/p2"):
        (tmp_path / place).mkdir(parents=True)
    for cid in ("p2", "p1"):
        assert len(devices.add(cid, tmp_path / "devices" / cid, "https://page.example")) == 2
    assert devices.add("p1", tmp_path / "devices" / "p1", "https://page.example") == []
    file = tmp_path / "broker" / "mosquitto.passwd"
    assert devices.write_passwords() == [file]
    before = file.read_text().splitlines()
    assert [line.split(":")[0] for line in before] == ["p1", "p2"]
    assert len(base64.b64decode(before[0].split("$")[3])) == 12
    assert devices.write_passwords() == []
    assert [devices.revoke("p1"), devices.revoke("p1"), devices.revoke("p9")] == [True, True, False]
    assert (devices.names(), devices.revoked()) == (["p2"], ["p1"])
    assert not (tmp_path / "devices" / "p1" / "link.txt").exists()
    assert devices.write_passwords() == [file]
    assert file.read_text().splitlines() == before[1:]
