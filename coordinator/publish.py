"""After the last round: the centers as files, the bundle, and the catalog that offers them to devices.

Everything here can be done again after a crash: the same states give the same centers, and a finished catalog is
remembered together with its event, so that it is never made twice. torch is imported only to export.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coordinator.config import CoordinatorConfig
from coordinator.nearest import guessing_loss
from coordinator.programs import Prepared
from coordinator.store import Store
from coordinator.training import Outcome
from edge_client.errors import ConfigError
from edge_client.protocol import compress
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.protocol.catalog import Catalog, CatalogCenter
from edge_client.protocol.task import Array
from edge_client.transport.blobs import write_atomically

FACT = "catalog"  # names the stored catalog in the store's facts
Event = Mapping[str, Any]


def publish(
    outcomes: Sequence[Outcome], config: CoordinatorConfig, store: Store, prepared: Prepared
) -> tuple[Catalog, Manifest, list[Event]]:
    """-> the catalog, its manifest, and the events that tell of it (none when an earlier start made it already)."""
    known, events = store.get(FACT), list[Event]()
    if known is None:
        catalog, events = _make(outcomes, config, store, prepared)
        known = store.blobs.put(catalog.to_bytes())
        store.remember(FACT, known, events)
    data = store.blobs.read(known)
    return Catalog.from_bytes(data), manifest_of(data, "catalog", block=config.block), events


def _make(
    outcomes: Sequence[Outcome], config: CoordinatorConfig, store: Store, prepared: Prepared
) -> tuple[Catalog, list[Event]]:
    """Write every run's centers, export those that are served, and put their files where devices can fetch them."""
    for outcome in outcomes:
        _write_centers(outcome, config, prepared)
    served = next(outcome for outcome in outcomes if outcome.run.name == config.served_run)
    cards = _cards(served, store)
    files = _export(served, cards, config, store, prepared) if config.formats else [{} for _ in cards]
    centers = []
    for k, center in enumerate(served.state.centers):
        data = _tensors(center, prepared)
        store.blobs.put(data)
        model = manifest_of(data, "model", block=config.block)
        centers.append(CatalogCenter(model=model, devices=cards[k]["devices"], files=files[k]))
    catalog = Catalog(
        version=1,
        program=prepared.manifest,
        containers={engine: prepared.container(engine, "evaluate") for engine in prepared.program.containers},
        centers=tuple(centers),
        abstain=guessing_loss(prepared.program),
    )
    told = {"run": served.run.name, "centers": cards, "formats": list(config.formats)}
    return catalog, [{"event": "bundle", **told, "folder": "bundle" if config.formats else None}]


def _write_centers(outcome: Outcome, config: CoordinatorConfig, prepared: Prepared) -> None:
    folder = config.folder / "centers" / outcome.run.name
    folder.mkdir(parents=True, exist_ok=True)
    for k, center in enumerate(outcome.state.centers):
        write_atomically(folder / f"center-{k}.safetensors", _tensors(center, prepared))


def _tensors(center: Array, prepared: Prepared) -> bytes:
    return compress.encode(center.astype(np.float32), prepared.program.schema, codec="f32", kind="model")


def _cards(served: Outcome, store: Store) -> list[dict[str, Any]]:
    """What is told about each center: which method made it, from how many devices and samples."""
    fleet, assignment = store.enrolled(), served.state.assignment
    devices = Counter(assignment.values())
    samples = Counter[int]()
    for cid, center in assignment.items():
        samples[center] += fleet[cid][0]
    if not assignment:  # one model for everybody
        devices, samples = Counter({0: len(fleet)}), Counter({0: sum(n for n, _ in fleet.values())})
    return [
        {
            "center": k,
            "method": served.run.method,
            "rounds": served.run.rounds,
            "devices": devices[k],
            "samples": samples[k],
        }
        for k in range(len(served.state.centers))
    ]


def _export(
    served: Outcome, cards: list[dict[str, Any]], config: CoordinatorConfig, store: Store, prepared: Prepared
) -> list[dict[str, Manifest]]:
    """Write the bundle; -> per center the manifest of each format's file, which lies in the blob folder too."""
    from export.bundle import write_bundle

    out = config.folder / "bundle"
    manifest = write_bundle(
        out,
        program=prepared.program,
        files={blob.sha256: store.blobs.read(blob.sha256) for blob in prepared.blobs()},
        centers=list(served.state.centers),
        cards=cards,
        formats=config.formats,
        reference=_reference(config),
    )
    return [
        {
            form: _container(store, (out / file["path"]).read_bytes(), config.block)
            for form, file in center["files"].items()
        }
        for center in manifest["centers"]
    ]


def _container(store: Store, data: bytes, block: int) -> Manifest:
    store.blobs.put(data)
    return manifest_of(data, "container", block=block)


def _reference(config: CoordinatorConfig) -> Array | None:
    """The samples [m, ...] on which exported files are compared with torch."""
    if config.reference is None:
        return None
    try:
        with np.load(config.reference, allow_pickle=False) as file:
            x: Array = file["x"]
    except (OSError, ValueError, KeyError) as wrong:
        raise ConfigError(
            f"cannot read x from {config.reference}: {wrong}", hint="reference is an .npz file with an array x"
        ) from wrong
    return x
