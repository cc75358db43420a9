"""A listener that speaks TLS and nothing else."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress


@contextmanager
def tls_listener(tls: ssl.SSLContext, on_link: Callable[[ssl.SSLSocket], object]) -> Iterator[str]:
    """Its URL; `on_link` is called with each connection after the handshake, and ends it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    plain, _ = server.accept()
                except OSError:
                    return
                with closing(plain), suppress(OSError), tls.wrap_socket(plain, server_side=True) as link:
                    on_link(link)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"mqtts://localhost:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10)
