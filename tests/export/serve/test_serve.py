"""`fedcenters-export serve` as a process: files resume, bundles never mix, limits hold for each client."""

from __future__ import annotations

import hashlib
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from export.serve.access import ServeAccess
from export.serve.app import create_serve_app
from export.serve.generations import GenerationManager
from export.serve.rate_limits import RateLimiter
from export.serve.rollout import RolloutPlan
from tests.support.served_bundle import LARGE, ROOT, ServerProcess, run_serve, write_bundle


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("serve")
    write_bundle(folder / "b", "one", large=LARGE)
    with run_serve(folder / "b", "--rate", "0") as server:
        yield server


def file_of(server: ServerProcess, name: str = "onnx", center: int = 0) -> dict[str, Any]:
    file: dict[str, Any] = server.ask("/centers").json["centers"][center]["files"][name]
    return file


def test_the_listing_leads_to_every_file_and_its_hash_is_right(server: ServerProcess) -> None:
    for center in server.ask("/centers").json["centers"]:
        for file in center["files"].values():
            answer = server.ask(file["url"])
            assert (answer.status, len(answer.body)) == (200, file["size"])
            assert hashlib.sha256(answer.body).hexdigest() == file["sha256"]
            assert answer.headers["etag"] == f'"{file["sha256"]}"'
            assert "immutable" in answer.headers["cache-control"]
            assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["onnx", "model"])  # from the disk, from memory
def test_a_download_that_broke_off_goes_on_where_it_was(server: ServerProcess, name: str) -> None:
    url = file_of(server, name)["url"]
    whole = server.ask(url)
    first = server.ask(url, Range="bytes=0-99")
    rest = server.ask(url, Range="bytes=100-", If_Range=whole.headers["etag"])
    assert (first.status, rest.status) == (206, 206)
    assert first.body + rest.body == whole.body
    assert rest.headers["content-range"] == f"bytes 100-{len(whole.body) - 1}/{len(whole.body)}"
    changed = server.ask(url, Range="bytes=100-", If_Range='"another"')
    assert (changed.status, changed.body) == (200, whole.body)


def test_a_range_that_is_none_is_refused(server: ServerProcess) -> None:
    url = file_of(server)["url"]
    beyond, wrong = server.ask(url, Range=f"bytes={LARGE}-"), server.ask(url, Range="bytes=x")
    assert (beyond.status, wrong.status) == (416, 400)
    assert beyond.headers["content-range"].startswith("bytes */")
    assert [list(answer.json) for answer in (beyond, wrong)] == [["error"], ["error"]]
    assert server.ask(url, Range="bytes=" + ",".join(["0-1"] * 500)).status == 416


@pytest.mark.parametrize("path", ["/centers", "/index.json", "file"])
def test_what_a_client_has_is_not_sent_again(server: ServerProcess, path: str) -> None:
    path = file_of(server)["url"] if path == "file" else path
    etag = server.ask(path).headers["etag"]
    for given in (etag, f"W/{etag}", f'"x", {etag}', "*"):
        again = server.ask(path, If_None_Match=given)
        assert (again.status, again.body) == (304, b"")
    assert server.ask(path, If_None_Match='"x"').status == 200


def test_head_tells_the_size_alone(server: ServerProcess) -> None:
    file = file_of(server)
    answer = server.ask(file["url"], "HEAD")
    assert (answer.status, answer.body, int(answer.headers["content-length"])) == (200, b"", file["size"])
    for range_of in ("bytes=0-9", "bytes=x"):  # only GET has ranges (RFC 9110, 14.2)
        answer = server.ask(file["url"], "HEAD", Range=range_of)
        assert (answer.status, int(answer.headers["content-length"])) == (200, file["size"])


def test_a_center_has_a_short_address(server: ServerProcess) -> None:
    answer = server.ask("/centers/1/onnx")
    assert (answer.status, answer.headers["location"]) == (307, file_of(server, center=1)["url"])
    assert server.ask("/centers/7/onnx").status == server.ask("/centers/0/coreml").status == 404
    for number in ("9" * 5_000, "-1", "1.5", "²"):  # Python reads no number of more than 4,300 digits
        assert server.ask(f"/centers/{quote(number)}/onnx").status == 404


