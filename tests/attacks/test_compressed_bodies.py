"""Bombs to the HTTP servers: a body that unpacks to much more than it is. No server unpacks one."""

from __future__ import annotations

import gzip
import io
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from coordinator.dashboard.app import create_app
from coordinator.dashboard.event_hub import Hub
from coordinator.identity.enrolment_server import MAX_BODY_BYTES, Registrar
from export.serve.access import ServeAccess
from export.serve.app import create_serve_app
from export.serve.generations import GenerationManager
from export.serve.rate_limits import RateLimiter
from export.serve.rollout import RolloutPlan
from tests.support.guarded_broker import provision_federation
from tests.support.served_bundle import write_bundle
from tests.support.served_dashboard import RecordedControl

LARGE = 32 << 20  # bytes; what a bomb of 32 kB unpacks to
ROOM = 4 << 20  # bytes for a request and its answer
BEARER = "0123456789abcdef"


def zipped(data: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", data)
    return made.getvalue()


def as_npz(data: bytes) -> bytes:
    made = io.BytesIO()
    np.savez_compressed(made, x=np.frombuffer(data, np.uint8))
    return made.getvalue()


BOMBS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress, "deflate": zlib.compress, "zip": zipped, "npz": as_npz,
}  # fmt: skip
KINDS = ("application/json", "application/zip", "application/octet-stream")


@pytest.fixture(params=["dashboard", "centers"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[TestClient, str]:
    """-> a client of the server, and where it takes a body."""
    if request.param == "dashboard":
        app, path = create_app(Hub(), RecordedControl(), read_token=None, control_token=BEARER), "/api/control"
    else:
        write_bundle(tmp_path / "b", "one")
        manager = GenerationManager(tmp_path / "site", tmp_path / "b", RolloutPlan())
        app, path = create_serve_app(manager, ServeAccess(rate=RateLimiter(0), is_local=True)), "/nearest"
    return TestClient(app, base_url="http://127.0.0.1"), path


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_body_is_never_unpacked(server: tuple[TestClient, str], bomb: str) -> None:
    client, path = server
    body = BOMBS[bomb](b"[" + b" " * LARGE + b"]")
    client.post(path, content=b"{}")  # what the first request loads is not a bomb's
    tracemalloc.start()
    try:
        for kind in KINDS:
            for encoding in ("identity", "gzip", "deflate"):
                headers = {"Content-Type": kind, "Content-Encoding": encoding, "Authorization": f"Bearer {BEARER}"}
                assert client.post(path, content=body, headers=headers).status_code in (400, 413, 415)
        assert tracemalloc.get_traced_memory()[1] < ROOM
    finally:
        tracemalloc.stop()


def test_the_registrar_unpacks_none_either(tmp_path: Path) -> None:
    work = provision_federation(tmp_path / "keys")
    registrar = Registrar(authority=work.authority, tokens=work.tokens, tell=lambda _: None)
    bombs = [pack(b"{" + b" " * (2 * ROOM) + b"}") for pack in BOMBS.values()]
    tracemalloc.start()
    try:
        for body in bombs:
            assert len(body) <= MAX_BODY_BYTES
            assert registrar.handle(body)[0] == 400
        assert tracemalloc.get_traced_memory()[1] < ROOM
    finally:
        tracemalloc.stop()
