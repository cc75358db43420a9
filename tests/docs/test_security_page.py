"""docs/security.md is right: its commands run in order, and what it says is refused is refused in those words.

The page's broker.example is this machine here, and free ports take the place of 8883 and 8443.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import edge_client.transport.tls as tls_module
from coordinator import config as coordinator_config
from coordinator.cli import app
from coordinator.identity import signing_key
from coordinator.identity.certificate_authority import open_authority
from coordinator.identity.release_signature import read_signature
from coordinator.identity.revocation import revoked_names
from edge_client.config import load_config
from edge_client.protocol import signing
from edge_client.transport import broker_rights, mqtt
from edge_client.transport.tls import check_subject
from tests.support.doc_pages import DOCS, PageReader, blocks
from tests.support.guarded_broker import now
from tests.support.ports import free_port

PAGE = "security.md"
TEXT = (DOCS / PAGE).read_text(encoding="utf-8")
TYPED = [command for block in blocks(DOCS / PAGE) if block.kind == "sh" for command in block.commands]


@pytest.fixture(scope="module")
def here() -> dict[str, str]:
    return {"--host broker.example": f"--host localhost --port {free_port()} --enrol-port {free_port()}"}


def test_every_command_of_the_page_was_there_to_run() -> None:
    assert sum(len(block.commands) for block in blocks(DOCS / PAGE) if block.kind == "console") == 11


def test_the_folders_of_the_page_are_those_that_are_made(reader: PageReader) -> None:
    told = re.findall(r"^\| `keys/([\w/-]+)`", TEXT, flags=re.MULTILINE)
    assert {name.split("/")[0] for name in told} == {
        path.name for path in (reader.folder / "keys").iterdir() if path.is_dir()
    }
    assert all((reader.folder / "keys" / name).is_dir() for name in told)


def test_the_new_device_has_a_certificate_and_no_token(reader: PageReader) -> None:
    home = reader.folder / "keys" / "devices" / "pump-8"
    check_subject(home / "device.crt", name="pump-8", federation="demo")
    assert not (home / "token").exists()


def test_the_lost_device_is_revoked_and_the_renewed_one_is_not(reader: PageReader) -> None:
    authority = open_authority(reader.folder / "keys" / "authority", "demo", now())
    assert revoked_names(authority) == ["device-0002"]
    assert len(authority.certificates_of("device-0001")) == 2


def test_the_devices_pin_the_new_signing_key_alone(reader: PageReader) -> None:
    key = signing_key.open_signing_key(reader.folder / "keys" / "coordinator")
    assert len(list((reader.folder / "keys" / "coordinator").glob("signing-*.old"))) == 1
    for name in ("device-0000", "pump-8"):
        assert load_config(reader.folder / "keys" / "devices" / name / "client.toml", {}).signing_keys == (key.public,)


def test_the_client_of_the_page_is_signed_with_the_key_that_devices_pin(reader: PageReader) -> None:
    pinned = load_config(reader.folder / "keys" / "devices" / "device-0000" / "client.toml", {}).release_keys
    signature = read_signature(reader.folder / "client.tar", "demo")
    assert signature is not None
    assert signature["key"] == signing.key_id(pinned[0])


def test_the_configuration_of_the_page_is_one(reader: PageReader) -> None:
    settings = coordinator_config.read_config(reader.folder / "coordinator.toml", environ={})
    credentials = signing_key.coordinator_credentials(settings)
    tls_module.client_context(credentials, now())
    assert (
        signing_key.open_signing_key(settings.signing_key_folder).public.hex()
        in (reader.folder / "keys/devices/device-0000/client.toml").read_text()
    )


@pytest.mark.parametrize("line", [line for line in TYPED if line.startswith("fedcenters-coordinator")])
def test_a_command_that_goes_on_exists_with_its_options(line: str) -> None:
    words = shlex.split(line)
    helped = CliRunner().invoke(app, [words[1], "--help"], env={"COLUMNS": "200"})
    assert helped.exit_code == 0
    assert all(word in helped.output for word in words if word.startswith("--"))


def test_what_is_refused_is_said_in_these_words() -> None:
    told = re.findall(
        r"^\| `([^`]+)`(?:, `([^`]+)`)?(?: [^|]*)? \|", TEXT.split("## What is refused")[1], flags=re.MULTILINE
    )
    sentences = [words for row in told for words in row if words]
    sources = "".join(Path(module.__file__ or "").read_text() for module in (tls_module, mqtt, broker_rights))
    assert len(sentences) == 14
    assert [words for words in sentences if words not in sources] == []
