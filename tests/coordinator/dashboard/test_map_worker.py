"""Surveys are made from what a coordinator left on disk, when someone asks, and are those of the newest round."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from coordinator.dashboard.map_worker import MapWorker, map_of_round
from coordinator.storage.run_reader import device_models, reply_vectors
from tests.support.virtual_federation import Federation

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fed = Federation.of(tmp_path_factory.mktemp("surveyed"))
    fed.start(4)
    fed.finish()
    fed.world.end()
    return fed.config.folder


def test_a_round_is_surveyed_with_the_models_that_its_devices_sent(folder: Path) -> None:
    found = map_of_round(folder, "fesem", 2)
    assert found is not None
    sent = reply_vectors(folder, "fesem", 2)
    assert found.devices == tuple(sorted(sent))
    on_map = np.linalg.norm(found.device_positions[:, None] - found.device_positions[None], axis=2)
    apart = np.array([[np.linalg.norm(sent[a] - sent[b]) for b in found.devices] for a in found.devices])
    assert (on_map <= apart + 1e-4).all()  # a projection makes nothing longer, beside float32's rounding
    assert on_map.max() > 0.9 * apart.max()  # and these two axes keep the groups apart
    assert found.distances.shape == (4, len(found.cosines))


def test_of_a_large_fleet_every_second_device_is_read(folder: Path) -> None:
    who, models = device_models(folder, "fesem", 1, limit=2)
    assert who == ["d00", "d02"]
    assert [cid for cid, _ in models] == who


def test_a_round_that_nobody_asks_for_is_not_surveyed_and_one_that_is_asked_for_comes(folder: Path) -> None:
    told: list[tuple[str, int]] = []
    came = threading.Event()

    def done(run: str, number: int) -> None:
        told.append((run, number))
        came.set()

    map_worker = MapWorker(folder, {"fesem": 2}.get, done)
    try:
        assert map_worker.device("d01") == {}
        assert told == []
        assert map_worker.map("fesem") is None  # from now on it is wanted
        assert came.wait(PATIENCE_S)
        found = map_worker.map("fesem")
        assert found is not None
        assert (found["run"], found["round"], told) == ("fesem", 2, [("fesem", 2)])
        assert len(map_worker.device("d01")["fesem"]["distance"]) == len(found["centers"])
        assert map_worker.map("nothing") is None
    finally:
        map_worker.close()


def test_a_run_without_what_a_survey_needs_costs_a_word_and_nothing_else(tmp_path: Path) -> None:
    came = threading.Event()
    map_worker = MapWorker(tmp_path, {"fesem": 2}.get, lambda _run, _number: came.set())
    try:
        map_worker.map("fesem")
        assert came.wait(PATIENCE_S)
        assert map_worker.map("fesem") is None
    finally:
        map_worker.close()
