"""A server's certificate that is renewed while the server runs: its files are looked at when a client connects.

Public certificates last for three months or less, and coordinators run for longer. The client that finds new files
still gets the certificate of before, and each later one the new.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

log = logging.getLogger(__name__)
FileStamps = tuple[tuple[int, int, int], ...]  # of both files: modification time, inode, size


def follow_renewals(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Let `context`, which has these files already, take them again whenever they have changed and fit each other."""
    seen = _stamps(certificate, key)

    def look(*_: object) -> None:
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

    context.sni_callback = look


def _stamps(*files: Path) -> FileStamps | None:
    try:
        found = [file.stat() for file in files]
    except OSError:
        return None
    return tuple((each.st_mtime_ns, each.st_ino, each.st_size) for each in found)
