"""docs/plug-ins.md and docs/runs.md are right: followed from top to bottom, they end where they say."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.rounds.round_record import RoundRecord, _Measured
from emulator.data import registry
from emulator.data.partition_schemes import parse_scheme
from tests.support.doc_pages import DOCS, PageReader, blocks, followed

PAGE = "runs.md"
LINES = 30
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def plugged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageReader]:
    with followed("plug-ins.md", tmp_path_factory.mktemp("plug-ins")) as reader:
        yield reader


def test_no_example_of_a_plug_in_has_thirty_lines() -> None:
    examples = [block for block in blocks(DOCS / "plug-ins.md") if block.kind == "python"]
    assert len(examples) == 10
    assert all(len(block.text.splitlines()) < LINES for block in examples)


def test_the_readers_own_objects_train(plugged: PageReader) -> None:
    method, falling, scratch, centers, own, model, data_set, partition = (
        text for c, text in plugged.printed.items() if " simulate " in c
    )
    assert "slow:Slow, 2 rounds" in method
    assert "falling:Falling, 2 rounds" in falling
    assert "cosine:Cosine, 2 rounds" in scratch
    assert "without devices" not in scratch
    assert "soft:Soft, 2 rounds" in centers
    assert "own_models:OwnModels, 2 rounds" in own
    assert "accuracy as served" in own
    assert "Rand index 1.000" in model
    assert "2 rounds, 8 devices" in data_set
    assert "Rand index 1.000" in data_set
    assert "Rand index 1.000" in partition


def test_no_two_devices_of_the_readers_own_partition_share_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = [block.text for block in blocks(DOCS / "plug-ins.md") if block.kind == "python"]
    (tmp_path / "halves.py").write_text(next(text for text in examples if text.startswith("# halves.py")))
    monkeypatch.syspath_prepend(tmp_path)
    data = registry.load_data_set("digits")
    split = parse_scheme("halves:Halves").split(data, devices=6, seed=0)
    parts = [part for local in split.devices.values() for part in (local.train, local.test) if part is not None]
    held = Counter(sample.tobytes() for part in parts for sample in part.x)
    assert held.total() == len(data.train.y)
    assert max(held.values()) == 1


def test_a_table_of_the_readers_own_has_a_row_for_the_readers_method(plugged: PageReader) -> None:
    (printed,) = (text for c, text in plugged.printed.items() if " experiment " in c)
    written = (plugged.folder / "own-results.md").read_text()
    for row in ("| FedAvg |", "| Slow |"):
        assert row in printed
        assert row in written
    assert len(list((plugged.folder / "runs/experiments/own-table").glob("*.json"))) == 4


def test_the_wrong_key_is_answered_as_the_page_says(reader: PageReader, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="unknown key 'num-round'"):
        reader.run("fedcenters-emulator simulate run.toml -c num-round=3")
    texts = [block.text for block in blocks(DOCS / "runs.md") if block.kind == "text"]
    (said,) = (text for text in texts if "num-round'" in text)
    assert "did you mean 'num-rounds'?" in said


def test_every_file_of_the_table_is_there(reader: PageReader) -> None:
    run = reader.folder / "runs" / "simulate-wecfl-0"
    for name in ("config.toml", "metrics.jsonl", "fleet.json", "pictures.npz", "checkpoint/run.json"):
        assert (run / name).is_file()
    assert list(run.glob("centers/wecfl/center-*.safetensors"))
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 4


def test_every_file_of_a_folder_is_in_the_table(reader: PageReader) -> None:
    table = (DOCS / PAGE).read_text(encoding="utf-8").split("\n| file | content |")[1].split("\n\n")[0]
    listed = {
        name.partition("/")[0] for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])
    }
    for run in ("simulate-wecfl-0", "mqtt-ifca-0", "simulate-fesem-0"):
        assert {path.name for path in (reader.folder / "runs" / run).iterdir()} <= listed | {"tensorboard"}


def test_every_field_of_a_round_is_in_the_table(reader: PageReader) -> None:
    table = (DOCS / PAGE).read_text(encoding="utf-8").split("\n| field | content |\n")[1].split("\n\n")[0]
    listed = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    assert listed == (set(RoundRecord.__annotations__) | set(_Measured.__annotations__) | {"real_seconds"}) - {"event"}
    written = (reader.folder / "runs" / "simulate-wecfl-0" / "metrics.jsonl").read_text().splitlines()
    assert set(json.loads(written[-1])) <= listed | {"event"}


def test_the_page_and_the_trackers_files_are_where_they_are_said_to_be(reader: PageReader) -> None:
    assert "simulate-fedavg-0" in (reader.folder / "both.html").read_text()
    assert list(Path(reader.folder / "runs" / "simulate-fesem-0" / "tensorboard").rglob("events.*"))
