"""What a bundle of a coordinator's run is made of (export/bundle/bundle_contents.py; entry point `fedcenters.runs`).

The program and its containers come from the store, the centers from centers/<run>/, the cards from the run's record.
Devices' samples never leave them, so the only samples are the configured reference samples in the run's own bundle.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

from coordinator.identity.signing_key import read_signing_key
from coordinator.rounds.round_record import RoundRecord, upgraded_record
from coordinator.storage.key_value_store import SETTINGS_FACT
from coordinator.storage.run_reader import STORE_FOLDER, open_database, read_program
from edge_client.errors import ConfigError
from edge_client.protocol import codecs
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array, ClientId
from edge_client.protocol.topics import check_cid, check_sha256
from edge_client.toml_files import parse_toml
from export.bundle.bundle_contents import BundleNames, BundleSource, LabelledSamples, NewcomerData, Signer, make_signer
from export.bundle.model_cards import center_facts

log = logging.getLogger(__name__)
_ROUNDS = """
    select line from events where json_extract(line, '$.event') = 'round' and json_extract(line, '$.run') = ?
    order by id desc"""
_LAST_TEST = """
    select cid, sha256, n from replies join runs on replies.run = runs.run
    where name = :name and what = 'stats' and (round, exchange) = (
        select round, exchange from replies join runs on replies.run = runs.run
        where name = :name and what = 'stats' and round <= :rounds order by round desc, exchange desc limit 1)
    order by cid"""


def is_run_folder(run: Path) -> bool:
    """Whether a coordinator wrote this folder."""
    return (run / STORE_FOLDER / "coordinator.sqlite").is_file()


def bundle_source(run: Path, *, method: str, engines: Sequence[str], data: Path | None) -> BundleSource:  # noqa: ARG001 - the entry point's signature; this source compiles nothing
    """The centers of the run `method`, with every engine that the coordinator compiled for."""
    name = method or _served_run(run)
    program = read_program(run)
    centers = _centers(run, name, program)
    assignment = last_round(run, name)["assignment"]
    members: list[list[ClientId] | None] = [None] * len(centers)
    if assignment:
        members = [[c for c, at in sorted(assignment.items()) if at == k] for k in range(len(centers))]
    elif len(centers) == 1:
        members = [sorted(last_round(run, name)["per_device"])]
    return BundleSource(
        program=program,
        files=_containers(run, program),
        centers=centers,
        cards=run_cards(run, name, members),
        reference=held_out(run, data=None),
        sign=_signer(run),
        newcomers=_newcomers(run, centers),
        names=BundleNames(classes=tuple(_settings(run).get("class-names", ()))),
    )


def _newcomers(run: Path, centers: Sequence[Array]) -> NewcomerData:
    """What the run's own bundle has for devices that never trained, where it is of these centers.

    In a folder with several runs it is that of one, whose limits and tree say nothing of other centers.
    """
    from export.bundle.reader import read_bundle

    if not (run / "bundle" / "manifest.json").is_file():
        return NewcomerData()
    bundle = read_bundle(run / "bundle")
    kept = [bundle.vector(k) for k in range(len(bundle.manifest["centers"]))]
    same = len(kept) == len(centers) and all(map(np.array_equal, kept, centers))
    return bundle.newcomers() if same else NewcomerData()


def held_out(run: Path, *, data: Path | None) -> LabelledSamples | None:  # noqa: ARG001 - the entry point's signature
    """The samples that the run's own bundle was checked on, or None."""
    from export.bundle.reader import read_bundle

    return read_bundle(run / "bundle").reference_samples() if (run / "bundle" / "manifest.json").is_file() else None


def run_cards(run: Path, name: str, members: Sequence[Sequence[ClientId] | None]) -> list[dict[str, Any]]:
    """The model card facts of each center from the record of the run `name`; `members`: its devices, by center.

    `accuracy` is that of the center as it is exported, in the last test; `served` that of the models which its devices
    are served, where they are others. Labels are counted in the devices' held-out samples, as that test saw them.
    """
    last = last_round(run, name)
    with open_database(run) as db:
        samples = dict(db.execute("select cid, n from devices").fetchall())
    labels = _labels(run, name, int(last["round"]), read_program(run))
    return [
        center_facts(
            k,
            devices,
            method=last["method"],
            rounds=last["round"],  # those that were done: a run may be stopped before its last
            samples=samples,
            served=last["per_device"],
            centers=last["centers"]["per_device"] if "centers" in last else None,
            labels=labels,
            labels_of="held-out samples",
        )
        for k, devices in enumerate(members)
    ]


