"""What a server's settings do to the process that it runs in, and what it knows of a client that reads slowly."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import ssl
from contextlib import closing
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.server import ServerState

from coordinator.identity.certificate_authority import open_authority
from edge_client.transport.keys import open_private_key
from export.serve.http_gate import create_gated_app
from export.serve.uvicorn_settings import MAX_WAITING_BYTES, unread_bytes, uvicorn_config
from tests.support.served_app import PATIENCE_S

LARGE = 32 << 20  # bytes; more than the buffers of both kernels hold


def test_a_server_closes_no_log_of_the_process(tmp_path: Path) -> None:
    with closing(logging.FileHandler(tmp_path / "log")) as handler:
        uvicorn_config(Starlette())
        assert handler.stream is not None
        assert not handler.stream.closed


def test_a_client_that_reads_slowly_is_seen_to_read_below_tls(tmp_path: Path) -> None:
    """asyncio told of each 512 kB alone: under TLS a client that read less than 26 kB/s was cut off."""
    now = dt.datetime.now(dt.timezone.utc)
    public = open_private_key(tmp_path / "server.key").public_key()
    made = open_authority(tmp_path / "ca", "test", now).issue_server(public, "server", ["127.0.0.1"], now)
    (tmp_path / "server.pem").write_bytes(made.public_bytes(Encoding.PEM))
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname, asking.verify_mode = False, ssl.CERT_NONE

    async def large(_: Request) -> Response:
        return Response(bytes(LARGE))

    app = create_gated_app([Route("/", large)])
    config = uvicorn_config(app, certificate=tmp_path / "server.pem", key=tmp_path / "server.key")
    config.load()

    async def read_a_part() -> tuple[int, int]:
        loop, state, made = asyncio.get_running_loop(), ServerState(), list[Any]()

        def protocol() -> Any:  # noqa: ANN401 - uvicorn's classes have no type in common
            made.append(config.http_protocol_class(config=config, server_state=state, app_state={}, _loop=loop))  # type: ignore[call-arg]
            return made[-1]

        server = await loop.create_server(protocol, "127.0.0.1", 0, ssl=config.ssl)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), ssl=asking, limit=1 << 10)
        writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        while not made or made[0].flow is None or not made[0].flow.write_paused:  # noqa: ASYNC110 - uvicorn has no event of it
            await asyncio.sleep(0)
        transport = made[0].transport
        waiting = transport.get_write_buffer_size(), unread_bytes(transport)
        while unread_bytes(transport) >= waiting[1]:
            await reader.read(1 << 10)
        transport.abort()
        writer.transport.abort()
        server.close()
        return waiting

    above, both = asyncio.run(asyncio.wait_for(read_a_part(), PATIENCE_S))
    assert above + MAX_WAITING_BYTES < both < 6 * MAX_WAITING_BYTES
