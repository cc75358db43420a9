"""The link of the phone's page as a scanner meets it: dark on light, with its quiet zone, and as text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import segno

from coordinator.identity.join_links import LINK_TITLE, phone_link, qr_svg, qr_terminal
from coordinator.identity.web_passwords import WebDevices

URL = "https://192.168.1.20:8443/phone/"


def test_the_svg_takes_the_size_of_its_place_and_has_a_quiet_zone_of_four_modules() -> None:
    drawn, modules = qr_svg(URL), segno.make(URL, error="m", micro=False).symbol_size(border=0)[0]
    head = re.match(r"<svg [^>]*>", drawn)
    assert head
    assert not re.search(r"\b(width|height)=", head[0])
    width, height, scale = map(float, re.findall(r'viewBox="0 0 (\S+) (\S+)".*scale\((\S+)\)', drawn)[0])
    assert width == height == scale * (modules + 2 * 4)
    ground, dark = (
        drawn.index('fill="#fff"'),
        drawn.index('stroke="#000" d="M4 4.5h7'),
    )  # a finder's edge: seven modules
    assert ground < dark
    assert f"<title>{LINK_TITLE}</title>" in drawn


def test_the_code_of_a_terminal_is_a_full_one_in_half_blocks() -> None:
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in qr_terminal("abc").splitlines()]
    side = segno.make("abc", error="m", micro=False).symbol_size(border=4)[0]
    assert side == 21 + 8  # no Micro QR code, which many cameras do not read
    assert {len(line) for line in lines if line} == {side}
    assert len([line for line in lines if line]) == -(-side // 2)


def test_a_link_names_the_page_and_a_device_with_its_secret_after_the_hash() -> None:
    assert phone_link("https://host/") == "https://host/phone/"
    named = phone_link("https://host", device="d 1", secret="a&b")  # noqa: S106 - made up
    assert named == "https://host/phone/#id=d%201&secret=a%26b"


def test_a_line_of_another_hand_in_the_password_file_is_replaced_and_a_right_one_stays(tmp_path: Path) -> None:
    phones = WebDevices(tmp_path)
    for folder in ("authority", "broker", "devices/phone-1"):
        (tmp_path / folder).mkdir(parents=True)
    phones.add("phone-1", tmp_path / "devices" / "phone-1", "https://host")
    phones.write_passwords()
    path = tmp_path / "broker" / "mosquitto.passwd"
    before = path.read_text()
    path.write_text(f"guest:with:colons\nno colon\n{before}")
    phones.write_passwords()
    assert path.read_text() == before


def test_a_link_whose_picture_could_not_be_written_is_made_again_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "devices" / "phone-1"
    (folder / "link.svg").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        WebDevices(tmp_path).add("phone-1", folder, "https://host")
    (folder / "link.svg").rmdir()
    assert {path.name for path in WebDevices(tmp_path).add("phone-1", folder, "https://host")} == {
        "link.txt",
        "link.svg",
    }
    assert (folder / "link.svg").is_file()


def test_a_phone_may_be_revoked_twice_as_after_a_command_that_was_killed(tmp_path: Path) -> None:
    phones = WebDevices(tmp_path)
    (tmp_path / "authority").mkdir()
    phones.add("phone-1", tmp_path / "devices" / "phone-1", "https://host")
    link = (tmp_path / "devices" / "phone-1" / "link.txt").read_bytes()
    assert phones.revoke("phone-1")
    (tmp_path / "devices" / "phone-1" / "link.txt").write_bytes(link)
    assert phones.revoke("phone-1")
    assert (phones.revoked(), phones.names()) == (["phone-1"], [])
    assert not (tmp_path / "devices" / "phone-1" / "link.txt").exists()
    assert not phones.revoke("phone-2")
