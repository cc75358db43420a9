"""The list of files: a golden one per profile, secrets that only the owner reads, a unit that no setting changes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.board.board_files import MANIFEST_PATH, SERVICE_LINK, BoardFile, DeviceIdentity, board_files, to_toml
from edge_client.board.profiles import BOARD_PROFILES
from edge_client.board.systemd_unit import CONFIG_PATH, SERVICE_NAME, STATE_FOLDER
from edge_client.config import load_config
from edge_client.errors import ConfigError
from tests.support.requirements import skip_without

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

UNIT = f"/etc/systemd/system/{SERVICE_NAME}"
SETTINGS: dict[str, Any] = {
    "federation": "home",
    "device-id": "porch",
    "broker": "mqtts://broker.example:8883",
    "data": "/srv/samples",
    "state": "state",
    "enrol-url": "https://broker.example:8443",
    "token": "token",
    "signing-keys": ["ab" * 32],
}
CERTIFIED = DeviceIdentity(ca=b"CA", certificate=b"CERTIFICATE", key=b"KEY")
SITE = [BoardFile(path="/opt/fedcenters/site/edge_client/cli.py", data=b"1")]
GOLDEN = Path(__file__).parents[2] / "golden" / "boards.json"


def made(board: str = "raspberry-pi-5", identity: DeviceIdentity = CERTIFIED, **settings: Any) -> dict[str, BoardFile]:  # noqa: ANN401
    about = {**SETTINGS, **{key.replace("_", "-"): value for key, value in settings.items()}}
    return {e.path: e for e in board_files(BOARD_PROFILES[board], about, identity, SITE, launcher=b"launch")}


def test_the_list_of_every_profile_is_the_golden_one() -> None:
    told = {
        board: {e.path: [f"{e.mode:04o}", e.owner, e.link or e.data.decode()] for e in made(board).values()}
        for board in BOARD_PROFILES
    }
    assert told == json.loads(GOLDEN.read_text(encoding="utf-8")), (
        "if it is meant: python -m tests.boards.write_file_lists"
    )


@pytest.mark.parametrize("board", BOARD_PROFILES)
@pytest.mark.parametrize("identity", [CERTIFIED, DeviceIdentity(ca=b"CA", token=b"TOKEN\n")])
def test_no_secret_has_group_or_world_bits_and_nothing_else_holds_it(board: str, identity: DeviceIdentity) -> None:
    secret = identity.key or identity.token or b""
    holders = [e for e in made(board, identity).values() if secret in e.data]
    assert len(holders) == 1
    assert holders[0].mode & 0o077 == 0
    assert holders[0].owner == "fedcenters"


@pytest.mark.parametrize("identity", [CERTIFIED, DeviceIdentity(ca=b"CA", token=b"T"), DeviceIdentity()])
def test_the_configuration_is_one_that_the_client_reads(tmp_path: Path, identity: DeviceIdentity) -> None:
    path = tmp_path / "client.toml"
    path.write_bytes(made(identity=identity)[CONFIG_PATH].data)
    config = load_config(path, {})
    assert (config.device_id, config.engine, config.max_temperature) == ("porch", "onnx", 80)
    assert str(config.state).startswith(STATE_FOLDER)
    assert (config.certificate is None) == (identity == DeviceIdentity())
    assert (config.token is None) == (identity.token is None)


def test_a_token_and_what_it_becomes_lie_where_the_service_may_write() -> None:
    token = made(identity=DeviceIdentity(ca=b"CA", token=b"T"))[f"{STATE_FOLDER}/identity/token"]
    assert token.memory
    assert token.unless == f"{STATE_FOLDER}/identity/token.used"


HOSTILE = st.text(st.sampled_from('a"\\\n\r\t%$[]=#\x7f\x00;\u2028é') | st.characters(exclude_categories=["Cs"]))


@given(value=HOSTILE)
def test_no_value_of_a_configuration_changes_the_unit_or_adds_a_key(value: str) -> None:
    plain, hostile = made(), made(data="/srv/" + value, broker=value, enrol_url=value)
    for path in (UNIT, "/usr/lib/sysusers.d/fedcenters.conf", "/usr/lib/tmpfiles.d/fedcenters.conf", SERVICE_LINK):
        assert hostile[path] == plain[path]
    text = hostile[CONFIG_PATH].data.decode()
    assert len(text.splitlines()) >= len(plain[CONFIG_PATH].data.splitlines())
    table = tomllib.loads(text)
    assert set(table) == set(tomllib.loads(plain[CONFIG_PATH].data.decode()))
    assert (table["data"], table["broker"]) == ("/srv/" + value, value)


def test_data_under_home_can_be_read_and_nothing_else_of_the_unit_changes() -> None:
    plain, home = made()[UNIT].data.decode(), made(data="/home/pi/samples")[UNIT].data.decode()
    assert home == plain.replace("ProtectHome=yes", "ProtectHome=read-only")


@pytest.mark.parametrize("board", BOARD_PROFILES)
def test_systemd_accepts_the_unit(board: str, tmp_path: Path) -> None:
    text = made(board)[UNIT].data.decode().replace("/usr/bin/python3 /opt/fedcenters/launch.py", "/bin/true")
    path = tmp_path / SERVICE_NAME
    path.write_text(text.replace("User=fedcenters\n", ""))  # the user is made at the board's first boot
    try:
        done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        skip_without("systemd-analyze is not installed (apt install systemd)")
    assert SERVICE_NAME not in done.stderr, done.stderr


def test_the_watchdog_the_limits_and_the_restart_are_in_the_unit() -> None:
    text = made()[UNIT].data.decode()
    for line in ("Type=notify", "WatchdogSec=180", "Restart=always", "MemoryMax=75%", "NoNewPrivileges=yes"):
        assert f"\n{line}\n" in text


def test_what_python_compiles_lies_in_memory_where_a_power_cut_leaves_no_half_of_a_file() -> None:
    """Python does not flush such a file, and with one that lost its end it fails at every start."""
    text = made()[UNIT].data.decode()
    place = re.search(r"PYTHONPYCACHEPREFIX=(\S+)", text)
    assert place is not None
    assert place[1].startswith("/run/fedcenters/")
    assert "\nRuntimeDirectory=fedcenters\n" in text
    assert "\nRuntimeDirectoryPreserve=restart\n" in text  # so that only a boot compiles again


def test_the_manifest_lists_all_but_links_and_the_boards_own_memory() -> None:
    found = made(identity=DeviceIdentity(ca=b"CA", token=b"T"))
    listed = {line.partition("  .")[2] for line in found[MANIFEST_PATH].data.decode().splitlines()}
    assert listed == {e.path for e in found.values() if not e.link and not e.memory} - {MANIFEST_PATH}


@pytest.mark.parametrize("path", ["relative", "/a/../b", "/a\nb", "/a//b", "/a\\b", "/" + "a" * 300])
def test_a_path_that_could_lead_elsewhere_is_no_entry(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot be called"):
        BoardFile(path=path)


def test_two_wheels_that_bring_one_file_differently_are_refused() -> None:
    twice = [*SITE, BoardFile(path=SITE[0].path, data=b"2")]
    with pytest.raises(ConfigError, match="two wheels"):
        board_files(BOARD_PROFILES["x86-64"], SETTINGS, CERTIFIED, twice, launcher=b"")


def test_the_same_table_is_the_same_bytes() -> None:
    assert to_toml({"b": 1, "a": [True, "x"]}) == to_toml({"a": [True, "x"], "b": 1}) == b'a = [true, "x"]\nb = 1\n'
