"""Publishing after the last round: the centers as files, the bundle, and the catalog that offers them to devices.

Every step can be repeated after a crash: the same states give the same centers, and a finished catalog is stored
together with its event, so that it is made once. torch is imported only to export.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from coordinator.artifacts.bundle_source import last_test, run_cards
from coordinator.artifacts.finished_run import RunResult, make_strategy
from coordinator.artifacts.signed_program import CompiledProgram
from coordinator.artifacts.stored_settings import CATALOG_FACT
from coordinator.config import CoordinatorConfig
from coordinator.identity.signing_key import open_signing_key
from coordinator.nearest.fit_router import local_round_of
from coordinator.nearest.learn_from_replies import MIN_MEASUREMENTS, learn_from_replies, limits_from_tests
from coordinator.rounds.sealed_round import is_sealed
from coordinator.storage.store import Store
from coordinator.strategies.base import Strategy
from coordinator.strategies.common.center_tree import SplitTree as TreeOfSplits
from coordinator.strategies.common.label_totals import label_totals_of
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.loss_starts import COUNTS_KEY
from edge_client.errors import Malformed
from edge_client.protocol import codecs
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.protocol.nearest import sketch
from edge_client.protocol.nearest.catalog import Catalog, CatalogCenter, fitting_class_names
from edge_client.protocol.nearest.center_tree import CenterTree
from edge_client.protocol.nearest.router import LocalRound, Router
from edge_client.protocol.nearest.router_file import read_router, write_router
from edge_client.protocol.nearest.selection_rule import GUESSING_UNKNOWN, guessing_loss
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array, ClientId, OwnModel
from edge_client.transport.blobs import write_atomically

if TYPE_CHECKING:
    from export.bundle.bundle_contents import NewcomerData

log = logging.getLogger(__name__)
Event = Mapping[str, Any]


def publish_centers(
    outcomes: Sequence[RunResult], config: CoordinatorConfig, store: Store, prepared: CompiledProgram, *, unix_ms: int
) -> tuple[Catalog, Manifest, list[Event]]:
    """-> the catalog, its signed manifest, and its events (none when it was made before a restart).

    `unix_ms` is the wall time that the events bear.
    """
    known, events = store.facts.get(CATALOG_FACT), list[Event]()
    if known is None or not _is_wanted(config, store) or not _is_whole(known, store):
        catalog, events = _make_catalog(outcomes, config, store, prepared)
        events = [{**event, "unix_ms": unix_ms} for event in events]
        known = store.blobs.put(catalog.to_bytes())
        store.facts.put(CATALOG_FACT, known, events)
    # The signing key and the names of the classes may have changed since the catalog was made.
    names = fitting_class_names(config.bundle.class_names)
    catalog = replace(Catalog.from_bytes(store.blobs.read(known)), program=prepared.manifest, class_names=names)
    data = catalog.to_bytes()
    store.blobs.put(data)
    return catalog, prepared.sign(manifest_of(data, "catalog", block=config.transfer.block)), events


def _is_wanted(config: CoordinatorConfig, store: Store) -> bool:
    """Whether what was published last is of the run and has the files that the configuration names now."""
    made = store.events.newest("bundle")
    return (made["run"], {*made["formats"]}) == (config.served_run, {*config.bundle.formats})


def _is_whole(known: str, store: Store) -> bool:
    """Whether devices can read what the catalog of this hash offers.

    No other version made its guide, and nothing that is made with a catalog is damaged on the disk.
    """
    try:
        catalog = Catalog.from_bytes(store.blobs.read(known))
        if catalog.router is not None:
            read_router(store.blobs.read(catalog.router.sha256))
        made = [blob for center in catalog.centers for blob in (center.model, *center.files.values())]
        made += [*catalog.splits, *([] if catalog.start is None else [catalog.start])]
        for blob in made:
            store.blobs.verified(blob.sha256)
    except Malformed as wrong:
        log.warning("the centers are published again: %s", wrong.words)
        return False
    return True


def _make_catalog(
    outcomes: Sequence[RunResult], config: CoordinatorConfig, store: Store, prepared: CompiledProgram
) -> tuple[Catalog, list[Event]]:
    """Write every run's centers, export the served run's, and store their files as blobs that devices can fetch."""
    for outcome in outcomes:
        _write_centers(outcome, config, prepared)
    served = next(outcome for outcome in outcomes if outcome.run.name == config.served_run)
    cards = _cards(served, config, store)
    newcomers = _newcomers(served, config, prepared)
    files = _export(served, cards, config, store, prepared, newcomers) if config.bundle.formats else [{} for _ in cards]
    centers = []
    for k, center in enumerate(served.state.centers):
        data = _tensors(center, prepared)
        store.blobs.put(data)
        model = manifest_of(data, "model", block=config.transfer.block)
        centers.append(CatalogCenter(model=model, devices=cards[k]["devices"], files=files[k]))
    catalog = Catalog(
        version=1,
        program=prepared.manifest,
        containers={engine: prepared.container(engine, "evaluate") for engine in prepared.program.containers},
        centers=tuple(centers),
        abstain=guessing_loss(prepared.program),
        **_router_fields(newcomers, config, store, prepared),
    )
    facts = {"run": served.run.name, "centers": cards, "formats": list(config.bundle.formats)}
    return catalog, [{"event": "bundle", **facts, "folder": "bundle" if config.bundle.formats else None}]


def _newcomers(served: RunResult, config: CoordinatorConfig, prepared: CompiledProgram) -> NewcomerData:
    """The router, where devices measured every center, and the center tree, where the method made one."""
    from export.bundle.bundle_contents import NewcomerData

    made, router = TreeOfSplits.from_state(served.state), _fit_router(served, config, prepared)
    start = None if router is None or router.round is None else prepared.initial
    if not len(made.models):
        return NewcomerData(router=router, start=start)
    edges = tuple((int(start), int(end)) for start, end in made.edges)
    tree = CenterTree(edges, len(served.state.centers))
    return NewcomerData(router=router, start=start, tree=tree, splits=list(made.models.astype(np.float32)))


def _router_fields(
    newcomers: NewcomerData, config: CoordinatorConfig, store: Store, prepared: CompiledProgram
) -> dict[str, Any]:
    """The same as fields of a catalog; the files that they name are stored as blobs."""

    def stored(data: bytes, kind: str) -> Manifest:
        store.blobs.put(data)
        return manifest_of(data, kind, block=config.transfer.block)

    router = newcomers.router
    return {
        "router": None if router is None else stored(write_router(router), "router"),
        "start": None if newcomers.start is None else stored(_tensors(newcomers.start, prepared), "model"),
        "tree": newcomers.tree,
        "splits": tuple(stored(_tensors(vector, prepared), "model") for vector in newcomers.splits),
    }


def _fit_router(served: RunResult, config: CoordinatorConfig, prepared: CompiledProgram) -> Router | None:
    """The router fitted to the devices' measurements, or else limits of the loss from the last test, if it can be.

    A local round's update is compared with the centers' directions from the initial model, which need no measurement.
    """
    if len(served.measurements) < MIN_MEASUREMENTS:
        return _limits_of_last_test(served, config, prepared)
    try:
        return learn_from_replies(
            served.measurements,
            served.state.assignment,
            centers=len(served.state.centers),
            round=_local_round(served, prepared),
            signed=prepared.program.own_loss,
            guess=_known_guess(prepared.program),
        )
    except Malformed as wrong:  # an earlier version asked the devices for less
        log.warning("the guide for new devices is made of the last test alone: %s", wrong.words)
        return _limits_of_last_test(served, config, prepared)


def _known_guess(program: Program) -> float:
    """The loss of guessing, 0 where that is not known."""
    guess = guessing_loss(program)
    return 0.0 if guess == GUESSING_UNKNOWN else guess


def _limits_of_last_test(served: RunResult, config: CoordinatorConfig, prepared: CompiledProgram) -> Router | None:
    """From devices that were tested with their own center as it is; None where these are too few."""
    state, strategy = served.state, served.strategy
    losses, samples = last_test(config.folder, served.run.name, prepared.program)
    if strategy.serving.get("buffers", "sent") != "sent":
        return None
    own = {}
    for cid, loss in losses.items():
        models = [model for _, model in strategy.predictor(state, cid)]
        center = state.assignment.get(cid)
        if center is None or len(models) != 1 or isinstance(models[0], OwnModel):
            continue
        if label_totals_of(state, models) is None and np.array_equal(models[0], state.centers[center]):
            own[cid] = loss
    if len(own) < MIN_MEASUREMENTS or not samples:
        return None
    signed, guess = prepared.program.own_loss, _known_guess(prepared.program)
    return limits_from_tests(own, samples=samples, centers=len(state.centers), signed=signed, guess=guess)


def _local_round(served: RunResult, prepared: CompiledProgram) -> LocalRound | None:
    method, state = served.strategy, served.state
    found = local_round_of(method, len(state.centers)) if isinstance(method, LocalSgd) else None
    if found is None:
        return None
    moved = (center - prepared.initial for center in state.centers)
    schema = prepared.program.schema
    return replace(found, centers=np.stack([sketch.update_direction(m, schema, found.representation) for m in moved]))


def _write_centers(outcome: RunResult, config: CoordinatorConfig, prepared: CompiledProgram) -> None:
    folder = config.folder / "centers" / outcome.run.name
    folder.mkdir(parents=True, exist_ok=True)
    for k, center in enumerate(outcome.state.centers):
        write_atomically(folder / f"center-{k}.safetensors", _tensors(center, prepared))


def _tensors(center: Array, prepared: CompiledProgram) -> bytes:
    return codecs.encode_vector(center.astype(np.float32), prepared.program.schema, codec="f32", kind="model")


def _cards(served: RunResult, config: CoordinatorConfig, store: Store) -> list[dict[str, Any]]:
    """The card of each center: its method, and the number of its devices and of their samples, where these are told."""
    fleet, members, k = store.states.enrolled(), _members(served, config, store), len(served.state.centers)
    made = {"method": served.run.method, "rounds": served.run.rounds}
    if members is None:
        counts = served.state.extra.get(COUNTS_KEY, np.zeros(k))
        return [{"center": center, **made, "devices": int(counts[center])} for center in range(k)]
    return [
        {"center": center, **made, "devices": len(mine), "samples": sum(fleet[cid][0] for cid in mine)}
        for center, mine in enumerate(members)
    ]


def _members(served: RunResult, config: CoordinatorConfig, store: Store) -> list[list[ClientId]] | None:
    """The devices of each center, sorted; a method may serve a device several centers.

    None where sums tell their numbers only (`secure`).
    """
    strategy, state = make_strategy(served.run, config), served.state
    if is_sealed(strategy) and not state.assignment and len(state.centers) > 1:
        return None
    members: dict[int, list[ClientId]] = defaultdict(list)
    for cid in sorted(store.states.enrolled()):
        for center in _centers_of(served, strategy, cid):
            members[center].append(cid)
    return [members[center] for center in range(len(state.centers))]


def _centers_of(served: RunResult, strategy: Strategy, cid: ClientId) -> list[int]:
    """The center that a device is assigned to; without an assignment, every center that the method serves it.

    A device that is served only the model that it keeps itself has no center.
    """
    state = served.state
    if state.assignment:
        return [state.assignment[cid]] if cid in state.assignment else []
    models = [m for _, m in strategy.predictor(state, cid) if not isinstance(m, OwnModel)]
    return [k for k, center in enumerate(state.centers) if any(np.array_equal(center, m) for m in models)]


def _export(
    served: RunResult,
    cards: list[dict[str, Any]],
    config: CoordinatorConfig,
    store: Store,
    prepared: CompiledProgram,
    newcomers: NewcomerData,
) -> list[dict[str, Manifest]]:
    """Write the bundle; -> per center the manifest of each format's file, which is stored as a blob too."""
    from export.bundle.bundle_contents import BundleNames, BundleSource, LabelledSamples, make_signer
    from export.bundle.writer import BundleOptions, write_bundle

    out = config.folder / "bundle"
    facts = run_cards(config.folder, served.run.name, _members(served, config, store) or [None] * len(cards))
    reference = None if config.bundle.reference is None else LabelledSamples.read(config.bundle.reference)
    if reference is not None:
        reference.require_fit(prepared.program)
    source = BundleSource(
        program=prepared.program,
        files={blob.sha256: store.blobs.read(blob.sha256) for blob in prepared.blobs()},
        centers=list(served.state.centers),
        cards=[{**more, **card} for more, card in zip(facts, cards, strict=True)],
        reference=reference,
        sign=make_signer(open_signing_key(config.signing_key_folder).private, config.federation),
        newcomers=newcomers,
        names=BundleNames(classes=config.bundle.class_names),
    )
    manifest = write_bundle(out, source, BundleOptions(formats=config.bundle.formats))
    return [
        {
            form: _container(store, (out / file["path"]).read_bytes(), config.transfer.block)
            for form, file in center["files"].items()
        }
        for center in manifest["centers"]
    ]


def _container(store: Store, data: bytes, block: int) -> Manifest:
    store.blobs.put(data)
    return manifest_of(data, "container", block=block)
