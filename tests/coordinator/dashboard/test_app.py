"""The dashboard over HTTP: what it answers, what its stream holds, and what it leaves behind."""

from __future__ import annotations

import datetime as dt
import http.client
import json
import socket
import ssl
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from starlette.testclient import TestClient

from coordinator.dashboard import event_hub as hubs
from coordinator.dashboard.app import create_app
from coordinator.dashboard.endpoint import LINK_FILE
from coordinator.dashboard.join import join_info
from coordinator.dashboard.side_panels import SidePanels
from coordinator.identity.certificate_authority import open_authority
from coordinator.phone.vendored_files import FOLDER_VARIABLE
from coordinator.storage.exchange_store import ExchangeKey
from edge_client.errors import NetworkError
from edge_client.transport.keys import open_private_key
from tests.coordinator.dashboard.test_displayed_metrics import EXCHANGE, joined, round_event, seen
from tests.coordinator.dashboard.test_endpoint import token
from tests.support.served_dashboard import PATIENCE_S, Anything, DashboardSite, RecordedControl, serve_dashboard
from tests.support.virtual_federation import config


@pytest.fixture
def site(tmp_path: Path) -> Iterator[DashboardSite]:
    with serve_dashboard(tmp_path) as found:
        yield found


def messages(response: http.client.HTTPResponse, count: int) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    while len(found) < count:
        line = response.readline().decode()
        if line.startswith("event: "):
            data = response.readline().decode()
            found.append((line[7:].strip(), json.loads(data[6:])))
    return found


def test_a_page_gets_a_snapshot_and_then_what_happens(site: DashboardSite) -> None:
    site.hub.event(joined(1))
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=PATIENCE_S)
    connection.request("GET", "/api/stream")
    response = connection.getresponse()
    assert response.headers["content-type"].startswith("text/event-stream")
    ((kind, snapshot),) = messages(response, 1)
    assert (kind, snapshot["fleet"]["ids"]) == ("snapshot", ["d1"])
    site.hub.event(round_event(1, [0, 1]))
    found = dict(messages(response, 2))
    assert found["round"]["line"]["round"] == 1
    connection.close()


def test_a_page_that_reads_nothing_is_left_behind_and_costs_nobody_else(
    site: DashboardSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hubs, "MAX_QUEUED_MESSAGES", 8)
    with socket.create_connection(("127.0.0.1", site.port)) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(f"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1:{site.port}\r\n\r\n".encode())
        assert deaf.recv(15) == b"HTTP/1.1 200 OK"
        for _ in range(400):
            site.hub.broadcast("event", {"event": "long", "text": "x" * 20_000})
        assert all(len(page._messages) <= 8 for page in site.hub._pages)
        assert site.ask("GET", "/")[0] == 200


def test_there_is_room_for_so_many_pages_and_no_more(site: DashboardSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "MAX_PAGES", 1)
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=PATIENCE_S)
    connection.request("GET", "/api/stream")
    messages(connection.getresponse(), 1)
    assert site.ask("GET", "/api/stream")[0] == 503
    connection.close()


def test_as_many_pages_as_there_may_be_leave_a_proxy_connections_for_their_buttons(site: DashboardSite) -> None:
    with ExitStack() as stack:
        for _ in range(hubs.MAX_PAGES):
            page = stack.enter_context(closing(http.client.HTTPConnection("127.0.0.1", site.port, timeout=PATIENCE_S)))
            page.request("GET", "/api/stream")
            assert page.getresponse().status == 200
        assert site.order({"do": "pause"}) == 200


def test_the_buttons_reach_the_coordinator(site: DashboardSite) -> None:
    assert [site.order({"do": do}) for do in ("pause", "resume", "stop")] == [200, 200, 200]
    assert site.buttons.asked == ["pause", "resume", "stop"]


def test_the_log_says_which_orders_came_from_the_page(site: DashboardSite, caplog: pytest.LogCaptureFixture) -> None:
    site.order({"do": "close"})  # refused: it names no exchange
    site.order({"do": "stop"})
    assert [record.getMessage() for record in caplog.records] == ["ordered on the dashboard: stop"]


def test_only_the_exchange_that_was_seen_is_closed(site: DashboardSite) -> None:
    wanted = {"id": "1f", "round": 3, "exchange": 0}
    assert site.order({"do": "close", "exchange": wanted}) == 409
    site.hub.status(seen(exchange=EXCHANGE))
    assert site.order({"do": "close", "exchange": {**wanted, "round": 2}}) == 409
    assert site.order({"do": "close"}) == 400
    assert site.order({"do": "close", "exchange": wanted}) == 200
    assert site.buttons.asked == [ExchangeKey("1f", 3, 0)]


