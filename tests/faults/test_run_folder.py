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
from tests.support.one_round import ONE_ROUND
from tests.support.virtual_federation import Federation

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "coordinator.toml"
    path.write_text(ONE_ROUND)
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


def test_a_database_that_this_user_may_not_open_is_told_with_the_command_that_gives_it_to_them(config: Path) -> None:
    """Of a folder that root had copied, a file of root's ended `serve` with a traceback, "a bug of fedcenters"."""
    store = config.parent / "run" / "store"
    (store / "coordinator.sqlite").mkdir(parents=True)  # SQLite's words are those for a file of another user
    with pytest.raises(ConfigError, match="unable to open database file") as refused:
        open_store(read_config(config, environ={}))
    assert f"chown -R USER {config.parent / 'run'}" in refused.value.hint


@pytest.mark.parametrize(
    ("mount", "said", "code"),
    [
        ("mount -t tmpfs -o ro none run", "mount it writable again", 70),  # of a disk that failed: tried again
        ("mount -t tmpfs -o size=8k none run && head -c 8192 /dev/zero > run/filler", "disk is full", 70),
        ("rmdir run && touch run", "File exists", 3),
    ],
)
def test_serve_says_what_is_wrong_with_the_folder_and_what_to_do(
    config: Path, mount: str, said: str, code: int
) -> None:
    """In a mount namespace of its own, for which no root is needed where the kernel lets users have one."""
    done = with_a_disk(config.parent, mount, "serve coordinator.toml")
    assert done.returncode == code
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_of_keys_that_was_not_mounted_is_told_as_that(config: Path) -> None:
    """On a container's read-only root: exit code 70 and "that disk is read-only: name a folder of another one"."""
    config.write_text(f'signing-folder = "etc/keys"\n{ONE_ROUND}')
    (config.parent / "etc").mkdir()
    done = with_a_disk(config.parent, "mount -t tmpfs -o ro none etc", "serve coordinator.toml")
    assert done.returncode == 3, done.stderr
    assert f"there is no {config.parent / 'etc/keys/signing.key'}, and none can be made there" in done.stderr
    assert "correct `signing-folder`" in done.stderr


def with_a_disk(folder: Path, mount: str, command: str) -> subprocess.CompletedProcess[str]:
    """The coordinator's command in `folder`, after `mount`, in a mount namespace of its own."""
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this system gives users no mount namespaces")
    line = f"{mount} && exec {sys.executable} -m coordinator {command}"
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    return subprocess.run([*inside, "sh", "-c", line], cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_status_reads_a_run_on_a_full_disk(tmp_path: Path) -> None:
    """SQLite has no room there for the file that it keeps beside a database: a traceback, "a bug of fedcenters"."""
    Federation.of(tmp_path).play()
    fill = "mount -t tmpfs -o size=2m none small && cp -r run small && ! head -c 4000000 /dev/zero > small/filler"
    (tmp_path / "small").mkdir()
    done = with_a_disk(tmp_path, fill, "status small/run")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert "round 2/2" in done.stdout