def last_test(run: Path, name: str, program: Program) -> tuple[dict[ClientId, float], int]:
    """Device -> its mean loss in the last test, and the median number of held-out samples behind these, 0 of none."""
    last = last_round(run, name)
    losses = dict(last.get("loss_per_device", {}))
    counted = _labels(run, name, int(last["round"]), program)
    samples = [-(-sum(counted[cid]) // program.positions) for cid in losses if cid in counted]
    return losses, int(median(samples)) if samples else 0


def last_round(run: Path, name: str) -> RoundRecord:
    """The event of the newest last round of the run `name`, else of its newest round. Raises ConfigError without any.

    A run that goes on with more rounds has the centers and scores of its former end until it ends again.
    """
    with open_database(run) as db:  # one line at a time: that of a large fleet has a megabyte
        rounds = (upgraded_record(json.loads(line)) for (line,) in db.execute(_ROUNDS, (name,)))
        newest = next(rounds, None)
        if newest is None:
            raise ConfigError(f"{run} has no round of {name!r}", hint="let the run finish first")
        ended = next((event for event in chain([newest], rounds) if event["round"] == event["of"]), newest)
    return cast("RoundRecord", ended)


def _labels(run: Path, name: str, rounds: int, program: Program) -> dict[ClientId, list[int]]:
    """Device -> how many labels of its test samples are of each class, from the confusion matrices of the last test."""
    with open_database(run) as db:
        rows = db.execute(_LAST_TEST, {"name": name, "rounds": rounds}).fetchall()
    labels = {}
    for cid, sha256, n in rows:
        data = (run / STORE_FOLDER / "updates" / check_cid(cid) / check_sha256(sha256)).read_bytes()
        confusion = codecs.decode_stats(data, program.schema, n, positions=program.positions).confusion
        if confusion is not None:
            labels[cid] = confusion[0].sum(axis=1).tolist()  # of any model; rows are true classes
    return labels


def _containers(run: Path, program: Program) -> dict[str, bytes]:
    hashes = {c.sha256 for functions in program.containers.values() for c in functions.values()}
    return {sha256: (run / STORE_FOLDER / "blobs" / check_sha256(sha256)).read_bytes() for sha256 in sorted(hashes)}


def _signer(run: Path) -> Signer | None:
    """What signs with the key of the run's `signing-folder`; None, with a warning, where that cannot be read."""
    federation = _federation(run)
    try:
        key = read_signing_key(Path(_settings(run).get("signing-folder") or run))
    except ConfigError as wrong:
        log.warning("%s", wrong.message)
        return None
    return make_signer(key.private, federation) if federation else None


def _settings(run: Path) -> dict[str, Any]:
    """The configuration of the coordinator's last start; empty where it is not there."""
    file = run / "config.toml"
    return parse_toml(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _federation(run: Path) -> str | None:
    with open_database(run) as db:
        row = db.execute("select value from meta where key = ?", (SETTINGS_FACT,)).fetchone()
    return None if row is None else str(json.loads(row[0])["federation"])


def calibration(run: Path, *, data: Path | None) -> LabelledSamples | None:
    """None: devices keep their training samples."""


def _served_run(run: Path) -> str:
    """The run whose centers the coordinator itself publishes, or the first of its file that has any."""
    settings, found = _settings(run), _names(run)
    asked = [settings.get("bundle-run"), *(each.get("name", each["method"]) for each in settings.get("runs", ()))]
    return next((name for name in asked if name in found), found[0])


def _names(run: Path) -> list[str]:
    names = sorted(p.name for p in (run / "centers").glob("*") if p.is_dir())
    if not names:
        raise ConfigError(f"run {run} has no centers yet", hint="let the run finish first")
    return names


def _centers(run: Path, name: str, program: Program) -> list[Array]:
    if name not in (names := _names(run)):
        raise ConfigError(f"run {run} has no centers of {name}", hint=f"it has {', '.join(names)}")
    paths = sorted((run / "centers" / name).glob("center-*.safetensors"), key=lambda p: int(p.stem.partition("-")[2]))
    return [codecs.decode_vector(path.read_bytes(), program.schema, kind="model") for path in paths]
