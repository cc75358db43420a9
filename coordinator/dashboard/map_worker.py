"""A thread that maps the newest round of a run when a page asks for it, from the files of the run folder.

It makes one map at a time and rests REST_FACTOR times as long as the map took, so that pages slow the training down
little; a round that no page asks for is not mapped. It keeps the newest map of each run only, and why a newer round has
none.
"""

from __future__ import annotations

import logging
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
from edge_client.printable import printable_line
from edge_client.protocol.task import ClientId
from edge_client.protocol.topics import check_sha256

log = logging.getLogger(__name__)
MAX_MAPPED_DEVICES = 5_000  # of a larger fleet every second, third, ... is mapped
REST_FACTOR = 4.0  # rest after a map, in parts of the time that it took


class NoMap(FedcentersError):
    """A round of which nothing is left that a map could show."""


class MapWorker:
    """`newest` gives the last round of a run; `done` is called with the run and round of each finished map."""

    def __init__(self, folder: Path, newest: Callable[[str], int | None], done: Callable[[str, int], None]) -> None:
        self._folder, self._newest, self._done = folder, newest, done
        self._changed, self._leaving = threading.Condition(), False
        self._wanted: dict[str, int] = {}
        self._tried: dict[str, int] = {}  # the newest round that was mapped, or could not be
        self._found: dict[str, tuple[int, EmbeddingMap]] = {}
        self._missing: dict[str, tuple[int, str]] = {}  # runs whose `_tried` round has no map, and why
        self._thread = threading.Thread(target=self._work, name="map-worker", daemon=True)
        self._thread.start()

    def map(self, run: str) -> dict[str, Any]:
        """`map`, the newest map of a run, and `missing`, a later round that was tried and the reason why it has none.

        Both are JSON, or None. The worker begins with a newer round if there is one.
        """
        newest = self._newest(run)
        with self._changed:
            if newest is not None and newest > self._tried.get(run, 0):
                self._wanted[run] = newest
                self._changed.notify()
            found, missing = self._found.get(run), self._missing.get(run)
        return {
            "map": None if found is None else {"run": run, "round": found[0], **found[1].to_json()},
            "missing": None if missing is None else {"round": missing[0], "why": missing[1]},
        }

    def device(self, cid: ClientId) -> dict[str, Any]:
        """Run -> the mapped round, and the distances of the device's model to the centers in it."""
        with self._changed:
            found = dict(self._found)
        return {
            run: {"round": number, "distance": one.distance(cid), "silhouette": one.silhouette}
            for run, (number, one) in found.items()
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
            found, why = self._try(run, number, before)
            with self._changed:
                self._tried[run] = number
                self._missing.pop(run, None)
                if found is not None:
                    self._found[run] = (number, found)
                else:
                    self._missing[run] = (number, why)
            self._done(run, number)
            with self._changed:
                self._changed.wait_for(lambda: self._leaving, (time.monotonic() - began_s) * REST_FACTOR)

    def _try(self, run: str, number: int, before: EmbeddingMap | None) -> tuple[EmbeddingMap | None, str]:
        """The map of a round, or None and the reason."""
        try:
            return map_of_round(self._folder, run, number, before), ""
        except NoMap as none:
            return None, none.message
        except Exception as wrong:  # noqa: BLE001 - the page waits for an answer, whatever went wrong
            why = wrong.message if isinstance(wrong, FedcentersError) else f"{type(wrong).__name__}: {wrong}"
            log.warning("no map of %s round %d: %s", run, number, why)
            return None, printable_line(why)


def map_of_round(folder: Path, run: str, number: int, before: EmbeddingMap | None = None) -> EmbeddingMap:
    """The map of one round of a run folder. Raises NoMap when its models or centers are not there."""
    state = _state(folder, run, number)
    parameters = read_program(folder).schema.n_params
    who, models = device_models(folder, run, number, limit=MAX_MAPPED_DEVICES)
    if not who:
        raise NoMap("the coordinator holds no model that a device sent in it")
    if state is None:
        raise NoMap("its centers are not stored")
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
