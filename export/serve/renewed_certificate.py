"""A server's certificate that is renewed while the server runs: its files are looked at when a client connects.

Public certificates last for three months or less, and coordinators run for longer. The client that finds new files
still gets the certificate of before, and each later one the new.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)
FileStamps = tuple[tuple[int, int, int], ...]  # of both files: modification time, inode, size


def follow_renewals(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Let `context`, which has these files already, take them again whenever they have changed and fit each other."""
    look = renewal_watch(context, certificate, key)
    context.sni_callback = lambda *_: look()


def renewal_watch(context: ssl.SSLContext, certificate: Path, key: Path) -> Callable[[], None]:
    """What lets `context` take its files again, if they have changed, when it is called; never from two threads.

    A server with a thread for each connection calls it before it accepts one, as another thread may be in the middle of
    using the context where its own handshake would.
    """
    seen = _stamps(certificate, key)

    def look() -> None:
        nonlocal seen
        now = _stamps(certificate, key)
        if now is None or now == seen:
            return
        seen = now
        try:
            # in a context of its own first: a certificate of another key would leave this one with neither
            for each in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
                each.load_cert_chain(certificate, key, password="")  # a key with a password would ask a terminal
        except (OSError, ssl.SSLError) as wrong:  # one of the two is still to be copied
            log.warning("%s is not taken: %s; the server goes on with the certificate of before", certificate, wrong)
            return
        log.info("%s is taken", certificate)

    return look


def _stamps(*files: Path) -> FileStamps | None:
    try:
        found = [file.stat() for file in files]
    except OSError:
        return None
    return tuple((each.st_mtime_ns, each.st_ino, each.st_size) for each in found)
