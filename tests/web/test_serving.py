"""What the coordinator serves to a phone, and where what is not ours comes from."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import re
import shutil
import tarfile
import xml.etree.ElementTree as ET
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import urljoin

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from starlette.applications import Starlette
from starlette.testclient import TestClient

from coordinator import local_broker as brokers
from coordinator.config import CoordinatorConfig, config_from_keys
from coordinator.config_sections import ModelConfig, RunConfig
from coordinator.identity import join_links
from coordinator.identity.signing_key import announce_next_key, open_signing_key, switch_key
from coordinator.phone import page_files, routes, server, vendored_files
from coordinator.storage.store import Store
from edge_client.errors import ConfigError, ProtocolError, RuntimeMissing
from edge_client.protocol.messages import canonical_json
from edge_client.protocol.program import Program
from tests.support import softmax_program
from tests.support.ports import free_port

PACKAGE = vendored_files.NpmPackage(
    name="thing", version="1.0.0", license="MIT", integrity="", archive_max=1 << 20, files=("a.mjs", "b.wasm")
)


def config(folder: Path, **more: object) -> CoordinatorConfig:
    given: dict[str, object] = {"broker": "mosquitto:1883", "web_port": 9001, "formats": (), **more}
    return config_from_keys(
        {"federation": "demo", "folder": folder, **{key.replace("_", "-"): value for key, value in given.items()}},
        model=ModelConfig(name="digits-mlp", engines=("onnx",)),
        runs=(RunConfig(method="fedavg", rounds=1, name="r"),),
    )


def third_party_files(parent: Path) -> Path:
    """A folder that looks like the third-party files."""
    folder = parent / "third"
    folder.mkdir()
    for name in vendored_files.VENDORED_FILES:
        (folder / name).write_bytes(b"export {};")
        (folder / f"{name}.gz").write_bytes(gzip.compress(b"export {};"))
    (folder / "packages.txt").write_text(vendored_files._stamp(vendored_files.NPM_PACKAGES))
    return folder


@pytest.fixture
def third(tmp_path: Path) -> Path:
    return third_party_files(tmp_path)


def client(folder: Path, third: Path, **more: object) -> TestClient:
    app = Starlette(routes=routes.phone_routes(config(folder, **more), third=third))
    return TestClient(app, base_url="http://127.0.0.1")


def third_folder(third: Path) -> str:
    """Where the page has third-party files."""
    return f"third/{page_files.read_page_files(third).third_version}"


def test_the_page_and_its_modules_have_their_types_and_guards(tmp_path: Path, third: Path) -> None:
    web = client(tmp_path, third)
    version, foreign = web.get("/phone/join.json").json()["page"], third_folder(third)
    types = {
        "": "text/html",
        "app.webmanifest": "application/manifest+json",
        "worker.js": "text/javascript",
        "join.json": "application/json",
        f"{version}/main.js": "text/javascript",
        f"{version}/protocol/json.js": "text/javascript",
        f"{version}/style.css": "text/css",
        f"{version}/icons/icon-192.png": "image/png",
        f"{foreign}/ort.wasm.min.mjs": "text/javascript",
        f"{foreign}/ort-wasm-simd-threaded.wasm": "application/wasm",
    }
    for name, kind in types.items():
        answer = web.get(f"/phone/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["content-type"].partition(";")[0] == kind
        assert answer.headers["cross-origin-opener-policy"] == "same-origin"
        assert answer.headers["cross-origin-embedder-policy"] == "require-corp"
        policy = answer.headers["content-security-policy"]
        assert "connect-src 'self' ws://127.0.0.1:9001;" in policy
        assert "unsafe-inline" not in policy
        assert "'unsafe-eval'" not in policy
        kept = answer.headers["cache-control"]
        assert ("immutable" in kept) == name.startswith((version, foreign)), name
        if kept == "no-cache":
            again = web.get(f"/phone/{name}", headers={"If-None-Match": answer.headers["etag"]})
            assert again.status_code == 304
    for name in (f"{foreign}/mqtt.esm.js", f"{version}/main.js", ""):
        plain, zipped = (
            web.get(f"/phone/{name}", headers={"Accept-Encoding": accepted}) for accepted in ("identity", "gzip")
        )
        assert "content-encoding" not in plain.headers
        assert zipped.headers["content-encoding"] == "gzip"
        assert plain.content == zipped.content
    assert web.get("/phone", follow_redirects=False).headers["location"] == "phone/"


def test_a_version_names_every_file_and_checks_what_is_kept_for_a_start_without_the_coordinator(
    tmp_path: Path, third: Path
) -> None:
    web = client(tmp_path, third)
    version = web.get("/phone/join.json").json()["page"]
    worker = web.get("/phone/worker.js").text
    head = dict(line.removeprefix("const ").split(" = ", 1) for line in worker.split(";\n", 2)[:2])
    assert json.loads(head["VERSION"]) == version
    kept = json.loads(head["FILES"])
    for address, integrity in kept.items():
        data = web.get(f"/phone/{address.removeprefix('./')}").content
        assert integrity == "sha256-" + base64.b64encode(hashlib.sha256(data).digest()).decode(), address
    page = web.get("/phone/").text
    assert set(re.findall(rf'"({version}/[^"]+)"', page)) <= kept.keys()
    icons = [each["src"] for each in web.get("/phone/app.webmanifest").json()["icons"]]
    assert set(icons) <= kept.keys()
    foreign = third_folder(third)
    assert f'<meta name="third-party" content="{foreign}/" />' in page
    assert len([each for each in kept if each.startswith(foreign)]) == len(vendored_files.VENDORED_FILES)
    (third / "mqtt.esm.js").write_bytes(b"export const changed = 1;")
    assert third_folder(third) != foreign
    other = client(tmp_path, third)
    assert other.get("/phone/join.json").json()["page"] != version
    assert other.get(f"/phone/{version}/main.js").status_code == 404


@pytest.mark.parametrize(
    "name",
    [
        "package.json",
        "main.js",
        "..%2fclient.py",
        "T/..%2fa",
        "T/packages.txt",
        "V/third/mqtt.esm.js",
        "third/V/mqtt.esm.js",
        "V/worker.js",
        "V/index.html",
    ],
)
def test_nothing_else_is_served(name: str, tmp_path: Path, third: Path) -> None:
    (tmp_path / "a").write_text("secret")
    web = client(tmp_path, third)
    version, foreign = web.get("/phone/join.json").json()["page"], third_folder(third)
    address = name.replace("V/", f"{version}/").replace("T/", f"{foreign}/")
    assert web.get(f"/phone/{address}").status_code == 404


def test_join_json_tells_public_facts_and_the_model_once_it_is_known(tmp_path: Path, third: Path) -> None:
    web, key = client(tmp_path, third), open_signing_key(tmp_path)
    said = web.get("/phone/join.json").json()
    assert said == {
        "federation": "demo",
        "broker": "ws://127.0.0.1:9001",
        "signing_keys": [key.public.hex()],
        "open": True,
        "page": page_files.read_page_files(third).version,
        "model": None,
    }
    program = store_program(tmp_path)
    model = web.get("/phone/join.json").json()["model"]
    assert model == {
        "name": program.model,
        "input": list(program.input),
        "target": list(program.target),
        "loss": program.loss,
    }


def test_join_json_follows_a_coordinator_that_changes_its_key_or_begins_anew(tmp_path: Path, third: Path) -> None:
    run = tmp_path / "run"
    web = client(run, third)
    store_program(run, input=(1, 8, 8))
    first = web.get("/phone/join.json").json()
    assert first["model"]["input"] == [1, 8, 8]
    announce_next_key(run)
    switched = web.get("/phone/join.json").json()["signing_keys"]
    assert switched[0] == first["signing_keys"][0]
    switch_key(run)
    assert web.get("/phone/join.json").json()["signing_keys"] == switched[1:]

    shutil.rmtree(run)
    assert web.get("/phone/join.json").status_code == 503
    assert not run.exists()
    other = open_signing_key(run).public.hex()
    said = web.get("/phone/join.json").json()
    assert (said["signing_keys"], said["model"]) == ([other], None)
    store_program(run, input=(1, 28, 28))
    assert web.get("/phone/join.json").json()["model"]["input"] == [1, 28, 28]


def test_join_json_tells_what_people_call_the_classes_where_the_catalog_has_room_for_it(
    tmp_path: Path, third: Path
) -> None:
    def classes_told(*names: str) -> list[str] | None:
        model = client(tmp_path, third, class_names=list(names)).get("/phone/join.json").json()["model"]
        return cast("list[str] | None", model.get("classes"))

    store_program(tmp_path)
    assert classes_told("walking", "gehen") == ["walking", "gehen"]
    assert classes_told("walking", "n" * 65) is None


def store_program(run: Path, **changes: Any) -> Program:  # noqa: ANN401 - of its fields
    program = replace(softmax_program.program(), **changes)
    with closing(Store(run / "store")) as store:
        named = store.blobs.put(canonical_json(program.to_json()))
        store.facts.put("program", json.dumps({"program": named, "initial": named}))
    return program


def test_a_broker_elsewhere_is_dialled_by_the_address_that_was_set_and_its_phones_need_links(
    tmp_path: Path, third: Path
) -> None:
    web = client(tmp_path, third, broker="mqtts://broker.example", web_port=0, web_broker="wss://broker.example:8884")
    said = web.get("/phone/join.json").json()
    assert (said["broker"], said["open"]) == ("wss://broker.example:8884", False)
    for wrong in ("https://broker.example", "wss://x; script-src *", "wss://"):
        with pytest.raises(ConfigError, match="web-broker"):
            routes.phone_routes(config(tmp_path, broker="mqtts://b", web_broker=wrong), third=third)
    with pytest.raises(ConfigError, match="no broker that a browser can dial"):
        routes.phone_routes(config(tmp_path, web_port=0), third=third)


def test_missing_files_say_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(RuntimeMissing, match="web-files"):
        routes.phone_routes(config(tmp_path), third=tmp_path)


def archive(files: dict[str, bytes], change: Callable[[tarfile.TarInfo], None] = lambda _: None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            change(info)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def pinned(data: bytes) -> vendored_files.NpmPackage:
    digest = base64.b64encode(hashlib.sha512(data).digest()).decode()
    return vendored_files.NpmPackage(**{**vars(PACKAGE), "integrity": f"sha512-{digest}"})


WHOLE = {"package/dist/a.mjs": b"a", "package/dist/b.wasm": b"b", "package/dist/c.js": b"c", "../evil.mjs": b"e"}


def test_only_the_named_files_of_the_pinned_archive_are_written(tmp_path: Path) -> None:
    data = archive(WHOLE)
    made = vendored_files.fetch_all(tmp_path / "out", fetch=lambda _url, _limit: data, packages=[pinned(data)])
    assert sorted(path.name for path in made) == ["a.mjs", "b.wasm"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("a.mjs", "a.mjs.gz", "b.wasm", "b.wasm.gz", "packages.txt")
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_archive_that_is_not_the_pinned_one_is_refused(tmp_path: Path) -> None:
    data = archive(WHOLE)
    with pytest.raises(ProtocolError, match="not the file"):
        vendored_files.fetch_all(tmp_path, fetch=lambda _url, _limit: data + b"x", packages=[pinned(data)])
    assert list(tmp_path.iterdir()) == []


def test_links_in_an_archive_are_no_files(tmp_path: Path) -> None:
    def linked(info: tarfile.TarInfo) -> None:
        info.type, info.linkname, info.size = tarfile.SYMTYPE, "/etc/passwd", 0

    data = archive(WHOLE, linked)
    with pytest.raises(ProtocolError, match=r"holds no a\.mjs"):
        vendored_files.fetch_all(tmp_path, fetch=lambda _url, _limit: data, packages=[pinned(data)])


def test_links_become_codes_for_terminals_and_pages() -> None:
    url = join_links.phone_link("http://127.0.0.1:8080/", device="web-0001", secret="a_b-c")  # noqa: S106 - of no device
    assert url == "http://127.0.0.1:8080/phone/#id=web-0001&secret=a_b-c"
    assert join_links.phone_link("http://h") == "http://h/phone/"
    terminal = join_links.qr_terminal(url).splitlines()
    assert len(terminal) > 15
    assert len({len(line) for line in terminal}) == 1
    root = ET.fromstring(join_links.qr_svg(url))  # noqa: S314 - our own text
    assert root.attrib["viewBox"].split()[2] == root.attrib["viewBox"].split()[3]


@pytest.mark.parametrize("kind", ["embedded", pytest.param("mosquitto", marks=pytest.mark.broker)])
def test_both_kinds_of_broker_listen_for_browsers(kind: str, tmp_path: Path) -> None:
    port = free_port()
    with brokers.start_broker(tmp_path, kind, web_ports=[port]) as broker:
        assert broker.web == (f"ws://127.0.0.1:{port}",)
        over_tcp = paho.Client(CallbackAPIVersion.VERSION2)
        browser = paho.Client(CallbackAPIVersion.VERSION2, transport="websockets")
        heard: list[bytes] = []

        def on_open(*_: object) -> None:
            over_tcp.subscribe("fc/v1/demo/st/+", qos=1)

        def on_subscribed(*_: object) -> None:
            browser.connect("127.0.0.1", port)

        def on_browser(*_: object) -> None:
            browser.publish("fc/v1/demo/st/p", b"here", qos=1)

        over_tcp.on_message = lambda *found: heard.append(found[2].payload)
        over_tcp.on_connect, over_tcp.on_subscribe, browser.on_connect = on_open, on_subscribed, on_browser
        over_tcp.connect("127.0.0.1", int(broker.url.rpartition(":")[2]))
        for _ in range(1000):
            over_tcp.loop(0.01)
            browser.loop(0.01)
            if heard:
                break
        browser.disconnect()
        over_tcp.disconnect()
    assert heard == [b"here"]


def test_the_page_without_its_slash_is_found_below_a_proxys_path(tmp_path: Path) -> None:
    with TestClient(
        Starlette(routes=routes.phone_routes(config(tmp_path), third=third_party_files(tmp_path)))
    ) as browser:
        found = browser.get("/phone", follow_redirects=False)
    assert found.status_code == 307
    assert urljoin("https://home.example/fed/phone", found.headers["location"]) == "https://home.example/fed/phone/"


def test_a_proxy_on_this_machine_may_open_all_the_connections_of_the_phones_behind_it() -> None:
    behind_a_proxy = server.connection_slots("127.0.0.1")
    assert sum(behind_a_proxy.take("127.0.0.1") for _ in range(1000)) == server.MAX_CONNECTIONS
    for_all = server.connection_slots("192.0.2.9")
    assert sum(for_all.take("192.0.2.1") for _ in range(1000)) == server.MAX_CONNECTIONS_PER_ADDRESS


def test_an_address_without_a_path_opens_the_page(tmp_path: Path, third: Path) -> None:
    web = TestClient(server.phone_app(config(tmp_path), third=third), base_url="http://127.0.0.1")
    opened = web.get("/")
    assert (opened.status_code, opened.url.path) == (200, "/phone/")
    assert "fedcenters on this phone" in opened.text


def test_a_flood_of_requests_that_read_the_database_is_refused_and_the_page_is_not(
    tmp_path: Path, third: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "FACTS_PER_S", 1e-6)
    monkeypatch.setattr(server, "FACTS_BURST", 2.0)
    web = TestClient(server.phone_app(config(tmp_path), third=third), base_url="http://127.0.0.1")
    paths = 3 * ["/phone/join.json"] + 3 * ["/phone/"]
    assert [web.get(path).status_code for path in paths] == [200, 200, 429, 200, 200, 200]


@pytest.mark.parametrize(
    ("listen", "link", "where"),
    [
        ("127.0.0.1:0", "127.0.0.1", "of this computer"),
        ("[::1]:0", "[::1]", "of this computer"),
        ("0.0.0.0:0", "127.0.0.1", "phones need --url"),
        ("[::]:0", "[::1]", "phones need --url"),
        ("192.0.2.9:0", "192.0.2.9", "on a phone"),
    ],
)
def test_the_printed_link_opens_the_page_that_is_served(
    listen: str,
    link: str,
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Opened:
        def getsockname(self) -> tuple[str, int]:
            return "", 8090

    monkeypatch.setattr(server, "open_listener", lambda *_, **__: Opened())
    monkeypatch.setattr(server, "phone_app", lambda _: Starlette())
    monkeypatch.setattr(server, "read_config", lambda _: config(tmp_path))
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    server.run_phone_server(tmp_path, listen, url="", certificate=None, key=None)
    told = capsys.readouterr()
    assert told.out == f"http://{link}:8090/phone/\n"
    assert where in told.err
