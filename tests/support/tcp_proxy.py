"""A wire that breaks: TCP connections to a broker, each cut after so many bytes, wherever in a packet that is."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

CHUNK_BYTES = 1_000  # far below a block, so that a cut falls into one


class BreakingProxy:
    """Passes bytes on to `port`. The first `cuts` connections end after `bytes_each` of them, in both directions."""

    def __init__(self, port: int, *, cuts: int, bytes_each: int) -> None:
        self.made = 0
        self._port, self._cuts, self._bytes_each = port, cuts, bytes_each
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"mqtt://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                device, _ = self._listener.accept()
                self.made += 1
                try:
                    broker = socket.create_connection(("127.0.0.1", self._port))
                except OSError:
                    device.close()
                    continue
                left = _Budget(self._bytes_each if self.made <= self._cuts else None)
                for source, sink in ((device, broker), (broker, device)):
                    threading.Thread(target=_pass_on, args=(source, sink, left), daemon=True).start()


class _Budget:
    """What both directions of one connection may still carry; None: anything."""

    def __init__(self, left: int | None) -> None:
        self._left, self._lock = left, threading.Lock()

    def take(self, count: int) -> int:
        with self._lock:
            if self._left is None:
                return count
            given = min(count, self._left)
            self._left -= given
            return given


def _pass_on(source: socket.socket, sink: socket.socket, left: _Budget) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK_BYTES):
            given = left.take(len(data))
            sink.sendall(data[:given])
            if given < len(data):
                break
    for end in (source, sink):
        _break(end)


def _break(end: socket.socket) -> None:
    """Close without a goodbye: the other side sees a reset, as of a link that is gone."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@contextlib.contextmanager
def breaking_proxy(port: int, *, cuts: int, bytes_each: int) -> Iterator[BreakingProxy]:
    """One for the duration of a test."""
    made = BreakingProxy(port, cuts=cuts, bytes_each=bytes_each)
    try:
        yield made
    finally:
        made.close()
