"""The coordinator offers boards a newer client: signed, in its record, to be fetched as any blob."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.cli import format_run_event
from coordinator.config import read_config
from coordinator.identity import release_signature
from coordinator.identity.release_signature import read_release, read_signature
from edge_client.board.pack import pack_release
from edge_client.config import load_config
from edge_client.errors import ConfigError
from edge_client.protocol import messages, signing
from edge_client.protocol.blocks import Manifest
from tests.support.guarded_broker import provision_federation
from tests.support.virtual_federation import FEDERATION, TOPICS, Federation

FILES = {"edge_client/cli.py": b"", "edge_client/__init__.py": b'__version__ = "9.0"\n'}


def test_the_record_names_a_signed_release_that_devices_may_fetch(tmp_path: Path) -> None:
    release = tmp_path / "client.tar"
    release.write_bytes(pack_release(FILES, "9.0"))
    fed = Federation.of(tmp_path, release=release)
    fed.start(4)
    fed.finish()
    record = messages.read_message(fed.world.broker.retained[TOPICS.coord()], "coord")
    fed.world.end()
    manifest = Manifest.from_json(record["release"]["file"])
    public = bytes.fromhex((fed.config.signing_key_folder / "signing.pub").read_text().strip())
    signing.verify_manifest(manifest, [public], FEDERATION)
    assert (record["release"]["version"], manifest.kind) == ("9.0", "release")
    told = [format_run_event(event) for event in fed.events if event["event"] == "start"]
    assert [line.partition("; ")[2] for line in told] == ["offering client 9.0 to boards that run an older one"]


def test_a_release_is_offered_with_the_signature_of_the_release_key(tmp_path: Path) -> None:
    release = tmp_path / "client.tar"
    release.write_bytes(pack_release(FILES, "9.0"))
    work = provision_federation(tmp_path / "keys", "pump-1", federation=FEDERATION)
    assert work.sign_release(release) == tmp_path / "client.tar.sig"
    fed = Federation.of(tmp_path, release=release)
    fed.start(4)
    fed.finish()
    record = messages.read_message(fed.world.broker.retained[TOPICS.coord()], "coord")
    fed.world.end()
    pinned = load_config(tmp_path / "keys" / "devices" / "pump-1" / "client.toml", {}).release_keys
    signing.verify_release(record["release"], pinned, FEDERATION)
    assert pinned != load_config(tmp_path / "keys" / "devices" / "pump-1" / "client.toml", {}).signing_keys


@pytest.mark.parametrize(
    "said", [b"", b"{}", b'{"federation": "other", "key": "%s", "sig": "%s"}' % (b"0" * 16, b"0" * 128)]
)
def test_a_signature_file_that_is_none_is_told_with_what_to_do(tmp_path: Path, said: bytes) -> None:
    release = tmp_path / "client.tar"
    release.write_bytes(pack_release(FILES, "9.0"))
    (tmp_path / "client.tar.sig").write_bytes(said)
    with pytest.raises(ConfigError) as wrong:
        read_signature(release, FEDERATION)
    assert "--sign-release" in wrong.value.hint


def test_the_signature_of_a_release_of_before_is_told_to_the_operator(tmp_path: Path) -> None:
    """It lies beside the file that was packed anew; only the boards' own logs would say that none takes it."""
    release = tmp_path / "client.tar"
    release.write_bytes(pack_release(FILES, "9.0"))
    work = provision_federation(tmp_path / "keys", "pump-1", federation=FEDERATION)
    work.sign_release(release)
    assert read_signature(release, FEDERATION)
    release.write_bytes(pack_release(FILES, "9.1"))
    with pytest.raises(ConfigError, match=r"client\.tar\.sig is for another client\.tar") as wrong:
        read_signature(release, FEDERATION)
    assert "--sign-release" in wrong.value.hint


def test_the_release_key_may_be_elsewhere_and_no_other_is_made(tmp_path: Path) -> None:
    work = provision_federation(tmp_path / "keys", "pump-1")
    join = tmp_path / "keys" / "devices" / "pump-1" / "client.toml"
    before = load_config(join, {}).release_keys
    (tmp_path / "keys" / "release" / "signing.key").rename(tmp_path / "offline.key")
    provision_federation(tmp_path / "keys", "pump-2").pin_keys()
    assert load_config(join, {}).release_keys == before
    assert not (tmp_path / "keys" / "release" / "signing.key").exists()
    release = tmp_path / "client.tar"
    release.write_bytes(pack_release(FILES, "9.0"))
    with pytest.raises(ConfigError, match="cannot be read"):
        work.sign_release(release)


@pytest.mark.parametrize("data", [None, b"no release"])
def test_a_file_that_is_no_release_is_told_with_what_to_do(tmp_path: Path, data: bytes | None) -> None:
    release = tmp_path / "client.tar"
    if data is not None:
        release.write_bytes(data)
    fed = Federation.of(tmp_path, release=release)
    fed.start_coordinator()
    with pytest.raises(ConfigError) as wrong:
        fed.finish()
    assert "fedcenters-edge release" in wrong.value.hint


def test_the_configuration_names_it_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.toml"
    path.write_text(
        'federation = "home"\nbroker = "embedded"\nfolder = "run"\nformats = []\nrelease = "client.tar"\n'
        '[model]\nname = "digits-mlp"\nengines = ["onnx"]\n[[runs]]\nmethod = "fedavg"\nnum-rounds = 1\n'
    )
    assert read_config(path).release == tmp_path / "client.tar"


def test_a_release_may_have_as_many_bytes_as_a_device_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, data = tmp_path / "client.tar", pack_release(FILES, "9.0")
    release.write_bytes(data)
    monkeypatch.setattr(release_signature, "MAX_BYTES", len(data))
    assert read_release(release) == data
    monkeypatch.setattr(release_signature, "MAX_BYTES", len(data) - 1)
    with pytest.raises(ConfigError, match="larger than"):
        read_release(release)
