"""A restart replays what devices were asked, also where it reaches them otherwise: a grown program, other blocks."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.artifacts.signed_program import PROGRAM_FACT, put_program
from coordinator.storage import state_codec
from coordinator.storage.store import Store
from edge_client.protocol.messages import parse_json
from edge_client.protocol.program import MAX_PROGRAM_BYTES, Program
from tests.support.virtual_federation import BLOCK, Federation

WAYS: dict[str, dict[str, Any]] = {"rounds": {}, "without rounds": {"concurrency": 3, "buffer": 2}}

TASK_OF_ROUND_2 = "select 1 from tasks where round = 2"


def compile_for_another_engine(folder: Path) -> None:
    """What a coordinator does before it publishes centers in files that no training device has asked for."""
    with closing(Store(folder / "store")) as store:
        facts = json.loads(store.facts.get(PROGRAM_FACT) or "")
        old = Program.from_json(parse_json(store.blobs.read(facts["program"]), MAX_PROGRAM_BYTES))
        containers, batch = ({**of, "litert": of["onnx"]} for of in (old.containers, old.batch))
        grown = replace(old, containers=containers, batch=batch)  # type: ignore[arg-type]  # each by its name
        store.facts.put(
            PROGRAM_FACT, put_program(store, grown, [], state_codec.decode_array(store.blobs.read(facts["initial"])))
        )


def test_a_coordinator_that_taught_newcomers_starts_again_after_its_program_was_compiled_for_more_engines(
    tmp_path: Path,
) -> None:
    """It ended with "round 3 of run ... asks other things than before the restart" at each later start."""
    fed = Federation.of(tmp_path, teach_newcomers=True).play()
    before = fed.final_states()
    compile_for_another_engine(fed.config.folder)
    again = Federation.of(tmp_path, teach_newcomers=True)
    again.start_coordinator()
    again.complete()
    assert again.final_states() == before


@pytest.mark.parametrize("way", WAYS)
def test_the_size_of_blocks_may_change_while_a_round_is_open(tmp_path: Path, way: str) -> None:
    fed = Federation.of(tmp_path / "changed", **WAYS[way])
    fed.start()
    fed.world.run(lambda: fed.store is not None and bool(fed.store.database.rows(TASK_OF_ROUND_2)))
    fed.world.end()
    again = Federation.of(tmp_path / "changed", block=2 * BLOCK, **WAYS[way]).play()
    assert [record["round"] for record in again.rounds()] == [1, 2]
