"""Slips of those who write Python: each is told by what is wrong, and does nothing else."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedcenters as fc
from edge_client.errors import ConfigError, UsageError

RNG = np.random.default_rng(0)
FLEET = fc.fleet((RNG.normal(size=(60, 3)), np.arange(60) % 3), by=np.repeat([1, 2, 3], 20))


def run(**options: Any) -> fc.Result:  # noqa: ANN401 - those of `simulate`
    return fc.simulate(fc.FedAvg(local_steps=1), fleet=FLEET, progress=False, **{"rounds": 1, **options})


def test_a_fleet_of_ones_own_samples_goes_to_another_process() -> None:
    """It ended in "Can't pickle local object", where a pool of processes runs one seed each."""
    again = pickle.loads(pickle.dumps(FLEET))  # noqa: S301 - our own
    assert again.name(2) == "device-2"
    np.testing.assert_array_equal(again["device-2"].train.x, FLEET["device-2"].train.x)


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (lambda r: r.history["accuracy"] > 0.9, "Series"),
        (lambda _: torch.tensor([True, False]), "Tensor"),
        (lambda _: pd.NA, "NAType"),
    ],
    ids=["column", "tensor", "NA"],
)
def test_what_a_callback_returns_is_one_truth_value(made: Callable[[fc.Result], Any], kind: str) -> None:
    """A column of the history, as in `r.history["accuracy"] > 0.9`, ended in an error of pandas."""
    with pytest.raises(UsageError, match=f"on_round returned {kind}") as told:
        run(rounds=2, on_round=made)
    assert "r.accuracy > 0.9" in told.value.hint


@pytest.mark.parametrize("name", ["..", "a/../../b", "/tmp/elsewhere"])  # noqa: S108 - it is refused
def test_the_name_of_a_run_does_not_leave_its_folder(tmp_path: Path, name: str) -> None:
    """`..` asked to delete the folder above."""
    with pytest.raises(UsageError, match="name is"):
        run(out=tmp_path / "runs", name=name)
    assert not (tmp_path / "runs").exists()


def test_a_folder_of_other_files_is_not_asked_to_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`save(".")` made a folder of another name in it."""
    (tmp_path / "notes").write_text("mine")
    monkeypatch.chdir(tmp_path)
    for place in (".", tmp_path):
        with pytest.raises(UsageError, match="that can be read") as told:
            run().save(place)
        assert "delete" not in told.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


@pytest.mark.parametrize("name", ["pictures.npz", "newcomers/guide.json"])
def test_a_damaged_file_of_a_run_is_named(tmp_path: Path, name: str) -> None:
    """The error named no folder: "bad_json: not strict JSON", or a ValueError."""
    file = run().save(tmp_path / "mine") / name
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ConfigError, match=f"mine/{name} cannot be read") as told:
        fc.load(tmp_path / "mine")
    assert "save the run again" in told.value.hint
