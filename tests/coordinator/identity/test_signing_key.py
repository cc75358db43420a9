from __future__ import annotations

import stat
from pathlib import Path

import pytest

from coordinator.identity.signing_key import open_signing_key
from edge_client.errors import ConfigError
from edge_client.protocol.blocks import manifest_of
from edge_client.protocol.signing import verify_manifest


def test_the_key_is_made_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    first = open_signing_key(tmp_path / "run")
    assert open_signing_key(tmp_path / "run") == first
    assert stat.S_IMODE((tmp_path / "run" / "signing.key").stat().st_mode) == 0o600
    assert (tmp_path / "run" / "signing.pub").read_text().strip() == first.public.hex()


def test_two_folders_have_two_keys(tmp_path: Path) -> None:
    assert open_signing_key(tmp_path / "a").public != open_signing_key(tmp_path / "b").public


def test_no_printout_shows_the_private_key(tmp_path: Path) -> None:
    key = open_signing_key(tmp_path)
    assert key.private.hex() not in f"{key} {key!r}"


def test_what_it_signs_verifies_for_this_federation(tmp_path: Path) -> None:
    key = open_signing_key(tmp_path)
    verify_manifest(key.sign_manifest(manifest_of(b"program", "program"), "demo"), [key.public], "demo")


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    open_signing_key(tmp_path)
    (tmp_path / "signing.key").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        open_signing_key(tmp_path)


@pytest.mark.parametrize("text", ["", "zz", "00" * 31])
def test_a_damaged_key_is_refused_and_never_replaced(tmp_path: Path, text: str) -> None:
    open_signing_key(tmp_path)
    (tmp_path / "signing.key").write_text(text)
    with pytest.raises(ConfigError, match="restore it from a backup"):
        open_signing_key(tmp_path)
    assert (tmp_path / "signing.key").read_text() == text
