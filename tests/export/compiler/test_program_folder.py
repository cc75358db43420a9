"""A program's folder as it may be after an interrupted copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_client.errors import ConfigError
from edge_client.protocol.task import Schema, TensorSpec
from export.compiler.program_folder import read_weights

SCHEMA = Schema((TensorSpec(name="bias", role="p", shape=(3,)),))


@pytest.mark.parametrize("kept", [0, 100, -30])
def test_weights_that_were_copied_in_part_are_told_without_advice_to_load_them_unsafely(
    kept: int, tmp_path: Path
) -> None:
    file = tmp_path / "weights.npz"
    np.savez(file, **{"w/bias": np.ones(3, np.float32)})  # type: ignore[arg-type]  # numpy's own keywords
    assert read_weights(tmp_path, SCHEMA)["bias"].tolist() == [1, 1, 1]
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ConfigError, match="it is damaged"):
        read_weights(tmp_path, SCHEMA)


@pytest.mark.parametrize("kind", [np.float64, np.int64])
def test_weights_of_another_kind_become_numbers_of_the_program(kind: type, tmp_path: Path) -> None:
    np.savez(tmp_path / "weights.npz", **{"w/bias": np.ones(3, kind)})  # type: ignore[arg-type]  # numpy's own keywords
    assert read_weights(tmp_path, SCHEMA)["bias"].dtype == np.float32


def test_what_is_no_real_number_is_refused_as_weights(tmp_path: Path) -> None:
    np.savez(tmp_path / "weights.npz", **{"w/bias": np.array(["a", "b", "c"])})  # type: ignore[arg-type]  # as above
    with pytest.raises(ConfigError, match="cannot be read"):
        read_weights(tmp_path, SCHEMA)
