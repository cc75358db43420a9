"""The options of `fedcenters-export serve` and its neighbours that cannot be meant: told before anything listens."""

from __future__ import annotations

from pathlib import Path

import pytest

from export.serve import server
from export.serve.server import ServeOptions, access_of
from tests.support.export_cli import run_export
from tests.support.served_bundle import write_bundle


@pytest.mark.parametrize(
    "options",
    [
        ("serve", "b", "--rate", "nan"),
        ("serve", "b", "--rate", "inf"),
        ("serve", "b", "--canary", "nan"),
        ("verify", "b", "--tolerance", "nan"),
        ("verify", "b", "--loss", "nan"),
        ("program", "--check=b", "--tolerance", "nan"),
    ],
)
def test_what_is_no_finite_number_is_refused(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """With typer 0.28 `--canary nan` gave a new bundle to all devices at once; later ones refuse it by the range."""
    assert run_export(*options) == 2
    assert f"Invalid value for '{options[2]}'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["https://centers.example", "centers.example:8080", "centers.example/fed", ""])
def test_a_name_that_no_request_can_have_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every request would be answered 421, "start it with --name"."""
    write_bundle(tmp_path / "b", "one")
    assert run_export("serve", str(tmp_path / "b"), "--name", name) == 2
    told = capsys.readouterr().err
    assert f"{name!r} is no host name" in told
    assert "hint: " in told


def test_the_working_folder_is_served_from_a_site_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve .` ended in "has an empty name"."""
    seen = list[ServeOptions]()
    monkeypatch.setattr(server, "run_server", seen.append)
    (tmp_path / "centers").mkdir()
    monkeypatch.chdir(tmp_path / "centers")
    assert run_export("serve", ".") == 0
    assert [options.site for options in seen] == [tmp_path / "centers.site"]


@pytest.mark.parametrize("command", [("bundle", "run"), ("quantize", "b")])
def test_no_bundle_takes_the_place_of_the_working_folder(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_export(*command, "--out", ".") == 2
    assert "name the folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "names", "local"),
    [("127.0.0.1", (), True), ("localhost", (), True), ("127.0.0.1", ("centers.example",), False), ("::", (), False)],
)
def test_reports_need_a_token_where_a_proxy_hands_them_on(
    host: str, names: tuple[str, ...], tmp_path: Path, *, local: bool
) -> None:
    """Behind nginx as the page has it, every client of the proxy could decide a roll-out."""
    assert access_of(ServeOptions(bundle=tmp_path, site=tmp_path, host=host, names=names)).is_local == local
