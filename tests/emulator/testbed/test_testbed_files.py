"""What the demo writes is what the programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.config import read_config
from edge_client.config import load_config
from edge_client.data.dataset import load_folder as load_data
from edge_client.errors import ConfigError
from emulator.data.fleet_split import digits_fleet
from emulator.testbed import testbed_files

KEY = "ab" * 32


def test_a_device_finds_its_own_samples_and_no_others(tmp_path: Path) -> None:
    split = digits_fleet(3, 0, 3, 5)
    for cid, local in split.devices.items():
        testbed_files.write_device(tmp_path, cid, local, engine="onnx", broker="mqtt://127.0.0.1:1", key=KEY)
    for cid, local in split.devices.items():
        config = load_config(tmp_path / cid / "config.toml", {})
        found = load_data(config.data)
        assert found.test is not None
        assert local.test is not None
        assert (config.device_id, config.engine, config.signing_keys) == (cid, "onnx", (bytes.fromhex(KEY),))
        np.testing.assert_array_equal(found.train.x, local.train.x)
        np.testing.assert_array_equal(found.test.y, local.test.y)


def test_the_coordinators_file_is_understood_by_the_coordinator(tmp_path: Path) -> None:
    path = tmp_path / "work" / "coordinator.toml"
    testbed_files.write_coordinator(
        path,
        tmp_path,
        broker="mqtt://127.0.0.1:1",
        devices=12,
        runs=testbed_files.demo_runs(8),
        seed=3,
    )
    config = read_config(path, environ={})
    assert [(run.method, run.rounds) for run in config.runs] == [("fesem", 8), ("fedavg", 8)]
    assert (config.fleet.min_devices, config.seed, config.folder) == (12, 3, tmp_path)
    assert config.bundle.reference == path.with_name(testbed_files.REFERENCE_FILE)


def test_half_the_devices_train_with_onnx_and_a_quarter_each_with_the_others() -> None:
    engines = [testbed_files.engine_for(i) for i in range(12)]
    assert [engines.count(e) for e in ("onnx", "litert", "pt2")] == [6, 3, 3]


def test_a_folder_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    names = [testbed_files.new_folder(tmp_path, "demo").name for _ in range(3)]
    assert names == ["demo", "demo-2", "demo-3"]


def test_a_folder_that_another_process_makes_at_the_same_time_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir

    def later(self: Path, **how: Any) -> None:  # noqa: ANN401 - as of mkdir
        if self.name == "demo":
            make(self)
        make(self, **how)

    monkeypatch.setattr(Path, "mkdir", later)
    assert testbed_files.new_folder(tmp_path, "demo").name == "demo-2"


def test_a_place_where_nothing_can_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="hint: choose another folder"):
        testbed_files.new_folder(tmp_path / "file", "demo")
