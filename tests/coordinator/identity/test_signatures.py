"""What a coordinator signs, and that a change of keys is no change of the work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.identity import signing_key
from coordinator.runtime.exchange.task_messages import PreparedTask
from edge_client.config import ClientConfig
from edge_client.protocol import messages, signing
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.nearest.catalog import Catalog
from edge_client.protocol.signing import verify_manifest
from edge_client.protocol.task_codec import task_manifests
from edge_client.transport.blobs import BlobFolder
from tests.support import virtual_federation
from tests.support.virtual_federation import FEDERATION, TOPICS, Federation, Spy


def test_every_vector_of_every_task_is_signed_and_so_is_the_catalog(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    spy = Spy(fed.world.broker)
    fed.start(4)
    fed.finish()
    key = signing_key.open_signing_key(fed.config.signing_key_folder)
    named = [m for task in spy.said("task") for m in task_manifests(task)]
    assert named
    for manifest in (*named, catalog_of(fed)[0]):
        verify_manifest(manifest, [key.public], FEDERATION)


def test_after_a_change_of_keys_the_same_centers_are_offered_under_the_new_one(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    fed.start(4)
    fed.finish()
    fed.world.end()
    before = catalog_of(fed)[1]
    signing_key.announce_next_key(fed.config.signing_key_folder)
    signing_key.switch_key(fed.config.signing_key_folder)
    fed.start_coordinator()
    fed.finish()
    manifest, after = catalog_of(fed)
    key = signing_key.open_signing_key(fed.config.signing_key_folder)
    verify_manifest(manifest, [key.public], FEDERATION)
    verify_manifest(after.program, [key.public], FEDERATION)
    assert replace(after, program=before.program) == before


@pytest.mark.parametrize("fatal", [9, 14])
def test_a_change_of_keys_in_the_middle_of_a_round_changes_no_bit_of_the_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fatal: int
) -> None:
    """The coordinator is killed at its `fatal`-th write, the key is changed, and it goes on; devices pin both keys."""
    calm = Federation.of(tmp_path / "calm")
    calm.start(4)
    calm.finish()
    calm.world.end()
    fed = Federation.of(tmp_path / "changed")
    signing_key.announce_next_key(fed.config.signing_key_folder)
    both = tuple(bytes.fromhex(pin) for pin in signing_key.trusted_keys(fed.config.signing_key_folder))

    def pinning(**fields: Any) -> ClientConfig:  # noqa: ANN401 - whatever the world says of a device
        return ClientConfig(**{**fields, "signing_keys": both})

    monkeypatch.setattr(virtual_federation, "ClientConfig", pinning)
    victim = fed.start_coordinator(fatal=fatal)
    fed.start_devices(4)
    fed.world.run(lambda: victim.ended)
    signing_key.switch_key(fed.config.signing_key_folder)
    fed.start_coordinator()
    fed.finish()
    assert signing_key.open_signing_key(fed.config.signing_key_folder).public == both[1]
    verify_manifest(catalog_of(fed)[0], [both[1]], FEDERATION)
    fed.world.end()
    assert fed.final_states() == calm.final_states()
    assert fed.rounds() == calm.rounds()


def catalog_of(fed: Federation) -> tuple[Manifest, Catalog]:
    message = messages.read_message(fed.world.broker.retained[TOPICS.catalog()], "cat")
    manifest = Manifest.from_json(message["catalog"])
    blobs = BlobFolder(fed.config.folder / "store" / "blobs")
    return manifest, Catalog.from_bytes(blobs.read(manifest.sha256))


def test_a_task_is_the_same_task_whoever_signed_it(tmp_path: Path) -> None:
    manifest = Manifest(sha256="0" * 64, size=9, block=4096, kind="program")
    asked = [
        PreparedTask(
            fields={"seed": 1, "program": signed.to_json(), "models": [signed.to_json(), {"own": "main"}]},
            blobs=(),
            reply_spec=None,  # type: ignore[arg-type]  # not asked for here
            max_size=1,
        )
        for signed in (signing.sign_manifest(manifest, bytes([n] * 32), "demo") for n in (1, 2))
    ]
    assert asked[0].sha256 == asked[1].sha256
    other = replace(asked[0], fields={**asked[0].fields, "seed": 2})
    assert other.sha256 != asked[0].sha256
