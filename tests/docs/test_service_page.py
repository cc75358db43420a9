"""docs/run-as-a-service.md is right: its commands run as they stand, together, and what it lists exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.config import read_config
from coordinator.config_sections import RoundConfig
from coordinator.rounds.asynchronous.options import check_asynchronous
from coordinator.strategies.registry import make_method
from edge_client.errors import ConfigError
from tests.support.patience import patience

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "run-as-a-service.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)
CONFIG, WITHOUT_ROUNDS = (text for kind, text in BLOCKS if kind == "toml")
COMMANDS = [text.removeprefix("$ ").strip() for kind, text in BLOCKS if kind == "console"]
PATIENCE_S = patience(400)


def started(command: str, folder: Path) -> subprocess.Popen[str]:
    """A command of the page as a process; console scripts are modules here."""
    program, *arguments = shlex.split(command)
    module = {"fedcenters-coordinator": "coordinator", "fedcenters-emulator": "emulator"}[program]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments], cwd=folder, stdout=pipe, stderr=pipe, text=True, env=env
    )


def test_the_commands_of_the_page_train_a_fleet_and_tell_of_it(tmp_path: Path, free_port: int) -> None:
    config = tmp_path / "coordinator.toml"
    config.write_text(CONFIG.replace('"embedded"', f'"embedded:{free_port}"'), encoding="utf-8")
    serve, status, fleet = COMMANDS
    with started(serve, tmp_path) as service, started(fleet, tmp_path) as devices:
        try:
            _, said = devices.communicate(timeout=PATIENCE_S)
            assert devices.returncode == 0, said
            _, said = service.communicate(timeout=PATIENCE_S)
            assert service.returncode == 0, said
        finally:
            for process in (devices, service):
                process.kill()
    with started(status, tmp_path) as told:
        out, said = told.communicate(timeout=PATIENCE_S)
    assert told.returncode == 0, said
    assert "federation home, epoch 1: stopped, all runs are done" in out
    assert "fedavg (fedavg): round 2/2, accuracy" in out


def test_the_lines_for_a_run_without_rounds_are_accepted_in_the_place_of_those_that_the_page_names(
    tmp_path: Path,
) -> None:
    path, added = tmp_path / "coordinator.toml", CONFIG.replace("[model]", f"{WITHOUT_ROUNDS}\n[model]")
    path.write_text(added, encoding="utf-8")
    with pytest.raises(ConfigError, match="concurrency with over-select"):
        read_config(path)
    replaced = re.findall(r"in place of `([\w-]+)` and of each run's `([\w-]+)`", PAGE)[0]
    path.write_text(
        "".join(line for line in added.splitlines(keepends=True) if not line.startswith(replaced)), encoding="utf-8"
    )
    config = read_config(path)
    assert config.round.asynchronous
    for run in config.runs:
        check_asynchronous(make_method(run.method, **run.settings), {})


KEPT = {"federation": '"other"', "seed": "7", "codec": '"f32"', "over-select": "1.5", "evaluate-every": "2"}
KEPT |= {"fraction-evaluate": "0.5", "teach-newcomers": "true", "concurrency": "3"}
FREE = {"deadline-s": "9", "quorum": "0.5", "formats": '["onnx"]', "min-devices": "3", "credits": "2"}


def test_the_page_lists_the_settings_that_a_folder_keeps(tmp_path: Path) -> None:
    (told,) = re.findall(r"that began it: (.*?); the message of a refused start", PAGE, flags=re.DOTALL)
    assert set(re.findall(r"`\[*([a-z-]+)\]*`", told)) == {*KEPT, "model", "runs"}
    path, text = tmp_path / "coordinator.toml", re.sub(r"^over-select.*\n", "", CONFIG, flags=re.MULTILINE)
    path.write_text(text, encoding="utf-8")
    before = read_config(path).fingerprint()
    for key, value in (KEPT | FREE).items():
        others = re.sub(rf"^{key} = .*\n", "", text, flags=re.MULTILINE)
        path.write_text(f"{key} = {value}\n{others}", encoding="utf-8")
        assert (read_config(path).fingerprint() != before) == (key in KEPT), key


def test_every_setting_of_the_page_is_one(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.toml"
    path.write_text(CONFIG, encoding="utf-8")
    config = read_config(path)
    plan = config.round
    assert (plan.over_select, plan.fraction_connected, plan.below_quorum) == (1.3, 0.5, "continue")
    defaults = re.findall(r"\| `([a-z-]+)` \| the file; ([\d.]+) \|", PAGE)
    assert defaults
    for key, value in defaults:
        assert getattr(RoundConfig, key.replace("-", "_")) == float(value)
