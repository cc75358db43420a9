"""Run folders stay small: old rounds are forgotten, and a replay, a picture and the published centers miss nothing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from coordinator.config import read_config
from coordinator.config_sections import RunConfig
from coordinator.dashboard.map_worker import map_of_round
from coordinator.storage.exchange_store import ExchangeKey, StoredReply
from coordinator.storage.round_pruning import named_by_facts, prune_rounds
from coordinator.storage.run_reader import STORE_FOLDER
from coordinator.storage.store import Store
from coordinator.strategies.base import State
from edge_client.errors import ConfigError
from tests.faults.test_damaged_store import flip, state_blobs, stopped_after
from tests.support.virtual_federation import Federation

KEPT = 3


def files(fed: Federation) -> dict[str, int]:
    """How many files the store has, by kind."""
    store = fed.config.folder / STORE_FOLDER
    return {kind: sum(path.is_file() for path in (store / kind).rglob("*")) for kind in ("blobs", "updates")}


def rows(fed: Federation, table: str) -> set[int]:
    """The rounds of a table."""
    with closing(sqlite3.connect(fed.config.folder / STORE_FOLDER / "coordinator.sqlite")) as db:
        return {number for (number,) in db.execute(f"select distinct round from {table}")}  # noqa: S608 - our own


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return Federation.of(tmp_path_factory.mktemp("long"), rounds=12, keep_rounds=KEPT).play()


def test_a_long_run_keeps_no_more_than_a_short_one(long: Federation, tmp_path: Path) -> None:
    short = Federation.of(tmp_path / "short", rounds=KEPT + 1, keep_rounds=KEPT).play()
    assert files(long) == files(short)
    for table in ("states", "exchanges", "tasks", "task_blobs", "replies", "closings"):
        assert rows(long, table) == {10, 11, 12}, table


def test_the_outcome_is_that_of_a_run_that_keeps_all(long: Federation, tmp_path: Path) -> None:
    whole = Federation.of(tmp_path / "whole", rounds=12, keep_rounds=0).play()
    assert whole.outcome() == long.outcome()
    assert rows(whole, "replies") == set(range(1, 13))
    assert files(whole)["updates"] > files(long)["updates"]


def test_a_run_with_late_updates_keeps_no_fact_of_old_rounds(tmp_path: Path) -> None:
    run = RunConfig(method="fedavg-late", rounds=12, name="late", settings={"local-steps": 2, "batch-size": 8})
    fed = Federation.of(tmp_path, runs=(run,), keep_rounds=KEPT).play()
    with closing(Store(fed.config.folder / STORE_FOLDER)) as store:
        ident = store.states.run_id("late", str)
        given = [number for number in range(1, 13) if store.facts.get(f"late/{ident}/{number}") is not None]
    assert given == [10, 11, 12]


def test_a_late_update_stays_until_the_round_that_it_was_given_to_need_not_be_played_again(tmp_path: Path) -> None:
    """It comes while the next round is open, and counts in the one after that."""
    key, late = ExchangeKey("run1", 2, 0), StoredReply("d1", "0" * 64, 1, 1, "delta", "zero", 1.0)
    with closing(Store(tmp_path / "store")) as store:
        for number in range(7):
            store.states.put("run1", number, State(centers=np.zeros((1, 1))))
        store.late_updates.put(key, late)
        for number, kept in ((4, [late]), (5, [])):
            assert store.late_updates.assign("run1", 4) == [late]
            prune_rounds(store, "run1", number - 2)
            assert store.late_updates.assign("run1", 4) == kept


def test_what_is_published_and_drawn_is_there(long: Federation) -> None:
    with closing(Store(long.config.folder / STORE_FOLDER)) as store:
        named = named_by_facts(store)
        blobs = {sha256 for sha256 in named if store.blobs.has(sha256)}
        prune_rounds(store, store.states.run_id("fesem", str), 9)
        assert blobs == {sha256 for sha256 in named if store.blobs.has(sha256)}
        assert len(blobs) >= 2  # the program and its containers
    assert long.catalog is not None
    assert map_of_round(long.config.folder, "fesem", 12).devices


def test_a_damaged_state_is_played_again_from_the_rounds_that_are_kept(tmp_path: Path) -> None:
    undisturbed = Federation.of(tmp_path / "undisturbed", rounds=7, keep_rounds=KEPT).play()
    fed = stopped_after(tmp_path / "rotten", 5, of=7, keep_rounds=KEPT)
    for blob in state_blobs(fed, 1):
        flip(blob)
    fed.world.end()
    again = Federation(type(fed.world)(tmp_path / "rotten"), fed.config)
    assert again.play().outcome() == undisturbed.outcome()


@pytest.mark.parametrize("wrong", ["1", "-1", '"all"'])
def test_a_run_keeps_two_rounds_or_more(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "coordinator.toml"
    path.write_text(
        f'federation = "home"\nbroker = "embedded"\nfolder = "run"\nkeep-rounds = {wrong}\n'
        '[model]\nname = "digits-mlp"\n'
        '[[runs]]\nmethod = "fedavg"\nnum-rounds = 1\n'
    )
    with pytest.raises(ConfigError, match="keep-rounds"):
        read_config(path, environ={})
