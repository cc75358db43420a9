"""The tiny program that `doctor` runs is the one that its source makes, so that no binary has to be trusted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edge_client.doctor import PROBE_FOLDER
from tests.boards.probe_source import compiled, files

SIZE_MAX = 20_000  # bytes of all three files


def plain(program: bytes) -> dict[str, Any]:
    """Without `parity`, which was measured when the program was made and differs with the machine."""
    return {key: value for key, value in json.loads(program).items() if key != "parity"}


@pytest.mark.slow
def test_the_shipped_probe_is_made_by_its_source_byte_for_byte() -> None:
    made = files(compiled())
    shipped = {path.name: path.read_bytes() for path in PROBE_FOLDER.iterdir() if path.is_file()}
    assert plain(made.pop("program.json")) == plain(shipped.pop("program.json"))
    assert sorted(made) == sorted(shipped)
    assert [name for name in made if made[name] != shipped[name]] == []
    assert sum(map(len, shipped.values())) < SIZE_MAX