@pytest.mark.parametrize(
    ("question", "center"),
    [
        ({"how": "loss", "losses": [0.9, 0.2]}, 1),
        ({"how": "loss", "losses": [9.0, 8.0]}, None),
        ({"how": "votes", "votes": [5, 2]}, 0),
    ],
)
def test_a_device_learns_which_center_suits_it(
    server: ServerProcess, question: dict[str, Any], center: int | None
) -> None:
    answer = server.ask("/nearest", "POST", {**question, "device": "new-1"})
    assert (answer.status, answer.json["center"]) == (200, center)
    assert answer.json["generation"] == server.ask("/index.json").json["generation"]


@pytest.mark.parametrize(
    "question",
    [
        {"how": "loss", "losses": [1.0]},
        {"how": "votes", "votes": [0, 0]},
        {"how": "sketch", "sketch": [1.0]},
        {"how": "guess"},
        {"how": "loss", "losses": ["a", 1]},
        {"how": "loss", "losses": [1.0, 1.0], "device": "../x"},
        [],
        b"{",
        b'{"how": "loss", "losses": [NaN, 1]}',
    ],
)
def test_a_question_that_cannot_be_answered_is_400_with_a_reason(server: ServerProcess, question: object) -> None:
    answer = server.ask("/nearest", "POST", question)
    assert answer.status == 400
    assert answer.json["error"]


def test_a_large_body_is_not_read(server: ServerProcess) -> None:
    assert server.ask("/nearest", "POST", b" " * 100_000).status == 413


@pytest.mark.parametrize("path", ["../../../etc/passwd", "%2e%2e/manifest.json", ".rollout.json", "manifest.json/x"])
def test_nothing_beside_the_bundle_can_be_read(server: ServerProcess, path: str) -> None:
    generation = server.ask("/index.json").json["generation"]
    for at in (f"/generations/{generation}/{path}", f"/generations/{path}", f"/{path}"):
        assert server.ask(at).status == 404


def test_a_bundle_that_is_swapped_while_it_is_read_is_never_mixed(tmp_path: Path) -> None:
    """Readers list and fetch all the time; every file must be of the generation that its listing named."""
    write_bundle(tmp_path / "b", "0")
    wrong: list[str] = []
    marks: set[str] = set()
    with run_serve(tmp_path / "b", "--rate", "0", "--canary", "1") as server:
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                listing = server.ask("/centers").json
                mark = listing["centers"][0]["card"]["mark"]
                marks.add(mark)
                for center in listing["centers"]:
                    answer = server.ask(center["files"]["onnx"]["url"])
                    if answer.status != 200 or not answer.body.startswith(f"{mark} {center['center']} ".encode()):
                        wrong.append(f"{mark}: {answer.status} {answer.body[:20]!r}")

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for mark in ("1", "2", "3"):
            write_bundle(tmp_path / "b", mark)
            until(lambda mark=mark: mark in marks)
        done.set()
        for reader in readers:
            reader.join()
    assert wrong == []
    assert marks == {"0", "1", "2", "3"}


