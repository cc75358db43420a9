"""The coordinator's signing key was stolen: it signs models and programs, but no client that a board would start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge_client.board.pack import pack_release
from edge_client.protocol import signing
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.update import launcher
from edge_client.update.launcher import ReleaseRecord
from edge_client.update.self_update import SelfUpdater
from tests.support.scripted_coordinator import FEDERATION, PRIVATE, DeviceStage, Script

RELEASE_PRIVATE = bytes(32)
DATA = pack_release({"edge_client/cli.py": b"", "edge_client/__init__.py": b'__version__ = "9.0"\n'}, "9.0")
MANIFEST = manifest_of(DATA, "release", block=4096)


def signed_with(private: bytes, *, federation: str = FEDERATION, kind: str = "release") -> dict[str, str]:
    sig = signing.sign(private, federation, kind, MANIFEST.sha256, MANIFEST.size)
    return {"key": signing.key_id(signing.public_key(private)), "sig": sig}


@pytest.fixture
def stage(tmp_path: Path) -> DeviceStage:
    """A board whose join file pins a key for releases."""
    updates = SelfUpdater(tmp_path / "releases", running="0.1.0")
    return DeviceStage(tmp_path, updates=updates, release_keys=(signing.public_key(RELEASE_PRIVATE),))


def installed(stage: DeviceStage, **signature: Any) -> ReleaseRecord:  # noqa: ANN401 - JSON fields
    """What the board has on trial after such an offer; the coordinator's key has signed the manifest."""
    offered: Manifest = stage.blob(DATA, "release")

    def script() -> Script:
        yield
        stage.lead(1, release={"version": "9.0", "file": offered, **signature})
        yield 100

    stage.play(script())
    return launcher.read_record(stage.folder / "releases")


@pytest.mark.parametrize(
    "signature",
    [
        {},
        signed_with(PRIVATE),
        signed_with(RELEASE_PRIVATE) | {"sig": "0" * 128},
        signed_with(RELEASE_PRIVATE, federation="other"),
        signed_with(RELEASE_PRIVATE, kind="program"),
        signed_with(PRIVATE) | {"key": signed_with(RELEASE_PRIVATE)["key"]},
    ],
)
def test_no_board_starts_code_that_the_release_key_did_not_sign(stage: DeviceStage, signature: dict[str, str]) -> None:
    assert installed(stage, **signature) == ReleaseRecord()
    assert stage.said("get") == []


def test_a_release_by_the_release_key_is_taken(stage: DeviceStage) -> None:
    assert installed(stage, **signed_with(RELEASE_PRIVATE)) == ReleaseRecord(trial="9.0")


def test_a_board_that_knows_the_old_key_alone_takes_releases_as_before(stage: DeviceStage) -> None:
    stage.release_keys = ()
    assert installed(stage, **signed_with(RELEASE_PRIVATE)) == ReleaseRecord(trial="9.0")
