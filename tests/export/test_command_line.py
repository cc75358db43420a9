"""What the command lines of the server rooms tell in the same words."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import coordinator.config
import edge_client.config
from edge_client.toml_files import variable_of, warn_of_mistyped
from export.command_line import VARIABLES, handle_errors, make_app

FULL = Path("/dev/full")  # each write there meets a full disk
on_a_full_disk = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


def write_text(path: Path) -> None:
    path.write_text("x" * 100_000)


def write_arrays(path: Path) -> None:
    np.savez(path, x=np.zeros(100_000))


def write_unbuffered(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"x")
        file.flush()


@on_a_full_disk
@pytest.mark.parametrize("write", [write_text, write_arrays, write_unbuffered])
def test_a_full_disk_is_told_with_the_file(
    write: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.npz"
    path.symlink_to(FULL)
    with pytest.raises(SystemExit) as ended:
        handle_errors(write)(path)
    assert ended.value.code == 70
    told = f"error: this machine: [Errno 28] No space left on device: '{path}'\n\nhint: free disk space\n"
    assert capsys.readouterr().err == told


@on_a_full_disk
def test_a_file_that_is_only_read_is_not_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "read").write_text("x")

    def copy() -> None:
        with (tmp_path / "read").open("rb") as into_memory, FULL.open("wb", buffering=0) as out:
            out.write(into_memory.read())

    with pytest.raises(SystemExit):
        handle_errors(copy)()
    assert "device: '/dev/full'" in capsys.readouterr().err


def written_beside_a_log(log: Path) -> None:
    with log.open("w") as _lines, FULL.open("wb", buffering=0) as out:
        out.write(b"x")


def written_beside_text_in_memory(_: Path) -> None:
    _text = io.TextIOWrapper(io.BytesIO(b"x"))
    with FULL.open("wb", buffering=0) as out:
        out.write(b"x")


@on_a_full_disk
@pytest.mark.parametrize(
    ("write", "named"), [(written_beside_a_log, ""), (written_beside_text_in_memory, ": '/dev/full'")]
)
def test_one_of_several_written_files_is_not_named_and_text_in_memory_is_no_file(
    write: Callable[[Path], None], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        handle_errors(write)(tmp_path / "log")
    assert capsys.readouterr().err.startswith(f"error: this machine: [Errno 28] No space left on device{named}\n")


def test_a_mistyped_variable_is_told_once_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app("x", "y")
    app.command("one")(lambda: typer.echo(os.environ.get("FEDCENTERS_CACHE", "usual")))
    app.command("two")(lambda: None)
    monkeypatch.setenv("FEDCENTERS_CAHCE", "off")
    monkeypatch.setenv("FEDCENTERS_MINE", "of another program")
    monkeypatch.delenv("FEDCENTERS_CACHE", raising=False)
    for _ in range(2):
        assert CliRunner().invoke(app, ["one"]).stdout == "usual\n"
    assert caplog.messages == ["FEDCENTERS_CAHCE is not read: did you mean FEDCENTERS_CACHE?"]


def test_variables_of_one_command_are_no_mistakes_in_those_of_another(caplog: pytest.LogCaptureFixture) -> None:
    rooms = [{variable_of(key) for key in keys} for keys in (coordinator.config._KEYS, edge_client.config._KEYS)]
    rooms += [{variable_of("device-data")}, set(VARIABLES)]
    for known in rooms:
        warn_of_mistyped(dict.fromkeys(set().union(*rooms), ""), known)
    assert caplog.messages == []
