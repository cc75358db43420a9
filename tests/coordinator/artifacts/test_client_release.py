"""The coordinator offers boards a newer client: signed, in its record, to be fetched as any blob."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.config import read_config
from edge_client.errors import ConfigError
from edge_client.protocol import messages, signing
from edge_client.protocol.blocks import Manifest
from edge_client.update.self_update import pack_release
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
