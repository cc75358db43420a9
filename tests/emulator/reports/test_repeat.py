"""How a run is played again: by its command, or in Python where a part of it is the user's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import Tensor, nn
from typer.testing import CliRunner

import fedcenters as fc
from emulator.cli import app
from emulator.config import CONFIG_FILE, GROUPS_FILE, read_table
from emulator.reports import comparison
from emulator.reports.repeat import repeat_in_python

METHOD = fc.FeSEM(2, local_steps=2)


class OwnModule(nn.Sequential):
    """The user's own module."""


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with the user's own samples and module."""
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    fleet = fc.fleet((x, np.arange(60) % 3), by=np.repeat(["anna", "ben", "cleo"], 20))
    model, out = OwnModule(nn.Linear(4, 3)), tmp_path_factory.mktemp("runs")
    return fc.simulate(METHOD, fleet=fleet, model=model, rounds=2, seed=3, out=out, name="mine").folder or out


def test_the_report_of_a_run_with_own_parts_says_how_python_repeats_it(mine: Path) -> None:
    page = comparison.comparison_page(comparison.read_runs(mine))
    again = page[page.index("How to see this again") :]
    assert "fc.simulate(fc.FeSEM(2, local_steps=2), fleet=fleet, model=model, rounds=2, seed=3)" in again
    assert "fedcenters-emulator simulate" not in again


def test_the_command_refuses_the_file_of_such_a_run_with_the_call_that_repeats_it(mine: Path) -> None:
    done = CliRunner().invoke(app, ["simulate", str(mine / "config.toml")])
    assert done.exit_code == 3
    assert "whose samples and model no command can find" in done.stderr
    assert "fc.simulate(fc.FeSEM(2, local_steps=2), fleet=fleet, model=model" in done.stderr


def test_samples_that_have_no_name_are_refused_with_a_word_about_python() -> None:
    done = CliRunner().invoke(app, ["simulate", "--data-set", "arrays"])
    assert done.exit_code == 2
    assert "run it there, as fc.simulate(" in done.stderr


def test_a_run_over_mqtt_is_repeated_in_a_federation(tmp_path: Path) -> None:
    for name in (CONFIG_FILE, GROUPS_FILE):
        (tmp_path / name).touch()
    asked = {"method": "fedavg", "data-set": "digits", "model": "OwnModule", "num-rounds": 4}
    call = "with fc.federation(model=model, fleet=fleet) as home: home.run(fc.FedAvg(), rounds=4, seed=0)"
    assert repeat_in_python(asked, tmp_path) == ("model", call)
    assert repeat_in_python({**asked, "model": "digits-mlp"}, tmp_path) is None


def squares(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - nn.functional.one_hot(labels, 3)).square().mean(1)


def test_a_loss_of_ones_own_stands_in_the_call_that_repeats_a_run(tmp_path: Path) -> None:
    """The call without it trained with the usual loss, without a word."""
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    fleet = fc.fleet((x, np.arange(60) % 3), by=np.arange(60) // 20)
    fc.simulate(METHOD, fleet=fleet, loss=squares, rounds=1, out=tmp_path, name="mine")
    call = "fc.simulate(fc.FeSEM(2, local_steps=2), fleet=fleet, loss=loss, rounds=1, seed=0)"
    settings = read_table(tmp_path / "mine" / "config.toml")
    assert repeat_in_python(settings, tmp_path / "mine") == ("samples and loss", call)


def test_a_method_of_main_is_repeated_in_python(tmp_path: Path) -> None:
    asked = {"method": "__main__:Mine", "data-set": "digits", "local-steps": 3}
    assert repeat_in_python(asked, tmp_path) == (
        "method",
        "fc.simulate(Mine(local_steps=3), fleet=fleet, rounds=10, seed=0)",
    )
