"""Requests by the thousand, drawn from OpenAPI documents, to the dashboard, the phone's page and the server of centers.

    python -m tests.attacks.fuzz_http --seconds 600

schemathesis draws valid and invalid requests. No answer may be a server error, and each must be one that the document
names. The server of centers publishes its document; those of the other two are here, since people use them in a
browser. `--seconds` is for each server; the exit status is 1 where an answer is wrong.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import schemathesis
import schemathesis.core.result
from hypothesis import HealthCheck, Phase, given, settings

from coordinator.dashboard import access
from coordinator.phone.routes import phone_routes
from export.serve.http_gate import create_gated_app
from tests.support.served_app import serve_app
from tests.support.served_bundle import run_serve, write_bundle
from tests.support.served_dashboard import serve_dashboard
from tests.web.test_serving import config, third_party_files

TEXT = {"type": "string"}
REFUSALS = (400, 401, 403, 404, 405, 408, 413, 415, 421)
AT_THE_GATE = {401, 403, 421}  # a request that is refused so has reached no page


def _parameter(name: str, place: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": TEXT}


def _operation(
    *parameters: dict[str, Any], ok: tuple[int, ...] = (200,), body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    answers = {str(status): {"description": "an answer"} for status in (*ok, *REFUSALS)}
    content = {"application/json": {"schema": body}}
    posted = {} if body is None else {"requestBody": {"required": True, "content": content}}
    return {"parameters": list(parameters), "responses": answers, **posted}


def _document(paths: Mapping[str, Any]) -> dict[str, Any]:
    return {"openapi": "3.1.0", "info": {"title": "pages", "version": "1"}, "paths": dict(paths)}


NUMBER = {"type": "integer", "minimum": 0, "maximum": 2**31}
EXCHANGE = {
    "type": "object",
    "properties": {"id": TEXT, "round": NUMBER, "exchange": NUMBER},
    "required": ["id", "round", "exchange"],
}
ORDER = {
    "type": "object",
    "properties": {"do": {"enum": ["pause", "resume", "close", "stop"]}, "exchange": EXCHANGE},
    "required": ["do"],
}
DASHBOARD = _document(  # without /api/stream, which does not end
    {
        "/": {"get": _operation()},
        "/static/{name}": {"get": _operation(_parameter("name", "path"))},
        "/api/grid": {"get": _operation(_parameter("run", "query"))},
        "/api/map": {"get": _operation(_parameter("run", "query"))},
        "/api/device/{cid}": {"get": _operation(_parameter("cid", "path"))},
        "/api/files": {"get": _operation()},
        "/api/files/{path}": {"get": _operation(_parameter("path", "path"))},
        "/api/join": {"get": _operation()},
        "/api/control": {"post": _operation(ok=(200, 409), body=ORDER)},
    }
)
PHONE = _document(
    {
        "/phone": {"get": _operation(ok=(307,))},
        "/phone/": {"get": _operation()},
        "/phone/join.json": {"get": _operation()},
        "/phone/third/{version}/{name}": {"get": _operation(_parameter("version", "path"), _parameter("name", "path"))},
        "/phone/{version}/{name}": {"get": _operation(_parameter("version", "path"), _parameter("name", "path"))},
        "/phone/{name}": {"get": _operation(_parameter("name", "path"))},
    }
)
CHECKS = [schemathesis.checks.not_a_server_error, schemathesis.checks.status_code_conformance]
STRICT_CHECKS = [
    *CHECKS,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
    schemathesis.checks.response_headers_conformance,
]


@dataclass(frozen=True, kw_only=True)
class FuzzedServer:
    """A server that runs: its address, its document, and what is checked of each answer."""

    name: str
    url: str
    document: Mapping[str, Any]
    checks: list[Any]
    headers: Mapping[str, str]


def fuzz(server: FuzzedServer, *, examples: int, seconds: float = 0.0) -> int:
    """So many requests of each operation, again until the time is over; -> how many. Raises what schemathesis finds."""
    schema = schemathesis.openapi.from_dict(dict(server.document))
    schema.config.update(base_url=server.url)
    began_s, sent, operations, told = time.monotonic(), 0, 0, dict[str, set[int]]()
    while sent == 0 or time.monotonic() < began_s + seconds:
        operations = 0
        for operation in schema.get_all_operations():
            if not isinstance(operation, schemathesis.core.result.Ok):
                raise TypeError(f"the document of {server.name} is wrong: {operation}")
            operations += 1

            @settings(
                max_examples=examples, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck)
            )
            @given(case=operation.ok().as_strategy())
            def tried(case: schemathesis.Case[Any]) -> None:
                nonlocal sent
                sent += 1
                headers = dict(server.headers)
                answer = case.call_and_validate(
                    checks=server.checks, headers=headers, timeout=60, allow_redirects=False
                )
                told.setdefault(f"{case.method} {case.operation.path}", set()).add(answer.status_code)

            tried()
    if closed := [name for name, statuses in told.items() if statuses <= AT_THE_GATE]:
        raise RuntimeError(f"{server.name} let no request in to {', '.join(closed)}")
    if operations != sum(len(methods) for methods in server.document["paths"].values()):
        raise RuntimeError(f"{operations} operations of {server.name} were tried")
    return sent


@contextmanager
def dashboard(folder: Path) -> Iterator[FuzzedServer]:
    """The dashboard of an empty run, for one who holds the token; without its limit on requests a second."""
    with patch.object(access, "REQUESTS_PER_S", 0.0), serve_dashboard(folder) as site:
        url = f"http://127.0.0.1:{site.port}"
        headers = {"Authorization": f"Bearer {site.control}"}
        yield FuzzedServer(name="dashboard", url=url, document=DASHBOARD, checks=CHECKS, headers=headers)


@contextmanager
def phone(folder: Path) -> Iterator[FuzzedServer]:
    """The phone's page alone."""
    app = create_gated_app(phone_routes(config(folder), third=third_party_files(folder)))
    with serve_app(app) as (port, _):
        yield FuzzedServer(
            name="phone's page", url=f"http://127.0.0.1:{port}", document=PHONE, checks=CHECKS, headers={}
        )


@contextmanager
def centers(folder: Path) -> Iterator[FuzzedServer]:
    """The server of centers, which publishes its document."""
    write_bundle(folder / "b", "one")
    with run_serve(folder / "b", "--rate", "0") as server:
        document = server.ask("/openapi.json").json
        url = f"http://127.0.0.1:{server.port}"
        yield FuzzedServer(name="server of centers", url=url, document=document, checks=STRICT_CHECKS, headers={})


def main() -> None:
    """All three, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="for each server")
    asked = parser.parse_args()
    for start in (dashboard, phone, centers):
        with tempfile.TemporaryDirectory() as name, start(Path(name)) as server:
            print(f"{server.name}: {fuzz(server, examples=200, seconds=asked.seconds)} requests", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
