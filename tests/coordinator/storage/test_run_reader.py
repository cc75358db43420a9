from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coordinator.storage.run_reader import read_program, reply_vectors
from edge_client.errors import ConfigError
from tests.support.virtual_federation import Federation, program


def test_what_the_devices_learned_in_a_round_can_be_read_back(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    fed.start(4)
    fed.finish()
    fed.world.end()
    assert read_program(fed.config.folder).schema == program().schema
    vectors = reply_vectors(fed.config.folder, "fesem", 2)
    assert sorted(vectors) == ["d00", "d01", "d02", "d03"]
    apart = {cid: float(np.linalg.norm(vectors["d00"] - vector)) for cid, vector in vectors.items()}
    assert apart["d00"] == 0.0 < apart["d02"] < min(apart["d01"], apart["d03"])  # d00 and d02 are of one group
    assert reply_vectors(fed.config.folder, "fesem", 9) == {}


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run in"):
        read_program(tmp_path)
