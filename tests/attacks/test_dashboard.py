"""Attacks on the dashboard: guessed tokens, pages from elsewhere, other files, long requests, hostile names."""

from __future__ import annotations

import hmac
import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from playwright.sync_api import expect

from coordinator.dashboard import access
from export.serve.http_gate import Refusal, RequestHead
from tests.coordinator.dashboard.test_displayed_metrics import joined, round_event, seen
from tests.support.browser import Open
from tests.support.served_dashboard import PATIENCE_S, DashboardSite, serve_dashboard

TAG = '<img src=x onerror="document.title=1">'
HOSTILE = ("a" * 60, "constructor", "__proto__", "device-1", "x" * 64)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[DashboardSite]:
    with serve_dashboard(tmp_path) as found:
        yield found


@pytest.mark.parametrize("token", ["", "Bearer", "Bearer ", "Bearer x", "Basic eDp4", "bearer {}", "Bearer {}x", "{}"])
def test_nothing_but_the_token_steers(site: DashboardSite, token: str) -> None:
    assert site.order({"do": "stop"}, authorization=token.replace("{}", site.control)) == 401
    assert site.buttons.asked == []


def test_tokens_are_compared_in_a_time_that_tells_nothing_and_all_of_them(site: DashboardSite) -> None:
    with patch.object(hmac, "compare_digest", wraps=hmac.compare_digest) as compared:
        assert site.order({"do": "stop"}, authorization="Bearer x") == 401
    assert compared.call_count == 1


def test_guessing_is_slow(site: DashboardSite) -> None:
    answers = [site.order({"do": "stop"}, authorization=f"Bearer {i}") for i in range(40)]
    assert answers.count(401) <= access.TOKEN_FAILURES_BURST + 5  # what was regained meanwhile, at most two a second
    assert answers[-1] == 429
    assert site.order({"do": "pause"}) == 200  # who has the right is not locked out
    assert site.buttons.asked == ["pause"]


def test_guessing_is_slow_for_one_who_gives_each_guess_another_address(site: DashboardSite) -> None:
    """uvicorn takes such a header from this machine, and so from everyone whose tunnel or TLS ends here."""
    named = ("x_forwarded_for", "x_real_ip", "forwarded")
    answers = [
        site.order({"do": "stop"}, authorization=f"Bearer {i}", **dict.fromkeys(named, f"10.0.0.{i}"))
        for i in range(40)
    ]
    assert answers.count(401) <= access.TOKEN_FAILURES_BURST + 5
    assert answers[-1] == 429


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://127.0.0.1.evil.example"},
        {"origin": "http://127.0.0.1:1"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ],
)
def test_a_page_from_elsewhere_steers_nothing_even_with_the_token(site: DashboardSite, headers: dict[str, str]) -> None:
    assert site.order({"do": "stop"}, **headers) == 403
    assert site.buttons.asked == []


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_what_a_form_could_send_is_no_order(site: DashboardSite, kind: str) -> None:
    assert site.order({"do": "stop"}, content_type=kind) == 415
    assert site.ask("GET", "/api/control")[0] in (401, 405)
    assert site.buttons.asked == []


def test_no_other_site_is_told_that_it_may_ask(site: DashboardSite) -> None:
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    status, answer, _ = site.ask("OPTIONS", "/api/control", headers=headers)
    assert status >= 400
    assert not [name for name in answer if name.lower().startswith("access-control")]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "[::2]", ""])
def test_another_name_that_points_here_reads_nothing(site: DashboardSite, host: str) -> None:
    status, _, body = site.ask("GET", "/api/join", headers={"Host": host})
    assert status in (400, 421)
    assert b"signing-keys" not in body


@pytest.mark.parametrize(
    "path",
    [
        "/static/../view.py",
        "/static/..%2fview.py",
        "/static/%2e%2e/app.py",
        "/static//etc/passwd",
        "/static/..%5c..%5cview.py",
        "/static/index.html%00.js",
        "/api/files/../signing.key",
        "/api/files/..%2fsigning.key",
        "/api/files/..%2f..%2frun%2fsigning.key",
        "/api/files/%2fetc%2fpasswd",
        "/api/files/signing.key",
        "/api/files/manifest.json%00",
        "/..%2fsigning.key",
    ],
)
def test_no_path_leads_out_of_what_is_served(site: DashboardSite, path: str) -> None:
    (site.folder / "bundle").mkdir()
    (site.folder / "bundle" / "manifest.json").write_text("{}")
    (site.folder / "signing.key").write_text("secret")
    assert site.ask("GET", path)[0] in (400, 404)


