"""A server's certificate that is renewed while the server runs: its files are looked at when a client connects.

Public certificates last for three months or less, and coordinators run for longer. A certificate that ends soon, or has
ended, is told in the log: clients would say it, and the server serve on without a word.
"""

from __future__ import annotations

import datetime as dt
import logging
import ssl
from collections.abc import Callable
from pathlib import Path

from cryptography import x509

log = logging.getLogger(__name__)
WARNING_DAYS = 7  # public certificates are renewed before
FileStamps = tuple[tuple[int, int, int], ...]  # of both files: modification time, inode, size


def follow_renewals(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Let `context`, which has these files already, take them again whenever they have changed and fit each other."""
    look = renewal_watch(context, certificate, key)

    def show(connection: ssl.SSLObject, _name: str, _context: ssl.SSLContext) -> None:
        connection.context = look()

    context.sni_callback = show


def renewal_watch(context: ssl.SSLContext, certificate: Path, key: Path) -> Callable[[], ssl.SSLContext]:
    """What lets `context` take its files again, if they have changed, when it is called; never from two threads.

    It gives a context with these files alone. `context` itself keeps a certificate of before that is for another kind
    of key, as of EC beside RSA, and shows that to clients which prefer it.

    A server with a thread for each connection calls it before it accepts one, as another thread may be in the middle of
    using the context where its own handshake would.
    """
    seen, told, shown = _stamps(certificate, key), _today(), context
    _tell_end(certificate)

    def look() -> ssl.SSLContext:
        nonlocal seen, told, shown
        if told != _today():  # once a day
            told = _today()
            _tell_end(certificate)
        now = _stamps(certificate, key)
        if now is None or now == seen:
            return shown
        seen, fresh = now, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        fresh.set_ciphers(":".join(cipher["name"] for cipher in context.get_ciphers()))
        try:
            # in a context of its own first: a certificate of another key would leave this one with neither
            for each in (fresh, context):
                each.load_cert_chain(certificate, key, password="")  # a key with a password would ask a terminal
        except (OSError, ssl.SSLError) as wrong:  # one of the two is still to be copied
            log.warning("%s is not taken: %s; the server goes on with the certificate of before", certificate, wrong)
            return shown
        log.info("%s is taken", certificate)
        _tell_end(certificate)
        shown = fresh
        return shown

    return look


def _today() -> dt.date:
    return dt.datetime.now(dt.timezone.utc).date()


def _tell_end(certificate: Path) -> None:
    try:
        ends = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    except (OSError, ValueError):  # just being replaced
        return
    left = ends - dt.datetime.now(dt.timezone.utc)
    if left < dt.timedelta(days=WARNING_DAYS):
        what = "has ended, and clients refuse it" if left < dt.timedelta() else f"ends in {left.days} days"
        then = "put a new one in its place: this server reads it at once"
        log.warning("%s %s (%s); %s", certificate, what, f"{ends:%Y-%m-%d}", then)


def _stamps(*files: Path) -> FileStamps | None:
    try:
        found = [file.stat() for file in files]
    except OSError:
        return None
    return tuple((each.st_mtime_ns, each.st_ino, each.st_size) for each in found)
