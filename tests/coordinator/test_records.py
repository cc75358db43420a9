from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coordinator.records import program_of, reply_vectors, status
from edge_client.errors import ConfigError
from tests.faults.world import Federation, program


def test_a_folder_tells_how_far_the_training_is_while_it_is_being_written(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    fed.start_coordinator()
    fed.start_devices(4)
    fed.world.run(lambda: fed.happened("round"))
    found = status(fed.config.folder)
    assert (found["epoch"], found["devices"], found["done"], found["error"]) == (1, 4, False, None)
    assert [(run["name"], run["round"], run["of"]) for run in found["runs"]] == [("fesem", 1, 2)]
    fed.finish()
    fed.world.end()
    assert status(fed.config.folder)["runs"][0]["accuracy"]["micro"] > 0.9


def test_what_the_devices_learned_in_a_round_can_be_read_back(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    fed.start_coordinator()
    fed.start_devices(4)
    fed.finish()
    fed.world.end()
    assert program_of(fed.config.folder).schema == program().schema
    vectors = reply_vectors(fed.config.folder, "fesem", 2)
    assert sorted(vectors) == ["d00", "d01", "d02", "d03"]
    apart = {cid: float(np.linalg.norm(vectors["d00"] - vector)) for cid, vector in vectors.items()}
    assert apart["d00"] == 0.0 < apart["d02"] < min(apart["d01"], apart["d03"])  # d00 and d02 are of one group
    assert reply_vectors(fed.config.folder, "fesem", 9) == {}


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run folder"):
        status(tmp_path)