def test_a_manifest_that_names_a_file_outside_serves_it_not(site: DashboardSite) -> None:
    bundle = site.folder / "bundle"
    (bundle / "centers").mkdir(parents=True)
    (site.folder / "signing.key").write_text("secret")
    (bundle / "centers" / "link").symlink_to(site.folder / "signing.key")
    entries = [
        {"path": path, "size": 1, "sha256": "0" * 64} for path in ("../signing.key", "centers/link", "/etc/passwd")
    ]
    manifest = {"program": entries[0], "containers": entries[1:], "reference": None, "centers": []}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    for path in ("..%2fsigning.key", "centers/link", "%2fetc%2fpasswd"):
        assert site.ask("GET", f"/api/files/{path}")[0] == 404


def test_a_long_body_is_not_read_to_its_end(site: DashboardSite) -> None:
    assert site.order({"do": "pause", "x": "x" * 5_000}) == 413
    assert site.buttons.asked == []


def test_long_headers_are_refused_before_they_are_kept(site: DashboardSite) -> None:
    with socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE_S) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 200_000)
        with suppress(ConnectionResetError):
            assert raw.recv(64).startswith(b"HTTP/1.1 400")
    assert site.ask("GET", "/")[0] == 200


def test_every_answer_forbids_what_a_page_could_be_made_to_do(site: DashboardSite) -> None:
    for path in ("/", "/static/main.js", "/api/join", "/nothing", "/api/device/nobody"):
        headers = site.ask("GET", path)[1]
        policy = str(headers["content-security-policy"])
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"


def test_the_page_has_no_script_and_no_style_of_its_own(site: DashboardSite) -> None:
    page = site.ask("GET", "/")[2].decode()
    assert page.count("<script") == 1
    assert '<script type="module" src="static/main.js"></script>' in page
    assert "style=" not in page
    assert "<style" not in page
    assert "http" not in page.replace("http-equiv", "")


def test_a_proxy_that_lacks_a_setting_is_told_which() -> None:
    gate = access.AccessControl(read=None, control="x" * 32)
    named = RequestHead(method="GET", path="/", headers={b"host": b"a.example"}, client="proxy", now_s=0.0)
    assert "dashboard-read-token" in str(gate.refuse(named))
    other = {b"host": b"127.0.0.1:80", b"origin": b"https://a.example"}
    assert "Host" in str(gate.refuse(replace(named, method="POST", headers=other)))


def test_a_flood_is_answered_with_too_many_and_others_are_not() -> None:
    gate = access.AccessControl(read=None, control="x" * 32)
    loud = RequestHead(method="GET", path="/", headers={b"host": b"127.0.0.1:80"}, client="loud", now_s=0.0)
    answers = [gate.refuse(loud) for _ in range(int(access.REQUESTS_BURST) + 1)]
    assert answers[:-1] == [None] * int(access.REQUESTS_BURST)
    assert answers[-1] == Refusal(status=429, error="too many requests")
    assert gate.refuse(replace(loud, client="calm")) is None
    assert gate.refuse(replace(loud, now_s=1.0)) is None


def test_phones_with_one_address_get_the_files_of_their_page() -> None:
    gate = access.AccessControl(read="r" * 32, control=None)
    phone = RequestHead(method="GET", path="/phone/v/main.js", headers={b"host": b"a.example"}, client="nat", now_s=0.0)
    many = range(int(access.REQUESTS_BURST) + 1)
    assert [gate.refuse(phone) for _ in many] == [None for _ in many]
    answers = [gate.refuse(replace(phone, path="/phone/join.json")) for _ in many]
    assert answers[-2:] == [None, Refusal(status=429, error="too many requests")]


@pytest.mark.browser
def test_hostile_names_and_reasons_are_text(site: DashboardSite, visit: Open) -> None:
    for number, cid in enumerate(HOSTILE):
        site.hub.event({**joined(number), "device": cid, "engine": TAG})
    event: dict[str, Any] = round_event(1, [], refused={"__proto__": TAG, TAG: TAG})
    event |= {"assignment": dict.fromkeys([*HOSTILE, TAG], 0), "per_device": {TAG: 0.5}, "run": TAG, "method": TAG}
    site.hub.event(event)
    site.hub.event({"event": "error", "message": TAG})
    site.hub.event({"event": TAG, TAG: TAG})
    site.hub.status(seen(phase=TAG, presence=dict.fromkeys([*HOSTILE, TAG], "on")))
    page = visit(site.link).page
    expect(page.locator("#events")).to_contain_text(TAG)
    expect(page.locator("#phase")).to_have_text(TAG)
    expect(page.locator("#devices")).to_contain_text(TAG)
    page.locator("#devices a", has_text=TAG).click()
    expect(page.locator("#device h1")).to_have_text(TAG)
    assert page.locator("img").count() == 0
    assert page.title() != "1"
