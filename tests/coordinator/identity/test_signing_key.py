from __future__ import annotations

import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.config_sections import TlsConfig
from coordinator.identity.broker_acl import COORDINATOR_CLIENT_ID
from coordinator.identity.signing_key import (
    CURRENT_KEY_FILE,
    PUBLIC_KEY_FILE,
    SigningKey,
    announce_next_key,
    coordinator_credentials,
    open_signing_key,
    switch_key,
    trusted_keys,
)
from edge_client.errors import ConfigError
from edge_client.protocol.blocks import manifest_of
from edge_client.protocol.signing import key_id, verify_manifest
from export.folder_lock import locked_folder
from tests.support.guarded_broker import provision_federation
from tests.support.virtual_federation import config


def test_the_key_is_made_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    first = open_signing_key(tmp_path / "run")
    assert open_signing_key(tmp_path / "run") == first
    assert stat.S_IMODE((tmp_path / "run" / "signing.key").stat().st_mode) == 0o600
    assert (tmp_path / "run" / "signing.pub").read_text().strip() == first.public.hex()


def test_those_that_begin_at_once_have_one_key(tmp_path: Path) -> None:
    """As `serve` and the fleet beside it: both make the key where there is none."""
    together = threading.Barrier(4)

    def opened(folder: Path) -> SigningKey:
        together.wait()
        return open_signing_key(folder)

    with ThreadPoolExecutor(4) as pool:
        for number in range(40):
            assert len({key.private for key in pool.map(opened, [tmp_path / str(number)] * 4)}) == 1


def test_a_folder_that_has_its_key_waits_for_no_lock(tmp_path: Path) -> None:
    """Each user who may read the folder can lock it, and a coordinator did not start then, nor end by a signal."""
    key = open_signing_key(tmp_path)
    with locked_folder(tmp_path, wait=False):
        assert open_signing_key(tmp_path) == key


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


def test_after_a_switch_the_announced_key_signs_and_the_old_one_is_kept(tmp_path: Path) -> None:
    old = open_signing_key(tmp_path).public
    kept = (tmp_path / CURRENT_KEY_FILE).read_bytes()
    announce_next_key(tmp_path)
    pinned = trusted_keys(tmp_path)
    switch_key(tmp_path)
    assert (tmp_path / PUBLIC_KEY_FILE).read_text().strip() == pinned[1]
    assert [old.hex(), open_signing_key(tmp_path).public.hex()] == list(pinned)
    assert trusted_keys(tmp_path) == pinned[1:]
    assert (tmp_path / f"signing-{key_id(old)}.old").read_bytes() == kept


def test_a_switch_to_a_key_that_nothing_announced_changes_nothing(tmp_path: Path) -> None:
    old = open_signing_key(tmp_path).public
    with pytest.raises(ConfigError, match="no next signing key is announced"):
        switch_key(tmp_path)
    assert open_signing_key(tmp_path).public == old


@pytest.mark.parametrize(
    ("files", "federation"), [("coordinator/coordinator", "other"), ("devices/dev-1/device", "demo")]
)
def test_a_coordinator_takes_no_certificate_of_another_federation_or_of_a_device(
    tmp_path: Path, files: str, federation: str
) -> None:
    folder = provision_federation(tmp_path / "keys", "dev-1", federation="demo").folder
    own, given = folder / "coordinator" / "coordinator", folder / files
    tls = TlsConfig(ca=own.with_name("ca.crt"), certificate=own.with_suffix(".crt"), key=own.with_suffix(".key"))
    right = replace(config(tmp_path), federation="demo", tls=tls)
    assert coordinator_credentials(right).certificate == tls.certificate
    wrong = replace(tls, certificate=given.with_suffix(".crt"), key=given.with_suffix(".key"))
    with pytest.raises(ConfigError, match=f"not to {COORDINATOR_CLIENT_ID} of {federation}"):
        coordinator_credentials(replace(right, federation=federation, tls=wrong))


@pytest.mark.parametrize("missing", ["ca", "certificate", "key"])
def test_credentials_name_a_file_that_is_not_there(tmp_path: Path, missing: str) -> None:
    folder = provision_federation(tmp_path / "keys", "dev-1", federation="demo").folder
    own = folder / "coordinator" / "coordinator"
    tls = TlsConfig(ca=own.with_name("ca.crt"), certificate=own.with_suffix(".crt"), key=own.with_suffix(".key"))
    lost = tmp_path / "lost"
    with pytest.raises(ConfigError, match=f"there is no {lost}"):
        coordinator_credentials(replace(config(tmp_path), tls=replace(tls, **{missing: lost})))


def test_a_coordinator_without_tls_has_no_credentials(tmp_path: Path) -> None:
    given = coordinator_credentials(replace(config(tmp_path), tls=TlsConfig()))
    assert (given.ca, given.certificate, given.key) == (None, None, None)
