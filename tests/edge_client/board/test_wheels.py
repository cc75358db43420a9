"""Wheels: what is asked of pip, how one is unpacked, and that the client's own list is pyproject's."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from edge_client.board import wheels
from edge_client.board.flash import LIGHT_ENGINES, PACKAGE
from edge_client.board.profiles import BOARD_PROFILES
from edge_client.board.wheels import (
    BASE_REQUIREMENTS,
    BASE_REQUIREMENTS_3_10,
    ENGINE_REQUIREMENTS,
    IMAGE_REQUIREMENTS,
    WheelSpec,
)
from edge_client.errors import ConfigError
from tests.support.flash_workstation import wheel

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
PI = BOARD_PROFILES["raspberry-pi-5"]
CLIENT_MAX_BYTES = 750_000


def test_the_requirements_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    plain = {need.partition(";")[0] for need in project["dependencies"]}
    extras = {
        name: [need.partition(";")[0] for need in needs] for name, needs in project["optional-dependencies"].items()
    }
    assert plain == {*BASE_REQUIREMENTS, "tomli>=2"}
    assert "tomli>=2" in BASE_REQUIREMENTS_3_10
    assert (list(ENGINE_REQUIREMENTS["onnx"]), list(ENGINE_REQUIREMENTS["litert"])) == (
        extras["onnx"],
        extras["litert"],
    )
    assert list(IMAGE_REQUIREMENTS) == extras["images"]


def test_a_wheel_of_ones_own_takes_the_place_of_the_index_one() -> None:
    own = Path("onnxruntime_gpu-1.23.0-cp310-cp310-linux_aarch64.whl")
    spec = WheelSpec(profile=BOARD_PROFILES["jetson-orin"], python="3.10", engines=("onnx",), wheels=(own,))
    assert not [need for need in spec.requirements() if need.startswith("onnxruntime")]
    assert "tomli>=2" in spec.requirements()


@pytest.mark.parametrize("board", BOARD_PROFILES)
def test_no_board_is_offered_wheels_for_a_newer_glibc_or_another_processor(board: str) -> None:
    profile = BOARD_PROFILES[board]
    platforms = profile.platforms()
    assert all(name.endswith(f"_{profile.machine}") for name in platforms)
    assert f"manylinux_2_{profile.glibc[1]}_{profile.machine}" in platforms
    assert f"manylinux_2_{profile.glibc[1] + 1}_{profile.machine}" not in platforms


def test_scripts_headers_and_tests_stay_out_and_libraries_of_a_data_folder_come_in(tmp_path: Path) -> None:
    path = tmp_path / "x-1-py3-none-any.whl"
    names = {
        "x/a.py": "x/a.py",
        "x-1.data/purelib/x/b.py": "x/b.py",
        "x-1.data/scripts/tool": None,
        "x-1.data/headers/x.h": None,
        "x/a.pyi": None,
        "x-1.dist-info/METADATA": "x-1.dist-info/METADATA",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"1")
    found = {e.path.removeprefix("/opt/fedcenters/site/") for e in wheels.unpack_wheel(path)}
    assert found == {place for place in names.values() if place}


@pytest.mark.parametrize("name", ["../../etc/passwd", "x/../../y"])
def test_a_wheel_that_reaches_out_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, b"1")
    with pytest.raises(ConfigError, match="cannot be called"):
        wheels.unpack_wheel(path)


def test_what_is_no_wheel_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"no zip")
    with pytest.raises(ConfigError, match="is no wheel"):
        wheels.unpack_wheel(tmp_path / "x.whl")


def test_a_wheel_whose_bytes_changed_in_the_cache_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.flash_workstation import stocked

    cache = stocked(tmp_path / "cache", PI)
    spec = WheelSpec(profile=PI, python=PI.python, engines=("onnx",))
    (good,) = wheels.fetch_wheels(spec, cache)
    wheel(good, numpy__init=b"evil")
    asked: list[tuple[str, ...]] = []

    def pip(*arguments: str) -> str:
        asked.append(arguments)
        stocked(cache, PI)
        return ""

    monkeypatch.setattr(wheels, "_pip", pip)
    wheels.fetch_wheels(spec, cache)
    assert asked[0][0] == "download"
    assert "--require-hashes" in asked[0]


def test_the_client_itself_is_small() -> None:
    size = sum(len(e.data) for e in wheels.client_files(PACKAGE, LIGHT_ENGINES) if e.path.endswith(".py"))
    assert size < CLIENT_MAX_BYTES
