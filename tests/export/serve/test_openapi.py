"""Answers that no request drawn from the OpenAPI document brings about: ranges, cached files, refusals, a full disk."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from export.serve import generations
from export.serve.access import ServeAccess
from export.serve.app import create_serve_app
from export.serve.generations import GenerationManager
from export.serve.openapi import openapi_document
from export.serve.rate_limits import RateLimiter
from export.serve.rollout import RolloutPlan
from tests.support.served_bundle import write_bundle

TOKEN, STRANGER = {"Authorization": f"Bearer {'x' * 16}"}, {"Authorization": "Bearer y"}
FILE, SHORT = "/generations/{generation}/{path}", "/centers/{center}/{file}"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> GenerationManager:
    """With a stable generation and a candidate."""
    folder = tmp_path_factory.mktemp("serve")
    for mark in ("one", "two"):
        write_bundle(folder / "b", mark)
        made = GenerationManager(folder / "site", folder / "b", RolloutPlan(share=0.5))
    return made


@pytest.fixture
def client(manager: GenerationManager) -> Iterator[TestClient]:
    access = ServeAccess(rate=RateLimiter(0), token="x" * 16)
    with TestClient(create_serve_app(manager, access), base_url="http://127.0.0.1", follow_redirects=False) as made:
        yield made


@pytest.mark.parametrize(
    ("path", "status", "given"),
    [
        *((path, 200, TOKEN) for path in ("/health", "/openapi.json", "/index.json", "/centers", "/rollout", FILE)),
        *((path, 304, TOKEN | {"If-None-Match": "*"}) for path in ("/index.json", "/centers", FILE)),
        *((path, 401, STRANGER) for path in ("/index.json", "/rollout", SHORT, FILE, "/reports", "/nearest")),
        ("/health", 421, {"Host": "evil.example"}),
        ("/index.json", 421, {"Host": "evil.example"}),
        (SHORT, 307, TOKEN),
        (FILE, 206, TOKEN | {"Range": "bytes=0-9"}),
        (FILE, 206, TOKEN | {"Range": "bytes=0-1,5-9"}),
        (FILE, 400, TOKEN | {"Range": "bytes=x"}),
        (FILE, 416, TOKEN | {"Range": "bytes=999999-"}),
        (FILE, 416, TOKEN | {"Range": f"bytes=0-1{',3-4' * 99}"}),
        ("/nearest", 415, TOKEN),
        ("/nearest", 400, TOKEN | JSON),
        ("/reports", 403, TOKEN | JSON | {"Origin": "http://evil.example"}),
        ("/reports", 503, TOKEN | JSON),
    ],
)
def test_each_answer_is_one_of_the_document(
    path: str,
    status: int,
    given: dict[str, str],
    client: TestClient,
    manager: GenerationManager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = manager.generation(None).centers[0]["files"]["onnx"]["url"]
    method, operation = next(iter(openapi_document()["paths"][path].items()))
    if status == 503:
        monkeypatch.setattr(generations, "replace_file", full_disk)
    report = {"device": "d1", "generation": manager.generation("d1").name, "accuracy": 0.5}
    answer = client.request(
        method,
        {FILE: file, SHORT: "/centers/0/onnx"}.get(path, path),
        headers=given,
        json=report if status == 503 else None,
    )
    assert answer.status_code == status
    told = operation["responses"][str(status)]
    assert {name.lower() for name in told.get("headers", {})} <= set(answer.headers)
    for name in ("ETag", "Location", "WWW-Authenticate", "Retry-After"):
        assert (name.lower() in answer.headers) == (name in told.get("headers", {})), name
    if status >= 400:
        assert told["content"]["application/json"]["schema"]["required"] == list(answer.json()) == ["error"]


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
