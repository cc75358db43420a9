"""docs/open-on-a-phone.md is right: its commands serve the page, and its figures are those of the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.identity.cli import WEB_PORT
from coordinator.phone import vendored_files
from edge_client.toml_files import parse_toml
from tests.support.doc_pages import DOCS, PageReader, blocks, followed
from tests.support.node import ROOT, third_party
from tests.support.ports import free_port

PAGE = "open-on-a-phone.md"
TEXT = (DOCS / PAGE).read_text(encoding="utf-8")
SAMPLES = (ROOT / "edge_client" / "web" / "data" / "samples.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def ports() -> dict[str, str]:
    return {"9001": str(free_port()), "8090": str(free_port()), '"embedded"': f'"embedded:{free_port()}"'}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, ports: dict[str, str]) -> Iterator[PageReader]:
    """A reader whose cache already has the third-party files."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.delenv(vendored_files.FOLDER_VARIABLE, raising=False)
        folder = vendored_files.default_folder()
        folder.parent.mkdir(parents=True)
        folder.symlink_to(third_party())
        with followed(PAGE, tmp_path_factory.mktemp("reader"), here=ports) as reader:
            yield reader


def test_the_commands_serve_a_page_that_knows_its_broker(reader: PageReader, ports: dict[str, str]) -> None:
    assert "everything is there" in reader.printed["fedcenters-coordinator web-files"]
    with urllib.request.urlopen(f"http://127.0.0.1:{ports['8090']}/phone/join.json", timeout=60) as answer:
        said = json.load(answer)
    assert said["broker"] == f"ws://127.0.0.1:{ports['9001']}"
    assert said["open"]


def test_the_devices_of_the_quick_start_are_made_for_this_federation_by_two_names(reader: PageReader) -> None:
    (script,) = (b.text for b in blocks(DOCS / "quick-start.md") if b.text.startswith("# two_devices.py"))
    (reader.folder / "two_devices.py").write_text(script, encoding="utf-8")
    (line,) = re.findall(r"^sed .*two_devices.*$", TEXT, flags=re.MULTILINE)
    subprocess.run(["sh", "-ec", f"{line}\n{sys.executable} phone_devices.py"], cwd=reader.folder, check=True)
    made = parse_toml((reader.folder / "pi-2" / "client.toml").read_text(encoding="utf-8"))
    assert made["federation"] == "demo"
    assert made["signing-keys"] == [(reader.folder / "run" / "signing.pub").read_text(encoding="ascii").strip()]


def test_provisioning_writes_what_the_page_lists(reader: PageReader) -> None:
    for name in re.findall(r"^\| `(keys/[^`]+)`", TEXT, flags=re.MULTILINE):
        assert (reader.folder / name).is_file(), name
    assert "listener 8884" in (reader.folder / "keys" / "broker" / "mosquitto.conf").read_text(encoding="utf-8")
    assert f"port {WEB_PORT} " in TEXT


def test_the_limits_are_those_of_the_code() -> None:
    (kept,) = re.findall(r"MAX_SAMPLES = ([\d_]+);", SAMPLES)
    assert f"at most {int(kept):,} samples" in TEXT
    assert "HELD_OUT = 5;" in SAMPLES
    assert "Chrome 137, Firefox 129, Safari 17" in Path(ROOT / "edge_client" / "web" / "main.js").read_text()


def test_nginx_sends_page_and_broker_to_where_they_listen() -> None:
    (server,) = (block.text for block in blocks(DOCS / PAGE) if block.text.startswith("server {"))
    sent = dict(re.findall(r"location (?:= )?(\S+) \{\s+proxy_pass (\S+);", server))
    assert sent == {"/phone": "http://127.0.0.1:8090", "/mqtt": f"https://127.0.0.1:{WEB_PORT}"}
    assert "phone phones.toml --listen 127.0.0.1:8090 --url https://home.example &" in TEXT
    assert '`web-broker = "wss://home.example/mqtt"`' in TEXT
    assert "proxy_ssl_verify on;" in server


def test_caddy_and_haproxy_send_them_there_too() -> None:
    assert f"        reverse_proxy https://127.0.0.1:{WEB_PORT} {{\n" in TEXT
    assert f"    server broker 127.0.0.1:{WEB_PORT} ssl verify required ca-file " in TEXT
    for page in ("    handle /phone* {\n        reverse_proxy 127.0.0.1:8090", "    server page 127.0.0.1:8090"):
        assert page in TEXT
