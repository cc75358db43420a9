"""A thread that maps the newest round of a run when a page asks for it, from the files of the run folder.

It makes one map at a time and rests REST_FACTOR times as long as the map took, so that pages slow the training down
little; a round that no page asks for is not mapped. It keeps the newest map of each run only.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.dashboard.embedding_map import EmbeddingMap, make_embedding_map
from coordinator.storage import state_codec
from coordinator.storage.run_reader import STORE_FOLDER, device_models, open_database, read_program
from coordinator.strategies.base import State
from edge_client.errors import FedcentersError
from edge_client.protocol.task import ClientId
from edge_client.protocol.topics import check_sha256

log = logging.getLogger(__name__)
MAX_MAPPED_DEVICES = 5_000  # of a larger fleet every second, third, ... is mapped
REST_FACTOR = 4.0  # rest after a map, in parts of the time that it took


class MapWorker:
    """`newest` gives the last round of a run; `done` is called with the run and round of each finished map."""

    def __init__(self, folder: Path, newest: Callable[[str], int | None], done: Callable[[str, int], None]) -> None:
        self._folder, self._newest, self._done = folder, newest, done
        self._changed, self._leaving = threading.Condition(), False
        self._wanted: dict[str, int] = {}
        self._found: dict[str, tuple[int, EmbeddingMap | None]] = {}
        self._thread = threading.Thread(target=self._work, name="map-worker", daemon=True)
        self._thread.start()

    def map(self, run: str) -> dict[str, Any] | None:
        """The newest map of a run as JSON, or None; the worker begins with a newer round if there is one."""
        newest = self._newest(run)
        with self._changed:
            number, found = self._found.get(run, (0, None))
            if newest is not None and newest > number:
                self._wanted[run] = newest
                self._changed.notify()
        return None if found is None else {"run": run, "round": number, **found.to_json()}

    def device(self, cid: ClientId) -> dict[str, Any]:
        """Run -> the mapped round, and the distances of the device's model to the centers in it."""
        with self._changed:
            found = dict(self._found)
        distances = {
            run: (number, one.distance(cid), one.silhouette) for run, (number, one) in found.items() if one is not None
        }
        return {
            run: {"round": number, "distance": distance, "silhouette": silhouette}
            for run, (number, distance, silhouette) in distances.items()
        }

    def close(self) -> None:
        """End the thread after the map that it is making."""
        with self._changed:
            self._leaving = True
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._leaving)
                if self._leaving:
                    return
                run, number = self._wanted.popitem()
                _, before = self._found.get(run, (0, None))
            began_s = time.monotonic()
            try:
                found = map_of_round(self._folder, run, number, before)
            except (FedcentersError, OSError, ValueError, sqlite3.Error) as wrong:
                log.warning("no map of %s round %d: %s", run, number, wrong)
                found = before
            with self._changed:
                self._found[run] = (number, found)
            self._done(run, number)
            with self._changed:
                self._changed.wait_for(lambda: self._leaving, (time.monotonic() - began_s) * REST_FACTOR)


def map_of_round(folder: Path, run: str, number: int, before: EmbeddingMap | None = None) -> EmbeddingMap | None:
    """The map of one round of a run folder; None when no model was sent in it."""
    state = _state(folder, run, number)
    parameters = read_program(folder).schema.n_params
    who, models = device_models(folder, run, number, limit=MAX_MAPPED_DEVICES)
    if not who or state is None:
        return None
    trained = ((cid, model[:parameters]) for cid, model in models)
    centers = np.asarray(state.centers, np.float32)[:, :parameters]
    return make_embedding_map(trained, centers, state.assignment, count=len(who), before=before)


def _state(folder: Path, run: str, number: int) -> State | None:
    query = "select blob from states join runs on states.run = runs.run where name = ? and round = ?"
    with open_database(folder) as db:
        row = db.execute(query, (run, number)).fetchone()
    if row is None:
        return None
    return state_codec.decode_state((folder / STORE_FOLDER / "blobs" / check_sha256(row[0])).read_bytes())
