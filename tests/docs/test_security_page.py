"""docs/security.md tells the truth: its commands run in order, and what it says is refused is refused in those words.

The page's broker.example is this machine here, and free ports take the place of 8883 and 8443.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import edge_client.transport.tls as tls_module
from coordinator import config as coordinator_config
from coordinator.cli import app
from coordinator.identity import signing_key
from coordinator.identity.certificate_authority import open_authority
from coordinator.identity.revocation import revoked_names
from coordinator.local_broker import free_port
from edge_client.cli import main
from edge_client.config import load_config
from edge_client.transport import mqtt
from edge_client.transport.tls import check_subject
from tests.support.guarded_broker import now

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)
COMMANDS = [line.removeprefix("$ ") for kind, text in BLOCKS if kind == "console" for line in text.splitlines() if line]
TYPED = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which someone followed the page from top to bottom."""
    folder = tmp_path_factory.mktemp("reader")
    running: list[subprocess.Popen[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        try:
            for command in COMMANDS:
                words = shlex.split(command.removesuffix("&").replace("broker.example", "localhost"))
                if "--federation" in words:
                    words += ["--port", str(free_port()), "--enrol-port", str(free_port())]
                if command.endswith("&"):
                    running.append(started(words))
                else:
                    assert run(words) == 0, command
            yield folder
        finally:
            for process in running:
                process.terminate()
                process.communicate(timeout=30)


def run(words: list[str]) -> int:
    """A command in this process; -> its exit code."""
    if words[0] == "fedcenters-edge":
        return main(words[1:])
    return CliRunner().invoke(app, words[1:]).exit_code


def started(words: list[str]) -> subprocess.Popen[str]:
    """A command that goes on; returns when it has said its first word."""
    program = [sys.executable, "-m", "coordinator.cli", *words[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(program, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "tokens become certificates" in process.stderr.readline()
    return process


def test_every_command_of_the_page_was_there_to_run() -> None:
    assert len(COMMANDS) == 9


def test_the_folders_of_the_page_are_those_that_are_made(reader: Path) -> None:
    told = re.findall(r"^\| `keys/([\w/-]+)`", PAGE, flags=re.MULTILINE)
    assert {name.split("/")[0] for name in told} == {path.name for path in (reader / "keys").iterdir() if path.is_dir()}
    assert all((reader / "keys" / name).is_dir() for name in told)


def test_the_new_device_has_a_certificate_and_no_token(reader: Path) -> None:
    home = reader / "keys" / "devices" / "pump-8"
    check_subject(home / "device.crt", name="pump-8", federation="demo")
    assert not (home / "token").exists()


def test_the_lost_device_is_revoked_and_the_renewed_one_is_not(reader: Path) -> None:
    authority = open_authority(reader / "keys" / "authority", "demo", now())
    assert revoked_names(authority) == ["device-0002"]
    assert len(authority.certificates_of("device-0001")) == 2


def test_the_devices_pin_the_new_signing_key_alone(reader: Path) -> None:
    key = signing_key.open_signing_key(reader / "keys" / "coordinator")
    assert len(list((reader / "keys" / "coordinator").glob("signing-*.old"))) == 1
    for name in ("device-0000", "pump-8"):
        assert load_config(reader / "keys" / "devices" / name / "client.toml", {}).signing_keys == (key.public,)


def test_the_configuration_of_the_page_is_one(reader: Path) -> None:
    text = next(text for kind, text in BLOCKS if kind == "toml")
    (reader / "coordinator.toml").write_text(text)
    settings = coordinator_config.read_config(reader / "coordinator.toml", environ={})
    credentials = signing_key.coordinator_credentials(settings)
    tls_module.client_context(credentials, now())
    assert (
        signing_key.open_signing_key(settings.signing_key_folder).public.hex()
        in (reader / "keys/devices/device-0000/client.toml").read_text()
    )


@pytest.mark.parametrize("line", [line for line in TYPED if line.startswith("fedcenters-coordinator")])
def test_a_command_that_goes_on_exists_with_its_options(line: str) -> None:
    words = shlex.split(line)
    helped = CliRunner().invoke(app, [words[1], "--help"], env={"COLUMNS": "200"})
    assert helped.exit_code == 0
    assert all(word in helped.output for word in words if word.startswith("--"))


def test_what_is_refused_is_said_in_these_words() -> None:
    told = re.findall(
        r"^\| `([^`]+)`(?:, `([^`]+)`)?(?: [^|]*)? \|", PAGE.split("## What is refused")[1], flags=re.MULTILINE
    )
    sentences = [words for row in told for words in row if words]
    sources = "".join(Path(module.__file__ or "").read_text() for module in (tls_module, mqtt))
    assert len(sentences) == 8
    assert [words for words in sentences if words not in sources] == []


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([\w./-]+)\)", PAGE))))
def test_each_linked_file_exists(link: str) -> None:
    assert (ROOT / "docs" / link).resolve().is_file()
