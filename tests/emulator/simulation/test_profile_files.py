from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from edge_client.errors import ConfigError
from emulator.simulation import profile_files
from emulator.simulation.device_profiles import CYCLE_S, DEVICE_PROFILES, DeviceProfile

BOARD: dict[str, Any] = {
    "name": "board",
    "step-ms": 20,
    "evaluate-ms": 8.0,
    "down-mbit": 16,
    "up-mbit": 8,
    "latency-ms": 50,
}


def test_a_file_in_the_units_of_a_data_sheet_gives_the_built_in_board(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(tomli_w.dumps({"profiles": [BOARD]}))
    assert profile_files.read_profiles(path) == (DEVICE_PROFILES[0],)


def test_the_example_in_the_modules_own_words_is_read(tmp_path: Path) -> None:
    text, path = str(profile_files.__doc__), tmp_path / "fleet.toml"
    path.write_text(text[text.index("    [[profiles]]") : text.index("Reads and checks")])
    (phone,) = profile_files.read_profiles(path)
    assert (phone.name, phone.share, phone.availability, phone.cycle_s, phone.dropout) == ("phone", 2, 0.6, 3600, 0.05)
    assert (phone.down_bytes_s, phone.latency_s) == (5e6, 0.08)


def test_who_is_not_said_to_be_away_is_always_there() -> None:
    (board,) = profile_files.profiles_from_table({"profiles": [BOARD]})
    assert isinstance(board, DeviceProfile)
    assert (board.availability, board.dropout, board.cycle_s, board.share) == (1.0, 0.0, CYCLE_S, 1.0)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, "at least one [[profiles]] table"),
        ({"profiles": {}}, "at least one [[profiles]] table"),
        ({"profiles": [1]}, "at least one [[profiles]] table"),
        ({"profile": [BOARD]}, "unknown key profile\n\nhint: did you mean profiles?"),
        ({"profiles": [BOARD, BOARD]}, "its own name"),
        ({"profiles": [{**BOARD, "name": ""}]}, "profiles[0].name is ''"),
        ({"profiles": [BOARD | {"name": "b"}, {**BOARD, "available": 1}]}, "did you mean profiles[1].availability?"),
        ({"profiles": [{k: v for k, v in BOARD.items() if k != "up-mbit"}]}, "profiles[0].up-mbit is missing"),
        ({"profiles": [{**BOARD, "availability": 1.5}]}, "availability is 1.5\n\nhint: use a number from 0 to 1"),
        ({"profiles": [{**BOARD, "dropout": True}]}, "profiles[0].dropout is True"),
        ({"profiles": [{**BOARD, "up-mbit": 0}]}, "up-mbit is 0\n\nhint: use a number above 0"),
        ({"profiles": [{**BOARD, "step-ms": "fast"}]}, "step-ms is 'fast'"),
        ({"profiles": [{**BOARD, "latency-ms": float("nan")}]}, "latency-ms is nan"),
        ({"profiles": [{**BOARD, "share": -1}]}, "share is -1"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        profile_files.profiles_from_table(tables)
    assert message in str(refused.value)


def test_a_file_that_is_not_there_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        profile_files.read_profiles(tmp_path / "none.toml")
    (tmp_path / "x.toml").write_text("[[profiles]")
    with pytest.raises(ConfigError, match="no TOML file"):
        profile_files.read_profiles(tmp_path / "x.toml")