@pytest.mark.parametrize(
    "order", [{"do": "explode"}, {}, [], "pause", {"do": ["pause"]}, {"do": "close", "exchange": {"id": 1}}]
)
def test_what_is_no_order_is_refused(site: DashboardSite, order: Anything) -> None:
    assert site.order(order) == 400
    assert site.buttons.asked == []


def test_a_device_and_the_assignments_can_be_asked_for(site: DashboardSite) -> None:
    site.hub.event(round_event(1, [0, 1]))
    status, _, body = site.ask("GET", "/api/device/d1")
    assert (status, json.loads(body)["runs"]["fesem"][0]["center"]) == (200, 1)
    assert json.loads(site.ask("GET", "/api/grid?run=fesem")[2])["rows"] == ["0", "1"]
    assert site.ask("GET", "/api/device/nobody")[0] == 404
    assert site.ask("GET", "/api/grid?run=none")[0] == 404


def test_a_round_whose_map_nobody_asked_for_yet_has_none_and_says_so_without_an_error(site: DashboardSite) -> None:
    site.hub.event(round_event(1, [0, 1]))
    assert site.ask("GET", "/api/map?run=fesem")[2] == b'{"map":null,"missing":null}'


def test_what_a_new_device_needs_holds_no_secret(site: DashboardSite) -> None:
    told = json.loads(site.ask("GET", "/api/join")[2])
    assert 'federation = "test"' in told["config"]
    assert (site.folder / "signing.pub").read_text().strip() in told["config"]
    assert (site.folder / "signing.key").read_text().strip() not in json.dumps(told)


def test_links_are_https_where_a_proxy_speaks_it_for_the_dashboard() -> None:
    panels = SidePanels(None, None, lambda base: {"base": base})
    app = create_app(hubs.Hub(), RecordedControl(), read_token=None, control_token=None, panels=panels)
    web = TestClient(app, base_url="http://localhost:8080")
    for header, scheme in ((None, "http"), ("https", "https"), ("javascript", "http")):
        told = web.get("/api/join", headers={} if header is None else {"X-Forwarded-Proto": header})
        assert told.json() == {"base": f"{scheme}://localhost:8080"}


def test_a_missing_page_for_phones_is_told_where_a_broker_for_browsers_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "nothing"))
    with serve_dashboard(tmp_path / "without"):
        assert caplog.records == []
    with serve_dashboard(tmp_path / "with", web_broker="ws://127.0.0.1:9001") as site:
        assert site.ask("GET", "/phone/")[0] == 404
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.startswith("no page for phones: the phone's page needs ")
    assert "fedcenters-coordinator web-files" in told


def test_the_link_lies_in_the_run_folder_for_its_owner_alone_and_goes_with_the_server(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with serve_dashboard(tmp_path) as site:
        path = site.folder / LINK_FILE
        assert path.read_text().strip() == site.link
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        begun = set(threading.enumerate()) - before
        assert begun
    assert not path.exists()
    for thread in begun:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in begun)


def test_a_taken_port_is_told_with_what_to_do(tmp_path: Path, free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)) as taken:
        assert taken
        with (
            pytest.raises(NetworkError, match=r"cannot listen on .*: the port is in use"),
            serve_dashboard(tmp_path, dashboard=str(free_port)),
        ):
            raise AssertionError("it listens")


def test_a_read_token_opens_reading_and_nothing_else(tmp_path: Path) -> None:
    tokens = {"dashboard_read_token": token(tmp_path, "read"), "dashboard_control_token": token(tmp_path, "control")}
    with serve_dashboard(tmp_path, **tokens) as site:
        read = {"Authorization": f"Bearer {tokens['dashboard_read_token'].read_text()}"}
        assert site.ask("GET", "/")[0] == 200
        assert site.ask("GET", "/api/join")[0] == 401
        assert site.ask("GET", "/api/join", headers=read)[0] == 200
        assert site.ask("GET", "/api/join", headers={"Authorization": f"Bearer {site.control}"})[0] == 200
        assert site.order({"do": "pause"}, authorization=read["Authorization"]) == 401
        assert site.order({"do": "pause"}) == 200


