"""Settings of every uvicorn server of the project: bounds on headers and on time; TLS if given.

uvicorn closes a connection that is idle between two requests, but none that is in the middle of a request's head, none
whose client sends a byte now and then, and none whose client does not read. A `BoundedProtocol` does.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from export.serve.renewed_certificate import follow_renewals

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    _Http = HttpToolsProtocol
else:
    _Http = object

MAX_HEADER_BYTES = 16 << 10  # of h11
MAX_UNANSWERED_BYTES = 512 << 10  # between two answers; a request of ours is far smaller
MAX_QUEUED = 16  # requests that wait for the answers before them
MAX_WAITING_BYTES = 64 << 10  # of an answer, until its reader is waited for
TIMEOUT_S = 20.0


class BoundedProtocol(_Http):
    """A connection that is aborted when `timeout_s` pass without a whole request head, or with an answer not read.

    Also when more comes than is answered: httptools, unlike h11, keeps a head of any length, fields behind a body, and
    any number of requests that come before the answer to the first one.

    It is mixed into uvicorn's protocols, which have the same attributes.
    """

    timeout_s = TIMEOUT_S
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _unanswered_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        transport.set_write_buffer_limits(MAX_WAITING_BYTES)  # under TLS it is 512 kB otherwise
        super().connection_made(transport)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        self._unanswered_bytes += len(data)
        super().data_received(data)
        if self._unanswered_bytes > MAX_UNANSWERED_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """A request begins, as httptools says. The error ends the connection."""
        if len(self.pipeline) >= MAX_QUEUED:
            raise ValueError(f"{MAX_QUEUED} requests wait for the answers before them")
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The answer to a request that asks for another protocol ends the connection: httptools skips its body.

        A body that comes later it reads as the next request, so that one client could put words behind another's.
        """
        super().on_headers_complete()
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """What comes is no HTTP. An answer that has begun cannot become another one."""
        if self._is_answering():
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def on_response_complete(self) -> None:
        if not getattr(self, "pipeline", ()):  # h11 has none: it reads on after the answer
            self._unanswered_bytes = 0
        self._await_request()  # first: a request that has come already begins in the call below
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _await_request(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        unread = unread_bytes(self.transport)  # of the answer before
        self._head_timer = self.loop.call_later(self.timeout_s, self._abort_without_request, unread)

    def _abort_without_request(self, unread: int) -> None:
        if self._is_answering():
            return
        if unread_bytes(self.transport) < unread:
            self._await_request()
        else:
            self.transport.abort()

    def _await_reader(self) -> None:
        unread = unread_bytes(self.transport)
        self._write_timer = self.loop.call_later(self.timeout_s, self._abort_without_reader, unread)

    def _abort_without_reader(self, unread: int) -> None:
        """A slow client is one that reads."""
        if unread_bytes(self.transport) < unread:
            self._await_reader()
        else:
            self.transport.abort()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


def unread_bytes(transport: asyncio.Transport) -> int:
    """How much of the answers waits in the process, also in the plain connection below one with TLS.

    What has waited above TLS goes down at once, and only the connection below tells whether the client reads.
    """
    below = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)
    return transport.get_write_buffer_size() + (0 if below is None else below.get_write_buffer_size())


def bounded_protocol(*, fast: bool, timeout_s: float) -> type[asyncio.Protocol]:
    """h11, which bounds a header's size exactly; `fast`: httptools where it is installed."""
    base: type[asyncio.Protocol] = H11Protocol
    if fast:
        with suppress(ImportError):
            from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as base  # noqa: N813
    return type("Protocol", (BoundedProtocol, base), {"timeout_s": timeout_s})


class RenewingConfig(uvicorn.Config):
    """Settings whose certificate may be renewed while the server runs."""

    def load(self) -> None:
        super().load()
        if self.ssl is not None and self.ssl_certfile and self.ssl_keyfile:
            follow_renewals(self.ssl, Path(self.ssl_certfile), Path(self.ssl_keyfile))


def uvicorn_config(
    app: ASGIApp,
    *,
    certificate: Path | None = None,
    key: Path | None = None,
    lifespan: bool = False,
    fast: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> uvicorn.Config:
    """The settings of a server for `app` on sockets that are open; `certificate` and `key` are PEM files.

    uvicorn's own log settings are left out: they close the handlers of all loggers in the process. Its errors are
    handled as those of any logger.
    """
    return RenewingConfig(
        app,
        loop="asyncio",
        http=bounded_protocol(fast=fast, timeout_s=timeout_s),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        lifespan="on" if lifespan else "off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # else who comes by a tunnel or a proxy that ends here names its own address
        timeout_keep_alive=round(timeout_s),
        timeout_graceful_shutdown=1,
        ssl_certfile=certificate,
        ssl_keyfile=None if key is None else str(key),
    )
