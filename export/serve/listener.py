"""A listening socket with a bound on its open connections, in all and for each address.

A connection beyond a bound is closed as soon as it is accepted, before TLS and before a request: held connections of
one client cannot use up the file descriptors of the process, nor the places of other clients.
"""

from __future__ import annotations

import errno
import ipaddress
import math
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from edge_client.errors import NetworkError

IPV6_CLIENT_BITS = 64  # one client usually has so long a prefix to itself, so it counts as one address
# Of an answer in the kernel's buffer, which otherwise takes 4 MB and tells that a client reads when a third of it has
# left: for minutes a slow client looked as one that reads nothing.
MAX_UNSENT_BYTES = 64 << 10
OTHER_DESCRIPTORS = 64  # that a server has open beside its connections and the files for them


class ConnectionSlots:
    """At most `total` open connections, `per_address` of them from one address. Safe between threads."""

    def __init__(self, *, total: int, per_address: int) -> None:
        self._total, self._per_address = total, per_address
        self._open: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, address: str) -> bool:
        """Whether one more connection from the address may be open; if so, it is counted."""
        client = client_network(address)
        with self._lock:
            if self._open.total() >= self._total or self._open[client] >= self._per_address:
                return False
            self._open[client] += 1
            return True

    def release(self, address: str) -> None:
        """Count a connection that was taken as closed."""
        client = client_network(address)
        with self._lock:
            self._open[client] -= 1
            if self._open[client] <= 0:
                del self._open[client]


def client_network(address: str) -> str:
    """What counts as one client: an IPv4 address, or the prefix of IPV6_CLIENT_BITS of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, IPV6_CLIENT_BITS), strict=False))


def is_loopback(host: str) -> bool:
    """Whether a server that listens there is reached by this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def affordable_connections(most: int) -> int:
    """At most `most` connections, and no more than the process has descriptors for: each may read a file.

    The process's own limit is raised as far as it may be.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return most
    soft, hard = (_number(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    wanted = min(hard, 2 * most + OTHER_DESCRIPTORS)
    if soft < wanted:
        with suppress(OSError, ValueError):  # a system may have a lower one
            resource.setrlimit(resource.RLIMIT_NOFILE, (int(wanted), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            soft = wanted
    return max(1, (int(min(soft, 2 * most + OTHER_DESCRIPTORS)) - OTHER_DESCRIPTORS) // 2)


def _number(limit: int) -> float:
    return math.inf if limit < 0 else limit


class _Connection(socket.socket):
    """An accepted connection, which gives its slot back when it is closed."""

    on_close: Callable[[], None] | None = None

    def close(self) -> None:
        super().close()
        done, self.on_close = self.on_close, None
        if done is not None:
            done()


class _Listener(socket.socket):
    slots: ConnectionSlots

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises ConnectionAbortedError for a connection without a slot, which servers ignore."""
        plain, address = super().accept()
        if not self.slots.take(address[0]):
            plain.close()
            raise ConnectionAbortedError(errno.ECONNABORTED, "this address has too many connections")
        counted = _Connection(fileno=plain.detach())
        counted.on_close = lambda: self.slots.release(address[0])
        return counted, address


def open_listener(
    host: str, port: int, *, what: str, option: str, slots: ConnectionSlots, backlog: int | None = None
) -> socket.socket:
    """A listening TCP socket. Raises NetworkError with `what` cannot listen, why, and the `option` that moves it."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        plain = socket.create_server((host, port), family=family, backlog=backlog)
    except OSError as wrong:
        in_use = wrong.errno == errno.EADDRINUSE
        raise NetworkError(
            f"{what} cannot listen on {host}:{port}: {'the port is in use' if in_use else wrong.strerror or wrong}",
            hint=f"choose another with {option}" + (", or end the program that uses it" if in_use else ""),
        ) from None
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # accepted connections have it, too
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
    listener = _Listener(fileno=plain.detach())
    listener.slots = slots
    return listener
