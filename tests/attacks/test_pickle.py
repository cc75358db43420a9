"""Tries to have code run on arrival: a pickle, an .npz or a .zip with the right hash in place of a tensor file."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from edge_client.protocol.blocks import manifest_of
from edge_client.protocol.tensors import unpack_tensors
from tests.support.memory_limit import refused_within


class Bomb:
    """Touches a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("wrap", ["pickle", "npz", "zip", "length"])
def test_nothing_on_the_wire_is_ever_unpickled(wrap: str, tmp_path: Path) -> None:
    mark, buffer = tmp_path / "ran", io.BytesIO()
    if wrap == "npz":
        np.savez(buffer, x=np.array([Bomb(mark)], dtype=object))
    elif wrap == "zip":
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("../../data.pkl", pickle.dumps(Bomb(mark)))
    else:
        body = pickle.dumps(Bomb(mark))
        buffer.write(body if wrap == "pickle" else len(body).to_bytes(8, "little") + body)
    data = buffer.getvalue()
    assert manifest_of(data, "delta").size == len(data)
    assert refused_within(1 << 20, lambda: unpack_tensors(data)) == "bad_schema"
    assert not mark.exists()