def test_a_broken_bundle_is_not_served_and_the_old_one_stays(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", "old")
    with run_serve(tmp_path / "b", "--canary", "1", "--rate", "0") as server:
        before = server.ask("/index.json").json
        (tmp_path / "b" / "manifest.json").write_text("{}")
        write_bundle(tmp_path / "c", "new")
        assert server.ask("/index.json").json == before
        (tmp_path / "b").rename(tmp_path / "gone")
        (tmp_path / "c").rename(tmp_path / "b")
        until(lambda: server.ask("/index.json").json != before)
        assert server.ask("/centers").json["centers"][0]["card"]["mark"] == "new"


def test_a_new_version_goes_to_the_canaries_and_is_stopped_by_their_reports(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", "old")
    names = [f"d{i}" for i in range(200)]
    with run_serve(tmp_path / "b", "--canary", "0.3", "--rate", "0") as server:
        old = server.ask("/index.json").json["generation"]
        write_bundle(tmp_path / "b", "new")
        until(lambda: server.ask("/rollout").json["candidate"] is not None)
        served = {d: server.ask(f"/index.json?device={d}").json["generation"] for d in names}
        new = server.ask("/rollout").json["candidate"]
        assert set(served.values()) == {old, new}
        assert server.ask("/index.json").json["generation"] == old
        for device in names:
            accuracy = 0.9 if served[device] == old else 0.3
            report = {"device": device, "generation": served[device], "accuracy": accuracy}
            if server.ask("/reports", "POST", report).json["candidate"] is None:
                break
        assert server.ask("/rollout").json["withdrawn"] == [new]
        assert {server.ask(f"/index.json?device={d}").json["generation"] for d in names[:20]} == {old}
    with run_serve(
        tmp_path / "b", "--canary", "0.3"
    ) as server:  # a restart forgets nothing, though `b` holds the new one
        assert server.ask("/rollout").json["withdrawn"] == [new]
        assert server.ask("/centers").json["centers"][0]["card"]["mark"] == "old"


def test_a_client_that_asks_too_often_is_told_to_wait(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", "one")
    with run_serve(tmp_path / "b", "--rate", "1") as server:
        answers = [server.ask("/health") for _ in range(6)]
    refused = [a for a in answers if a.status == 429]
    assert refused
    assert all(int(a.headers["retry-after"]) >= 1 for a in refused)


def test_a_token_is_needed_where_one_is_set_and_tls_is_spoken(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", "one")
    (tmp_path / "token").write_text("0123456789abcdef\n")
    (tmp_path / "token").chmod(0o600)
    certificate(tmp_path)
    options = ("--token", "token", "--certificate", "cert.pem", "--key", "key.pem")
    paths = [str(tmp_path / o) if "." in o or o == "token" else o for o in options]
    with run_serve(tmp_path / "b", *paths) as server:
        context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        context.check_hostname = False

        def ask(path: str, **headers: str) -> int:
            request = urllib.request.Request(f"https://127.0.0.1:{server.port}{path}", headers=headers)
            try:
                with urllib.request.urlopen(request, context=context) as response:  # noqa: S310 - our own
                    return int(response.status)
            except urllib.error.HTTPError as refused:
                with refused:
                    return refused.code

        assert ask("/health") == 200
        assert ask("/centers") == ask("/centers", Authorization="Bearer 0123456789abcdeF") == 401
        assert ask("/centers", Authorization="Bearer 0123456789abcdef") == 200


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("nowhere",), "cannot be served"),
        (("b", "--token", "open"), "chmod 600"),
        (("b", "--token", "short"), "16 characters"),
        (("b", "--certificate", "open"), "certificate and its key"),
        (("b", "--host", "203.0.113.1"), "cannot listen on"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_listens(
    tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    write_bundle(tmp_path / "b", "one")
    (tmp_path / "open").write_text("0123456789abcdef")
    (tmp_path / "short").write_text("secret")
    (tmp_path / "short").chmod(0o600)
    command = [sys.executable, "-m", "export", "serve", *options]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode in (3, 4)
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr


def until(true: Any) -> None:  # noqa: ANN401 - any condition
    """The server looks at its folder once a second: wait for what follows, a minute at most."""
    end = time.monotonic() + 60
    while not true():
        if time.monotonic() > end:
            raise TimeoutError("it did not happen")
        threading.Event().wait(0.05)


def certificate(folder: Path) -> None:
    names = ["-subj", "/CN=127.0.0.1", "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2", "-noenc"]
    subprocess.run(["openssl", "req", "-x509", *kind, *names], check=True, capture_output=True)


def test_what_is_served_and_a_port_in_use_are_said_in_words(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", "one")
    generation = hashlib.sha256((tmp_path / "b" / "manifest.json").read_bytes()).hexdigest()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "export", "serve", str(tmp_path / "b"), "--port", str(port)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 4
    assert f"stable {generation[:16]}, candidate none\n" in done.stderr
    assert f"cannot listen on 127.0.0.1:{port}: the port is in use" in done.stderr
    assert "--port" in done.stderr


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "[evil]"])
def test_a_foreign_name_that_points_here_reads_nothing(server: ServerProcess, host: str) -> None:
    """DNS rebinding: a page's own host name is made to resolve to this machine."""
    for path, method in (("/centers", "GET"), ("/rollout", "GET"), ("/reports", "POST"), ("/nearest", "POST")):
        assert server.ask(path, method, {} if method == "POST" else None, Host=host).status == 421


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost", "[::1]:8080", "192.0.2.7", "Centers.Example:8080"])
def test_an_address_and_a_given_name_are_answered(tmp_path: Path, host: str) -> None:
    write_bundle(tmp_path / "b", "one")
    manager = GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan())
    access = ServeAccess(rate=RateLimiter(0), names=frozenset({"centers.example"}))
    app = TestClient(create_serve_app(manager, access))
    assert app.get("/centers", headers={"Host": host}).status_code == 200
    assert app.get("/centers", headers={"Host": "other.example"}).status_code == 421


@pytest.mark.parametrize("path", ["/reports", "/nearest"])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_what_a_page_could_post_across_origins_is_refused(server: ServerProcess, path: str, kind: str) -> None:
    answer = server.ask(path, "POST", {"how": "votes", "votes": [5, 2]}, Content_Type=kind)
    assert answer.status == 415
    assert server.ask(path, "POST", {}, Origin="http://evil.example").status == 403


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON ; charset=utf-8"])
def test_json_is_taken_however_its_type_is_written(server: ServerProcess, kind: str) -> None:
    assert server.ask("/nearest", "POST", {"how": "votes", "votes": [5, 2]}, Content_Type=kind).status == 200


def test_reports_of_strangers_decide_nothing(tmp_path: Path) -> None:
    """Where others reach the server, a report needs a token; files and questions stay public."""
    write_bundle(tmp_path / "b", "one")
    manager = GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan())
    report = {"device": "d1", "generation": "0" * 64, "accuracy": 0.5}
    bearer = {"Authorization": "Bearer 0123456789abcdef"}

    def answers(access: ServeAccess) -> tuple[int, ...]:
        app = TestClient(create_serve_app(manager, access), base_url="http://127.0.0.1")
        posted = [app.post("/reports", json=report, headers=h).status_code for h in ({}, bearer)]
        return (app.get("/centers").status_code, *posted)

    rate, token = RateLimiter(0), "0123456789abcdef"
    assert answers(ServeAccess(rate=rate, is_local=True)) == (200, 200, 200)
    assert answers(ServeAccess(rate=rate)) == (200, 403, 403)
    assert answers(ServeAccess(rate=rate, report_token=token)) == (200, 401, 200)
    assert answers(ServeAccess(rate=rate, token=token)) == (401, 401, 200)
    assert answers(ServeAccess(rate=rate, token="x" * 16, report_token=token)) == (401, 401, 200)


@pytest.mark.parametrize(
    "access",
    [ServeAccess(rate=RateLimiter(0)), ServeAccess(rate=RateLimiter(0), token="x" * 16, report_token="y" * 16)],
    ids=["without a token", "with both"],
)
def test_a_line_feed_behind_a_path_gets_around_no_token(tmp_path: Path, access: ServeAccess) -> None:
    """A route's pattern took "/reports\n" for "/reports", and the rule for another path that needs no token."""
    write_bundle(tmp_path / "b", "one")
    manager = GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan())
    app = TestClient(create_serve_app(manager, access), base_url="http://127.0.0.1")
    report = {"device": "d1", "generation": "0" * 64, "accuracy": 0.5}
    reader = {} if access.token is None else {"Authorization": f"Bearer {access.token}"}
    assert app.post("/reports", json=report, headers=reader).status_code == (403 if access.token is None else 401)
    for path in ("/reports%0A", "/health%0A", "/centers%0a"):
        answer = app.request("POST" if "reports" in path else "GET", path, json=report, headers=reader)
        assert (answer.status_code, list(answer.json())) == (404, ["error"])


def test_no_shared_cache_keeps_what_needs_a_token(tmp_path: Path) -> None:
    """RFC 9111, 3.5: `public` lets one hand out the answer to a request with a token to a client without."""
    write_bundle(tmp_path / "b", "one")
    manager, token = GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan()), "x" * 16
    path = manager.generation(None).centers[0]["files"]["onnx"]["url"]
    for given, scope in ((None, "public"), (token, "private")):
        access = ServeAccess(rate=RateLimiter(0), token=given, report_token=token)
        app = TestClient(create_serve_app(manager, access), base_url="http://127.0.0.1")
        answer = app.get(path, headers={"Authorization": f"Bearer {token}"})
        assert answer.headers["cache-control"] == f"{scope}, max-age=31536000, immutable"
