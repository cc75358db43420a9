from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edge_client.errors import ConfigError
from edge_client.protocol import compress
from edge_client.protocol.task import Schema, TensorSpec
from emulator.gallery import draw
from tests.emulator import story


def simulated(folder: Path, *, centers: int) -> Path:
    """What `simulate` leaves, made by hand."""
    schema = Schema((TensorSpec(name="head.weight", role="p", shape=(3, 2)),), ("head.weight",))
    (folder / "centers" / "fesem").mkdir(parents=True)
    for k in range(centers):
        blob = compress.encode(np.arange(6, dtype=np.float32) - k, schema, codec="f32", kind="model")
        (folder / "centers" / "fesem" / f"center-{k}.safetensors").write_bytes(blob)
    devices = {who: {"group": group, "labels": [3, 4]} for who, group in story.GROUPS.items()}
    (folder / "fleet.json").write_text(json.dumps({"classifier": ["head.weight"], "devices": devices}))
    lines = [json.dumps(story.round_event("fesem", t, 0.5, row)) for t, row in enumerate(story.ASSIGNMENTS, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(("centers", "cosines"), [(1, []), (3, ["cosines.png"])])
def test_a_run_gives_its_pictures_and_one_center_no_heat_map(tmp_path: Path, centers: int, cosines: list[str]) -> None:
    written = draw(simulated(tmp_path / "run", centers=centers), tmp_path / "pictures")
    assert [path.name for path in written] == ["labels.png", "curves.png", "assignment.png", *cosines]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


@pytest.mark.parametrize("lost", ["metrics.jsonl", "fleet.json", "centers/fesem/center-0.safetensors"])
def test_a_folder_that_lacks_a_file_is_no_simulated_run(tmp_path: Path, lost: str) -> None:
    run = simulated(tmp_path / "run", centers=1)
    (run / lost).unlink()
    with pytest.raises(ConfigError, match="no simulated run"):
        draw(run, tmp_path / "pictures")