def test_for_others_to_see_it_is_served_with_tls_and_a_token(tmp_path: Path) -> None:
    now = dt.datetime.now(dt.timezone.utc)
    authority = open_authority(tmp_path / "ca", "test", now)
    private = open_private_key(tmp_path / "server.key")
    certificate = authority.issue_server(private.public_key(), "dashboard", ["127.0.0.1"], now)
    (tmp_path / "server.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    settings = {
        "dashboard": "0.0.0.0:0",
        "dashboard_certificate": tmp_path / "server.pem",
        "dashboard_key": tmp_path / "server.key",
        "dashboard_read_token": token(tmp_path, "read"),
        "dashboard_control_token": token(tmp_path, "control"),
    }
    with serve_dashboard(tmp_path, **settings) as site:
        trusted = ssl.create_default_context(cafile=str(authority.folder / "ca.crt"))
        connection = http.client.HTTPSConnection("127.0.0.1", site.port, timeout=PATIENCE_S, context=trusted)
        answers = []
        for headers in ({}, {"Authorization": f"Bearer {site.control}"}):
            connection.request("GET", "/api/join", headers=headers)
            response = connection.getresponse()
            response.read()
            answers.append(response.status)
        connection.close()
        assert answers == [401, 200]
        with pytest.raises((http.client.HTTPException, OSError)):
            site.ask("GET", "/")  # not encrypted


def test_the_bundle_is_listed_and_each_file_of_its_manifest_is_served(site: DashboardSite) -> None:
    assert site.ask("GET", "/api/files")[2] == b'{"files":[]}'
    bundle, entry = site.folder / "bundle", {"path": "centers/model.onnx", "size": 5, "sha256": "0" * 64}
    manifest = json.dumps({"program": entry, "containers": [], "reference": None, "centers": []}).encode()
    (bundle / "centers").mkdir(parents=True)
    for path, data in (("manifest.json", manifest), ("centers/model.onnx", b"model"), ("notes", b"of the owner")):
        (bundle / path).write_bytes(data)
    listed = [{"path": "manifest.json", "size": len(manifest), "sha256": ""}, entry]
    assert json.loads(site.ask("GET", "/api/files")[2]) == {"files": listed}
    for path, data in (("manifest.json", manifest), ("centers/model.onnx", b"model")):
        status, headers, body = site.ask("GET", f"/api/files/{path}")
        assert (status, body) == (200, data)
        assert headers["content-disposition"] == f'attachment; filename="{Path(path).name}"'
    assert site.ask("GET", "/api/files/notes")[0] == 404


@pytest.mark.parametrize("scheme", ["mqtt", "mqtts"])
def test_a_new_device_is_told_of_its_certificate_where_the_broker_speaks_tls(scheme: str, tmp_path: Path) -> None:
    told = join_info(config(tmp_path, broker=f"{scheme}://127.0.0.1:8883"), "https://fleet.example", phone=False)
    files = ['ca = "ca.crt"', 'certificate = "device.crt"', 'key = "device.key"']
    assert [line in told["config"].splitlines() for line in files] == [scheme == "mqtts"] * 3
    assert ("provision keys --device NAME" in told["note"]) == (scheme == "mqtts")


@pytest.mark.parametrize(
    ("broker", "local"),
    [
        ("mqtt://127.0.0.1:1883", True),
        ("mqtt://127.0.0.2:1883", True),
        ("mqtts://[::1]:8883", True),
        ("mqtts://localhost.example:8883", False),
        ("mqtts://home.example:8883", False),
    ],
)
def test_only_a_broker_of_this_machine_is_called_one(broker: str, tmp_path: Path, *, local: bool) -> None:
    told = join_info(config(tmp_path, broker=broker), "http://127.0.0.1:8080", phone=False)
    assert told["local"] == local


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no address 127.0.0.2 before it is set up")
def test_a_dashboard_on_any_loopback_address_answers_to_it(tmp_path: Path) -> None:
    with serve_dashboard(tmp_path, dashboard="127.0.0.2:0") as site:
        connection = http.client.HTTPConnection("127.0.0.2", site.port, timeout=PATIENCE_S)
        connection.request("GET", "/")
        answer = connection.getresponse()
        answer.read()
        connection.close()
        assert answer.status == 200


def test_a_page_for_phones_is_offered_with_the_address_by_which_one_came(tmp_path: Path) -> None:
    told = join_info(config(tmp_path, broker="mqtt://127.0.0.1:1883"), "https://fleet.example:8443", phone=True)
    assert told["phone"]["url"] == "https://fleet.example:8443/phone/"
    assert told["phone"]["svg"].startswith("<svg")
