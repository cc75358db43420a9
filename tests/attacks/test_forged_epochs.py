"""Tries to lead a federation for ever with a number: a record of the highest epoch, unsigned, or one that jumps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.identity.signing_key import open_signing_key
from coordinator.storage.store import Store
from edge_client.protocol import messages, signing
from edge_client.runtime.state import DeviceState
from tests.support.virtual_federation import FEDERATION, TOPICS, Federation, Spy

HIGHEST = 2**53 - 1
BOOT = "f" * 16
STRANGER = bytes(range(1, 33))


def unsigned(_fed: Federation) -> dict[str, str]:
    return {}


def of_a_stranger(_fed: Federation) -> dict[str, str]:
    return signing.sign_record(BOOT, HIGHEST, STRANGER, FEDERATION)


def of_another_epoch(fed: Federation) -> dict[str, str]:
    return open_signing_key(fed.config.folder).sign_record(BOOT, 1, FEDERATION)


def of_another_federation(fed: Federation) -> dict[str, str]:
    return open_signing_key(fed.config.folder).sign_record(BOOT, HIGHEST, "other")


def signed(fed: Federation) -> dict[str, str]:
    """By the federation's own key, but no coordinator starts so often."""
    return open_signing_key(fed.config.folder).sign_record(BOOT, HIGHEST, FEDERATION)


FORGED = (unsigned, of_a_stranger, of_another_epoch, of_another_federation, signed)


def record(signature: dict[str, str]) -> bytes:
    fields: dict[str, Any] = {"boot": BOOT, "online": True, "proto": [1], "spread_ms": 0, "block": 4096, "window": 4}
    return messages.write_message("coord", ident="x", t_ms=0, epoch=HIGHEST, src=["mqtt"], **fields, **signature)


def epochs(fed: Federation) -> tuple[str | None, set[int]]:
    """What the coordinator and the devices have stored."""
    store = Store(fed.config.folder / "store")
    kept = store.facts.get("epoch")
    store.close()
    folders = sorted(path for path in fed.world.folder.glob("d*") if path.is_dir())
    states = [DeviceState(path / "state", federation=FEDERATION, device_id=path.name) for path in folders]
    return kept, {state.epoch for state in states}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return Federation.of(tmp_path_factory.mktemp("calm"), devices=3).play(3)


@pytest.mark.parametrize("forge", FORGED)
def test_a_forged_epoch_is_stored_nowhere_and_the_run_ends_with_the_same_bits(
    tmp_path: Path, calm: Federation, forge: Callable[[Federation], dict[str, str]]
) -> None:
    fed = Federation.of(tmp_path, devices=3)
    forged = record(forge(fed))
    fed.world.broker.retained[TOPICS.coord()] = forged
    spy = Spy(fed.world.broker)
    fed.start(3)
    for moment in (10, 40, 80):
        fed.world.run(lambda: len(spy.heard()) >= moment)  # noqa: B023 - used at once
        spy.publish(TOPICS.coord(), forged)
        order = messages.write_message("stop", ident="x", t_ms=0, epoch=HIGHEST, run="r1", round=1, exchange=0)
        spy.publish(TOPICS.down("d01"), order)
    fed.complete()
    assert fed.outcome() == calm.outcome()
    assert epochs(fed) == ("1", {1})


def test_a_coordinator_puts_a_strangers_record_right_so_that_new_devices_find_its_own(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    fed.start_coordinator()
    fed.world.run(lambda: fed.happened("program"))
    stranger = fed.world.broker.client("stranger")
    stranger.connect()
    stranger.publish(TOPICS.coord(), record({}), retain=True)
    kept = fed.world.broker.retained
    fed.world.run(lambda: messages.read_message(kept[TOPICS.coord()], "coord")["epoch"] == 1)
    fed.world.end()


def test_two_coordinators_with_different_keys_do_not_answer_each_other_without_end(tmp_path: Path) -> None:
    one = Federation.of(tmp_path)
    other = Federation(one.world, Federation.of(tmp_path / "other").config)
    spy = Spy(one.world.broker)
    one.start_coordinator()
    other.start_coordinator(name="coordinator.1")
    one.world.run(lambda: one.world.clock.time_s >= 100.0)
    assert len(spy.records()) <= 2 * (100 + 10)  # one a second of each
    one.world.end()


def test_a_coordinator_that_stored_a_forged_epoch_before_it_checked_signatures_goes_on(
    tmp_path: Path, calm: Federation
) -> None:
    fed = Federation.of(tmp_path, devices=3)
    fed.start_coordinator()
    fed.world.run(lambda: fed.happened("program"))
    fed.world.kill("coordinator.0")
    store = Store(fed.config.folder / "store")
    store.facts.put("epoch", str(HIGHEST))
    store.close()
    fed.play(3)
    assert fed.outcome() == calm.outcome()
    assert epochs(fed) == ("2", {2})


def test_an_epoch_of_a_version_that_did_not_sign_is_forgotten(tmp_path: Path) -> None:
    kept = {"v": 1, "device": "d0", "federation": FEDERATION, "epoch": HIGHEST, "own": {}, "residuals": {}}
    (tmp_path / "state.json").write_bytes(messages.canonical_json(kept | {"posterior": None, "result": None}))
    assert DeviceState(tmp_path, federation=FEDERATION, device_id="d0").epoch == 0
