"""The way of browsers to a broker on this machine: WebSockets in, MQTT over TCP out, for pages of this machine alone.

A browser lets a page of any site dial 127.0.0.1, and this broker has no accounts: such a page could read what devices
upload and train in their place. A browser names the page's site in `Origin`, which the page cannot change; mosquitto
before 2.1 and amqtt do not look at it. A program, which names none, may dial the broker itself just as well. Nor does
mosquitto 2.0.11 look at the address of a listener for WebSockets: it would listen to all machines.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from urllib.parse import urlsplit

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from export.serve.listener import is_loopback

log = logging.getLogger("websockets.server")  # what it tells of a connection its client tells better
PIECE_BYTES = 65_536
MAX_FRAME_BYTES = 1_114_112  # the broker's own `max_packet_size`
CLOSE_TIMEOUT_S, STOP_TIMEOUT_S = 1.0, 5.0


def listen_for_browsers(port: int, broker_port: int) -> Callable[[], None]:
    """Carry the pages that dial `port` to the broker at `broker_port`; -> what ends that. Raises OSError."""
    log.setLevel(logging.CRITICAL)
    listens: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def run() -> None:
        listener = serve(
            partial(_carry, broker_port=broker_port),
            "127.0.0.1",
            port,
            process_request=_refuse_other_sites,
            subprotocols=[Subprotocol("mqtt")],
            compression=None,  # a small frame could become gigabytes
            max_size=MAX_FRAME_BYTES,
            ping_interval=None,  # MQTT has its own
            close_timeout=CLOSE_TIMEOUT_S,
        )
        leave = asyncio.Event()
        try:
            async with listener:
                listens.set_result((asyncio.get_running_loop(), leave))
                await leave.wait()
        except Exception as wrong:
            if listens.done():
                raise
            listens.set_exception(wrong)

    thread = threading.Thread(target=asyncio.run, args=(run(),), name="browsers", daemon=True)
    thread.start()
    loop, leave = listens.result()

    def stop() -> None:
        with suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(leave.set)
        thread.join(STOP_TIMEOUT_S)

    return stop


def _refuse_other_sites(page: ServerConnection, request: Request) -> Response | None:
    origins = request.headers.get_all("Origin")
    if all(is_loopback(_host(origin)) for origin in origins):
        return None
    return page.respond(HTTPStatus.FORBIDDEN, "this broker takes pages of this machine only\n")


def _host(origin: str) -> str:
    with suppress(ValueError):
        return urlsplit(origin).hostname or ""
    return ""


async def _carry(page: ServerConnection, *, broker_port: int) -> None:
    """Carry bytes both ways until one side ends."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", broker_port)
    except OSError:
        return

    async def up() -> None:
        async for data in page:
            if isinstance(data, str):  # MQTT's frames are binary
                return
            writer.write(data)
            await writer.drain()

    async def down() -> None:
        while data := await reader.read(PIECE_BYTES):
            await page.send(data)

    ways = [asyncio.ensure_future(way()) for way in (up, down)]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        for way in ways:
            with suppress(asyncio.CancelledError, ConnectionClosed, OSError):
                await way
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
