"""HTTP requests that end: a server that sends a byte now and then holds no device for ever.

A socket's timeout bounds each wait for a byte, but the server decides how many waits there are: in the head of its
answer, between the parts of a chunked one, and in its body. So a second thread looks at the whole, and shuts the
connection of a server that is slower than any network over which models are worth to be carried.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import socket
import threading
import time
import urllib.request
from types import TracebackType
from typing import Any

SILENCE_S = 30.0  # until a connection stands, or for one byte
PATIENCE_S = 60.0  # for an answer without its body
LEAST_BYTES_PER_S = 1_024  # of a body, on average
PART_BYTES = 8_192


class SlowServer(OSError):
    """An answer that did not come in its time."""


class Deadline:
    """While it is entered, shuts the connection when the time is over; `received` bytes of a body make it longer."""

    def __init__(self) -> None:
        self._connection: socket.socket | None = None
        self.received = 0
        self._is_over, self._done, self._began_s = False, threading.Event(), time.monotonic()

    def __enter__(self) -> Deadline:  # noqa: PYI034 - typing has Self from 3.11 on
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, wrong: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises SlowServer in place of what came of the shut connection: an error, or a part of an answer."""
        self._done.set()
        if self._is_over and (wrong is None or isinstance(wrong, (OSError, http.client.HTTPException))):
            raise SlowServer(f"{self.received} bytes in {time.monotonic() - self._began_s:.0f} s")

    def watch(self, connection: socket.socket) -> None:
        """The connection stands; it is shut at once where that took too long."""
        self._connection = connection
        if self._is_over:
            self._shut()

    def _watch(self) -> None:
        while (left_s := self._ends_s() - time.monotonic()) > 0:
            if self._done.wait(left_s):
                return
        self._is_over = True
        self._shut()

    def _shut(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):  # closed already
                socket.socket.shutdown(self._connection, socket.SHUT_RDWR)  # TLS's own would let the clear be read

    def _ends_s(self) -> float:
        return self._began_s + PATIENCE_S + self.received / LEAST_BYTES_PER_S


def get(opener: urllib.request.OpenerDirector, url: str, limit: int) -> tuple[bytes, int]:
    """-> (at most `limit` + 1 bytes of a body, the bytes that its head promised and that did not come).

    Raises OSError (SlowServer, urllib's HTTPError with its headers) and http.client.HTTPException.
    """
    with Deadline() as deadline, opener.open(_Request(url, deadline), timeout=SILENCE_S) as answer:
        parts = []
        while deadline.received <= limit and (part := answer.read(min(PART_BYTES, limit + 1 - deadline.received))):
            parts.append(part)
            deadline.received += len(part)
        return b"".join(parts), answer.length or 0  # None where the length was not told


def build_opener() -> urllib.request.OpenerDirector:
    """For `get`. It follows no redirection: what is asked for is at the address that was given, or nowhere."""
    return urllib.request.build_opener(_RefuseRedirects, _Http, _Https)


class _Request(urllib.request.Request):
    def __init__(self, url: str, deadline: Deadline) -> None:
        super().__init__(url)
        self.deadline = deadline


class _Watched:
    """Mixed into http.client's connections: tells the deadline its socket."""

    sock: socket.socket

    def __init__(self, *args: Any, deadline: Deadline, **kwargs: Any) -> None:  # noqa: ANN401 - as http.client has it
        super().__init__(*args, **kwargs)
        self._deadline = deadline

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]  # http.client's
        self._deadline.watch(self.sock)


class _ClearConnection(_Watched, http.client.HTTPConnection):
    """In the clear."""


class WatchedTlsConnection(_Watched, http.client.HTTPSConnection):
    """Over TLS, whose handshake has one timeout as a whole."""


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(functools.partial(_ClearConnection, deadline=_deadline(req)), req)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(functools.partial(WatchedTlsConnection, deadline=_deadline(req)), req)


def _deadline(request: urllib.request.Request) -> Deadline:
    return request.deadline if isinstance(request, _Request) else Deadline()


class _RefuseRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Follow nothing."""
