"""The signing key changes within a run: devices with the new key go on, one that slept is told what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.identity.signing_key import announce_next_key, switch_key
from edge_client.runtime.progress import format_device_event
from tests.support import softmax_program
from tests.support.virtual_federation import Federation

SLEEPER = "d02"


def test_a_run_goes_on_with_a_new_key_and_a_device_that_slept_through_it_takes_part_with_the_new_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = softmax_program.grouped_fleet(3, 2)
    fed = Federation.of(tmp_path, devices=3, rounds=4, quorum=0.6)
    fed.start(3)
    fed.world.run(lambda: fed.live is not None and fed.live.key.round == 2)
    fed.world.kill("coordinator.0")
    announce_next_key(fed.config.signing_key_folder)
    switch_key(fed.config.signing_key_folder)
    for cid in fleet.keys() - {SLEEPER}:
        fed.world.kill(cid)
        fed.start_device(cid, fleet[cid])
    fed.told[SLEEPER].clear()
    fed.start_coordinator()
    fed.world.run(lambda: sum(event["event"] == "round" for event in fed.events) == 3)
    told = [format_device_event(event) for event in fed.told[SLEEPER] if event["event"] == "refused"]
    fed.world.kill(SLEEPER)
    fed.start_device(SLEEPER, fleet[SLEEPER])
    fed.complete()
    assert all(
        line.endswith("if the federation changed its key, this device needs the new `signing-keys` line")
        for line in told
    )
    assert told[0].startswith("round 2 of 4: refused: program ")
    assert "is signed by no key that is trusted here" in told[0]
    assert fed.server is not None
    assert fed.server.session is not None
    ignored = f"ignored a coordinator's record: bad_signature: coord {fed.server.session.sender.boot}"
    assert sum(record.getMessage().startswith(ignored) for record in caplog.records) == 1  # of several records
    assert [SLEEPER in record["per_device"] for record in fed.rounds()] == [True, False, False, True]
    assert [SLEEPER in record.get("refused", {}) for record in fed.rounds()] == [False, True, True, False]
