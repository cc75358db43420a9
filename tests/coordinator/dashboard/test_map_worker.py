"""Surveys are made from what a coordinator left on disk, when someone asks, and are those of the newest round."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from coordinator.dashboard.map_worker import MapWorker, map_of_round
from coordinator.storage.run_reader import device_models
from tests.support.patience import patience
from tests.support.virtual_federation import Federation

PATIENCE_S = patience(30.0)
NEITHER = {"map": None, "missing": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fed = Federation.of(tmp_path_factory.mktemp("surveyed"))
    fed.start(4)
    fed.finish()
    fed.world.end()
    return fed.config.folder


def test_a_round_is_surveyed_with_the_models_that_its_devices_sent(folder: Path) -> None:
    found = map_of_round(folder, "fesem", 2)
    sent = dict(device_models(folder, "fesem", 2)[1])
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
        assert map_worker.map("fesem") == NEITHER  # from now on it is wanted
        assert came.wait(PATIENCE_S)
        answer = map_worker.map("fesem")
        found = answer["map"]
        assert answer["missing"] is None
        assert (found["run"], found["round"], told) == ("fesem", 2, [("fesem", 2)])
        assert len(map_worker.device("d01")["fesem"]["distance"]) == len(found["centers"])
        assert map_worker.map("nothing") == NEITHER
    finally:
        map_worker.close()


def test_a_run_without_what_a_map_needs_says_which_round_has_none_and_why(tmp_path: Path) -> None:
    came = threading.Event()
    map_worker = MapWorker(tmp_path, {"fesem": 2}.get, lambda _run, _number: came.set())
    try:
        map_worker.map("fesem")
        assert came.wait(PATIENCE_S)
        assert map_worker.map("fesem") == {
            "map": None,
            "missing": {"round": 2, "why": f"there is no run in {tmp_path} yet"},
        }
    finally:
        map_worker.close()


def test_a_round_without_models_keeps_the_map_of_the_round_before_under_its_own_number(folder: Path) -> None:
    newest, tried = {"fesem": 2}, threading.Semaphore(0)
    map_worker = MapWorker(folder, newest.get, lambda _run, _number: tried.release())
    try:
        map_worker.map("fesem")
        assert tried.acquire(timeout=PATIENCE_S)
        newest["fesem"] = 3  # of which the folder has nothing
        map_worker.map("fesem")
        assert tried.acquire(timeout=PATIENCE_S)
        answer = map_worker.map("fesem")
        assert answer["map"]["round"] == 2
        assert answer["missing"] == {"round": 3, "why": "the coordinator holds no model that a device sent in it"}
    finally:
        map_worker.close()
