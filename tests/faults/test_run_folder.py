"""What another program left at the place of the run folder: links, a file, a disk without room or without the right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.config import read_config
from coordinator.service import open_store
from coordinator.storage.event_log import EventLog
from coordinator.storage.store import Store
from edge_client.errors import ConfigError

CONFIG = """\
federation = "home"
broker = "embedded"
folder = "run"
formats = []
[model]
name = "digits-mlp"
engines = ["onnx"]
[[runs]]
method = "fedavg"
num-rounds = 1
"""
ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "coordinator.toml"
    path.write_text(CONFIG)
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("precious\n")
    return path


def test_a_link_in_the_place_of_the_settings_is_replaced_and_not_followed(config: Path) -> None:
    run = config.parent / "run"
    (run / "config.toml").symlink_to(config.parent / "precious")
    open_store(read_config(config, environ={})).close()
    assert (config.parent / "precious").read_text() == "precious\n"
    assert 'federation = "home"' in (run / "config.toml").read_text()
    assert not (run / "config.toml").is_symlink()


def test_a_start_that_is_refused_leaves_the_settings_of_the_folder_as_they_are(config: Path) -> None:
    """They are what `fedcenters-export bundle` reads of the run."""
    settings = read_config(config, environ={})
    other = replace(settings, seed=1)
    with closing(open_store(settings)) as store:
        kept = (settings.folder / "config.toml").read_bytes()
        with pytest.raises(ConfigError, match="in use by another coordinator"):
            open_store(other)
        store.facts.put("lesson", json.dumps(settings.fingerprint(), sort_keys=True))
    with pytest.raises(ConfigError, match="other settings: seed = 0, now 1"):
        open_store(other)
    assert (settings.folder / "config.toml").read_bytes() == kept
    open_store(settings).close()  # it is not locked


def test_a_link_in_the_place_of_the_log_is_refused_and_not_followed(config: Path) -> None:
    run = config.parent / "run"
    (run / "metrics.jsonl").symlink_to(config.parent / "precious")
    store = Store(run / "store")
    try:
        with pytest.raises(ConfigError, match=r"metrics\.jsonl is a link"):
            EventLog(run / "metrics.jsonl", store.events, lambda _: None, lambda: 0).write("start")
    finally:
        store.close()
    assert (config.parent / "precious").read_text() == "precious\n"


@pytest.mark.parametrize(
    ("mount", "said", "code"),
    [
        ("mount -t tmpfs -o ro none run", "Read-only file system", 3),
        ("mount -t tmpfs -o size=8k none run && head -c 8192 /dev/zero > run/filler", "disk is full", 70),
        ("rmdir run && touch run", "File exists", 3),
    ],
)
def test_serve_says_what_is_wrong_with_the_folder_and_what_to_do(
    config: Path, mount: str, said: str, code: int
) -> None:
    """In a mount namespace of its own, for which no root is needed where the kernel lets users have one."""
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this system gives users no mount namespaces")
    serve = f"{mount} && exec {sys.executable} -m coordinator.cli serve coordinator.toml"
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    command = [*inside, "sh", "-c", serve]
    done = subprocess.run(command, cwd=config.parent, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
