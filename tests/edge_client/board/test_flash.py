"""`flash` as it is typed: into a root file system, into an archive, and what it refuses with what to do."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_client.board.board_files import BoardFile
from edge_client.board.profiles import BOARD_PROFILES
from edge_client.board.systemd_unit import CONFIG_PATH, STATE_FOLDER
from edge_client.board.targets import make_archive
from edge_client.cli import main
from tests.support.flash_workstation import FlashSetup, rootfs, stocked
from tests.support.requirements import skip_without

WHOLE: Any = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}  # Python 3.11.2 of Debian 12 has no filters
TOKEN = f"{STATE_FOLDER}/identity/token"


@pytest.fixture
def desk(tmp_path: Path) -> FlashSetup:
    return FlashSetup(tmp_path)


@pytest.fixture
def card(desk: FlashSetup) -> Path:
    return rootfs(desk.folder / "card", desk.profile)


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a flash that is refused says."""

    def refused(context: FlashSetup, *arguments: str, device: str = "porch") -> str:
        assert context.flash(*arguments, device=device) in (2, 3)
        told = capsys.readouterr().err
        assert "hint: " in told
        return told

    return refused


def snapshot(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file with its time, mode and content."""
    found = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {str(p.relative_to(root)): (p.stat().st_mtime_ns, p.stat().st_mode, p.read_bytes()) for p in found}


def test_a_card_gets_everything_and_a_second_flash_changes_nothing(
    desk: FlashSetup, card: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert desk.flash("--rootfs", str(card)) == 0
    before = snapshot(card)
    assert before["etc/fedcenters/device.key"][1] & 0o777 == 0o600
    assert before["opt/fedcenters/site/numpy/init.py"][2] == b"x = 1\n"
    assert "opt/fedcenters/site/edge_client/cli.py" in before
    assert not [name for name in before if "tests" in name or "__pycache__" in name or "/web/" in name]
    assert desk.flash("--rootfs", str(card)) == 0
    assert snapshot(card) == before
    assert "nothing to change" in capsys.readouterr().err


def test_a_flash_that_was_cut_is_finished_by_the_next_one(desk: FlashSetup, card: Path) -> None:
    assert desk.flash("--rootfs", str(card)) == 0
    whole = {name: content for name, (_, _, content) in snapshot(card).items()}
    for name in ("opt/fedcenters/MANIFEST", "opt/fedcenters/site/edge_client/cli.py", "etc/fedcenters/device.key"):
        (card / name).unlink()
    (card / "opt/fedcenters/.launch.py.fedcenters").write_text("half")
    assert desk.flash("--rootfs", str(card)) == 0
    assert {name: content for name, (_, _, content) in snapshot(card).items() if "/." not in name} == whole


def test_an_update_replaces_what_changed_removes_what_is_gone_and_keeps_the_state(
    desk: FlashSetup, card: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from edge_client.board import wheels

    monkeypatch.setattr(wheels, "_pip", lambda *_: pytest.fail("asked pip"))
    assert desk.flash("--rootfs", str(card)) == 0
    learned = card / STATE_FOLDER[1:] / "state" / "state.json"
    learned.parent.mkdir(parents=True)
    learned.write_text("learned")
    stale = card / "opt/fedcenters/site/old.py"
    stale.write_text("old")
    listed = card / "opt/fedcenters/MANIFEST"
    listed.write_text(listed.read_text() + f"{'0' * 64}  ./opt/fedcenters/site/old.py\n")
    join = desk.keys / "devices" / "porch" / "client.toml"
    join.write_text(join.read_text() + "threads = 2\n")
    assert desk.flash("--rootfs", str(card)) == 3
    assert stale.exists()
    assert "flash --update replaces it" in capsys.readouterr().err
    monkeypatch.setattr(wheels, "_pip", lambda *_: resolved(desk))
    assert desk.flash("--rootfs", str(card), "--update") == 0
    assert "threads = 2" in (card / CONFIG_PATH[1:]).read_text()
    assert learned.read_text() == "learned"
    assert not stale.exists()


def resolved(desk: FlashSetup) -> str:
    """pip's report where nothing is newer than what is locked."""
    locks = next((desk.cache / "locks").iterdir()).read_text()
    return json.dumps({"install": [_item(line) for line in locks.splitlines()]})


def test_a_board_of_another_device_is_not_offered_an_update_that_would_be_refused(
    desk: FlashSetup, card: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert desk.flash("--rootfs", str(card)) == 0
    config = card / CONFIG_PATH[1:]
    config.write_text(config.read_text().replace("porch", "attic"))
    assert desk.flash("--rootfs", str(card)) == 3
    said = capsys.readouterr().err
    assert ("attic" in said, "take a fresh image" in said, "--update" in said) == (True, True, False)


def _item(line: str) -> dict[str, object]:
    """A line of a lock file as pip reports it."""
    named, _, sha256 = line.partition(" --hash=sha256:")
    name, _, version = named.partition("==")
    archive = {"hashes": {"sha256": sha256}}
    return {
        "metadata": {"name": name, "version": version},
        "download_info": {"url": f"https://x/{name}", "archive_info": archive},
    }


def test_another_device_is_not_put_over_one_that_has_learned(
    desk: FlashSetup, card: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert desk.flash("--rootfs", str(card)) == 0
    assert desk.flash("--rootfs", str(card), device="shed") == 3
    told = capsys.readouterr().err
    assert "hint" in told


def test_a_token_is_put_once_and_not_again_when_the_board_has_used_it(desk: FlashSetup, card: Path) -> None:
    assert desk.flash("--rootfs", str(card), device="shed") == 0
    token = card / TOKEN[1:]
    assert token.stat().st_mode & 0o777 == 0o600
    use_up(token)
    assert desk.flash("--rootfs", str(card), device="shed") == 0
    assert not token.exists()


def test_who_flashes_a_token_is_told_what_has_to_run_at_the_first_start(
    desk: FlashSetup, card: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert desk.flash("--rootfs", str(card), device="shed") == 0
    assert "the token ends a day after `provision --token` made it" in capsys.readouterr().err
    assert desk.flash("--rootfs", str(card)) == 3
    assert "its token" not in capsys.readouterr().err


def use_up(token: Path) -> None:
    """What a board leaves where its token was."""
    (token.parent / "token.used").write_text(hashlib.sha256(token.read_bytes()).hexdigest() + "\n")
    (token.parent / "device.crt").write_text("certificate")
    token.unlink()


@pytest.mark.parametrize("before", ["used", "waits"])
def test_a_new_token_gets_onto_a_card_that_had_one(desk: FlashSetup, card: Path, before: str) -> None:
    """To renew the certificate; or since the first token had expired before the board used it."""
    assert desk.flash("--rootfs", str(card), device="shed") == 0
    token = card / TOKEN[1:]
    if before == "used":
        use_up(token)
    (desk.keys / "devices" / "shed" / "token").write_text("another\n")
    assert desk.flash("--rootfs", str(card), device="shed") == 0
    assert token.read_text() == "another\n"
    assert token.stat().st_mode & 0o777 == 0o600


def test_a_dry_run_lists_every_file_and_writes_none(
    desk: FlashSetup, card: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(card)
    assert desk.flash("--rootfs", str(card), "--dry-run", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["list"]
    assert snapshot(card) == before
    assert desk.flash("--rootfs", str(card), "--dry-run") == 0
    told = capsys.readouterr().out
    assert "0600 fedcenters" in told
    assert desk.flash("--rootfs", str(card)) == 0
    written = set(snapshot(card)) - set(before)
    files = {each["path"].lstrip("/") for each in listed}
    assert written == files
    assert all(path in told for path in files)


@pytest.mark.parametrize("name", ["board.tar", "board.tar.zst"])
def test_a_bundle_twice_is_the_same_bytes_and_holds_what_a_card_gets(desk: FlashSetup, card: Path, name: str) -> None:
    if name.endswith("zst") and shutil.which("zstd") is None:
        skip_without("zstd is not installed (apt install zstd)")
    paths = [desk.folder / "1" / name, desk.folder / "2" / name]
    for path in paths:
        path.parent.mkdir()
        assert desk.flash("--bundle", str(path)) == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].stat().st_mode & 0o077 == 0
    if name.endswith("zst"):
        subprocess.run(["zstd", "-q", "-d", str(paths[0])], check=True)
    with tarfile.open(desk.folder / "1" / "board.tar") as tar:
        assert {m.uid for m in tar} | {m.gid for m in tar} == {0}
        unpacked = desk.folder / "unpacked"
        tar.extractall(unpacked, **WHOLE)  # noqa: S202 - our own archive
    assert desk.flash("--rootfs", str(card)) == 0
    known = set(snapshot(unpacked))
    written = snapshot(card)
    assert {n: written[n][1:] for n in known} == {n: c[1:] for n, c in snapshot(unpacked).items()}


def test_a_newer_archive_over_a_board_is_not_mistaken_for_what_python_compiled_before(tmp_path: Path) -> None:
    said = []
    for number in (1, 2):  # of the same size
        (tmp_path / "a.tar").write_bytes(make_archive([BoardFile(path="/opt/m.py", data=b"print(%d)" % number)]))
        with tarfile.open(tmp_path / "a.tar") as tar:
            tar.extractall(tmp_path, **WHOLE)  # noqa: S202 - our own archive
        env = {"PYTHONPYCACHEPREFIX": str(tmp_path / "pycache"), "PYTHONPATH": str(tmp_path / "opt")}
        said.append(subprocess.run([sys.executable, "-c", "import m"], env=env, capture_output=True, check=True).stdout)
    assert said == [b"1\n", b"2\n"]


def test_the_machines_own_root_is_refused(desk: FlashSetup, refusal: Callable[..., str]) -> None:
    assert "is not a board's root" in refusal(desk, "--rootfs", "/")


def test_of_an_empty_folder_it_is_told_how_to_mount_the_card_there(
    desk: FlashSetup, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    (tmp_path / "card").mkdir()
    told = refusal(desk, "--rootfs", str(tmp_path / "card"))
    assert "is empty: nothing is mounted there" in told
    assert f"sudo mount /dev/PARTITION {tmp_path / 'card'}" in told


def test_a_system_whose_processor_is_unknown_is_said_to_be_not_whole(
    desk: FlashSetup, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    (tmp_path / "card" / "etc").mkdir(parents=True)
    told = refusal(desk, "--rootfs", str(tmp_path / "card"))
    assert "has no program that tells its processor" in told
    assert "write the card again" in told


def test_a_boot_partition_is_refused(desk: FlashSetup, tmp_path: Path, refusal: Callable[..., str]) -> None:
    (tmp_path / "boot").mkdir()
    (tmp_path / "boot" / "config.txt").touch()
    assert "take the root partition" in refusal(desk, "--rootfs", str(tmp_path / "boot"))


def test_a_system_of_another_architecture_is_refused(desk: FlashSetup, refusal: Callable[..., str]) -> None:
    card = rootfs(desk.folder / "pc", BOARD_PROFILES["x86-64"])
    told = refusal(desk, "--rootfs", str(card))
    assert "is a system for x86_64" in told
    assert "choose another --board (x86-64)" in told


def test_a_32_bit_system_is_told_that_it_has_no_wheels(desk: FlashSetup, refusal: Callable[..., str]) -> None:
    card = rootfs(desk.folder / "old", desk.profile)
    program = card / "usr" / "bin" / f"python{desk.profile.python}"
    program.write_bytes(program.read_bytes()[:18] + (40).to_bytes(2, "little") + bytes(100))  # EM_ARM
    assert "write a 64-bit system for aarch64" in refusal(desk, "--rootfs", str(card))


def test_a_system_without_a_python_that_is_new_enough_is_refused(desk: FlashSetup, refusal: Callable[..., str]) -> None:
    card = rootfs(desk.folder / "old", desk.profile, python="3.9")
    assert "--python-home" in refusal(desk, "--rootfs", str(card))


def test_a_jetson_needs_nvidias_files_first(tmp_path: Path, refusal: Callable[..., str]) -> None:
    context = FlashSetup(tmp_path, "jetson-orin")
    card = rootfs(tmp_path / "card", context.profile)
    assert context.flash("--rootfs", str(card)) == 0
    (card / "etc/nv_tegra_release").unlink()
    assert "apply_binaries.sh" in refusal(context, "--rootfs", str(card))


def test_jetpack_5_says_that_it_needs_a_second_python_and_takes_it(tmp_path: Path, refusal: Callable[..., str]) -> None:
    context = FlashSetup(tmp_path, "jetson-xavier")
    card = rootfs(tmp_path / "card", context.profile, python="3.8")
    assert "needs a second Python" in refusal(context, "--rootfs", str(card))
    home = tmp_path / "cpython"
    shutil.copytree(rootfs(tmp_path / "other", context.profile) / "usr", home, symlinks=True)
    (home / "lib" / "python3.11").mkdir(parents=True)
    (home / "bin" / "python3.11").chmod(0o755)
    assert context.flash("--rootfs", str(card), "--python-home", str(home)) == 0
    unit = (card / "etc/systemd/system/fedcenters-edge.service").read_text()
    assert "ExecStart=/opt/fedcenters/python/bin/python3 /opt/fedcenters/launch.py" in unit
    assert (card / "opt/fedcenters/python/bin/python3").stat().st_mode & 0o111


def test_a_link_that_leads_out_of_the_card_is_not_followed(
    desk: FlashSetup, card: Path, refusal: Callable[..., str]
) -> None:
    (desk.folder / "host").mkdir()
    (card / "opt").symlink_to(desk.folder / "host")
    assert "leads out of" in refusal(desk, "--rootfs", str(card))
    assert list((desk.folder / "host").iterdir()) == []


def test_a_device_that_was_not_provisioned_is_named(desk: FlashSetup, card: Path, refusal: Callable[..., str]) -> None:
    told = refusal(desk, "--rootfs", str(card), device="attic")
    assert "nothing was provisioned for attic" in told
    assert "fedcenters-coordinator provision" in told


def test_an_address_replaces_the_join_files_and_must_be_of_the_same_federation(
    desk: FlashSetup, card: Path, refusal: Callable[..., str]
) -> None:
    assert "is the federation 'other'" in refusal(
        desk, "--rootfs", str(card), "--federation", "mqtts://b.example:8883/other"
    )
    assert desk.flash("--rootfs", str(card), "--federation", "mqtts://10.0.0.1:8884/home") == 0
    assert 'broker = "mqtts://10.0.0.1:8884"' in (card / CONFIG_PATH[1:]).read_text()


def test_the_python_of_the_card_decides_which_wheels_are_taken(
    desk: FlashSetup, capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]
) -> None:
    card = rootfs(desk.folder / "trixie", desk.profile, python="3.13")
    stocked(desk.cache, desk.profile, "3.13")
    assert desk.flash("--rootfs", str(card), "--json") == 0
    assert json.loads(capsys.readouterr().out)["python"] == "3.13"
    assert "there is Python 3.13" in refusal(desk, "--rootfs", str(card), "--python", "3.11")


def test_a_bundle_says_which_python_it_is_for_and_how_to_change_it(
    desk: FlashSetup, capsys: pytest.CaptureFixture[str]
) -> None:
    assert desk.flash("--bundle", str(desk.folder / "a.tar")) == 0
    told = capsys.readouterr().err
    assert f"wheels for Python {desk.profile.python}, the usual one of this kind of board" in told
    assert "--python (3.13, 3.12, 3.11, 3.10)" in told
    assert desk.flash("--bundle", str(desk.folder / "b.tar"), "--python", "3.11") == 0
    assert "wheels for" not in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_broker_that_would_be_the_board_itself_is_warned_of_and_allowed(
    desk: FlashSetup, card: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setattr("edge_client.board.wheels._pip", lambda *_: resolved(desk))
    assert desk.flash("--rootfs", str(card), "--federation", f"mqtts://{host}:8883") == 0
    assert f"dial mqtts://{host}:8883, which is the board itself" in capsys.readouterr().err
    assert desk.flash("--rootfs", str(card), "--update") == 0
    assert "the board itself" not in capsys.readouterr().err


def test_a_careful_umask_keeps_no_service_out(desk: FlashSetup, card: Path) -> None:
    before = os.umask(0o077)
    try:
        assert desk.flash("--rootfs", str(card), device="shed") == 0
    finally:
        os.umask(before)
    for name, mode in (
        ("opt/fedcenters/site/edge_client", 0o755),
        ("etc/fedcenters", 0o755),
        (STATE_FOLDER[1:], 0o700),
    ):
        assert (card / name).stat().st_mode & 0o777 == mode
    assert (card / CONFIG_PATH[1:]).stat().st_mode & 0o777 == 0o644


def test_help_says_what_each_option_is_without_being_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["flash", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "FILE.tar, or FILE.tar.zst compressed, to unpack" in told
    assert "the training runtime (default: onnx)" in told
    assert {profile.engine for profile in BOARD_PROFILES.values()} == {"onnx"}
    assert "where wheels are kept (default: /caches/fedcenters/wheels)" in told
    assert f"(default: {STATE_FOLDER}/data)" in told
    assert "what `provision` made (default: keys)" in told
