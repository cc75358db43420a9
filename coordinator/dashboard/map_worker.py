"""Surveys the newest round of a run when a page asks, beside the coordinator, from what lies on disk.

One thread, one round at a time, at most a fifth of the time: nobody who looks slows a training down much, and a round
that nobody asks for costs nothing. Nothing is kept but the newest survey of each run; the run folder has all it needs
to be made again.
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
MAX_MAPPED_DEVICES = 5_000  # of a larger fleet every second, third, ... is surveyed
REST_FACTOR = 4.0  # times as long as a survey took
RunRound = tuple[str, int]


class MapWorker:
    """`newest` says which round of a run is the last one, `done` is told each survey's run and round."""

    def __init__(self, folder: Path, newest: Callable[[str], int | None], done: Callable[[str, int], None]) -> None:
        self._folder, self._newest, self._done = folder, newest, done
        self._changed, self._leaving = threading.Condition(), False
        self._wanted: dict[str, int] = {}
        self._found: dict[str, tuple[int, EmbeddingMap | None]] = {}
        self._thread = threading.Thread(target=self._work, name="surveyor", daemon=True)
        self._thread.start()

    def map(self, run: str) -> dict[str, Any] | None:
        """The newest survey there is, as JSON; a newer round is surveyed from now on."""
        newest = self._newest(run)
        with self._changed:
            number, found = self._found.get(run, (0, None))
            if newest is not None and newest > number:
                self._wanted[run] = newest
                self._changed.notify()
        return None if found is None else {"run": run, "round": number, **found.to_json()}

    def device(self, cid: ClientId) -> dict[str, Any]:
        """Run -> round, and the distances of the device's model to the centers then."""
        with self._changed:
            found = dict(self._found)
        distances = {
            run: (number, one.distance(cid), one.silhouette) for run, (number, one) in found.items() if one is not None
        }
        return {
            run: {"round": number, "distance": distance, "silhouette": apart}
            for run, (number, distance, apart) in distances.items()
        }

    def close(self) -> None:
        """Leave as soon as the survey that is being made is done."""
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
    """The survey of one round of a run folder; None when no model was sent in it."""
    state = _state(folder, run, number)
    parameters = read_program(folder).schema.n_params
    who, models = device_models(folder, run, number, limit=MAX_MAPPED_DEVICES)
    if not who or state is None:
        return None
    parts = ((cid, model[:parameters]) for cid, model in models)
    centers = np.asarray(state.centers, np.float32)[:, :parameters]
    return make_embedding_map(parts, centers, state.assignment, count=len(who), before=before)


def _state(folder: Path, run: str, number: int) -> State | None:
    query = "select blob from states join runs on states.run = runs.run where name = ? and round = ?"
    with open_database(folder) as db:
        row = db.execute(query, (run, number)).fetchone()
    if row is None:
        return None
    return state_codec.decode_state((folder / STORE_FOLDER / "blobs" / check_sha256(row[0])).read_bytes())
