"""`fedcenters-export serve`: app.py behind uvicorn, with limits on connections, optional TLS and optional tokens."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from edge_client.errors import ConfigError, NetworkError
from edge_client.printable import put_on_stderr
from export.serve.access import ServeAccess
from export.serve.app import create_serve_app
from export.serve.generations import GenerationManager
from export.serve.listener import ConnectionSlots, affordable_connections, is_loopback, open_listener
from export.serve.rate_limits import RateLimiter
from export.serve.rollout import RolloutPlan
from export.serve.site import only_server
from export.serve.uvicorn_settings import uvicorn_config

MAX_CONNECTIONS = 4_096
ADDRESSES = 8  # that have to hold all they may until there is no place for others
SOCKET_BACKLOG = 1_024
MIN_TOKEN_CHARS = 16


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of the command. `rate` is in requests per second and address; 0: no limit."""

    bundle: Path
    site: Path
    host: str = "127.0.0.1"
    port: int = 8080
    plan: RolloutPlan = field(default_factory=RolloutPlan)
    rate: float = 50.0
    token: Path | None = None
    report_token: Path | None = None
    names: Sequence[str] = ()
    certificate: Path | None = None
    key: Path | None = None
    trusted: Sequence[bytes] = ()


def run_server(options: ServeOptions) -> None:
    """Serve until a signal. Raises ConfigError or NetworkError when the server cannot start."""
    if (options.certificate is None) != (options.key is None):
        raise ConfigError("TLS needs a certificate and its key", hint="give --certificate and --key")
    with only_server(options.site):
        _serve(options)


def _serve(options: ServeOptions) -> None:
    manager = GenerationManager(options.site, options.bundle, options.plan, options.trusted)
    app = create_serve_app(manager, access_of(options))
    config = uvicorn_config(app, certificate=options.certificate, key=options.key, lifespan=True, fast=True)
    try:
        config.load()
    except OSError as wrong:
        raise NetworkError(f"cannot speak TLS: {wrong}", hint="is the certificate right, is it the key's?") from None
    socket = open_listener(  # it listens now: a reader of the line below may connect at once
        options.host,
        options.port,
        what="the server of centers",
        option="--host or --port",
        slots=connection_slots(),
        backlog=SOCKET_BACKLOG,
    )
    scheme, port = "http" if options.certificate is None else "https", socket.getsockname()[1]
    host = f"[{options.host}]" if ":" in options.host else options.host
    put_on_stderr(f"serving {options.bundle} at {scheme}://{host}:{port}/centers; Ctrl-C ends it\n")
    uvicorn.Server(config).run(sockets=[socket])


def access_of(options: ServeOptions) -> ServeAccess:
    """A server with a name is not local: where it listens on loopback, a proxy hands requests of others on."""
    return ServeAccess(
        rate=RateLimiter(options.rate),
        token=None if options.token is None else read_token(options.token),
        report_token=None if options.report_token is None else read_token(options.report_token),
        names=frozenset(name.lower() for name in options.names),
        is_local=is_loopback(options.host) and not options.names,
    )


def connection_slots() -> ConnectionSlots:
    """As many as the process has descriptors for, at most MAX_CONNECTIONS."""
    total = affordable_connections(MAX_CONNECTIONS)
    return ConnectionSlots(total=total, per_address=max(1, total // ADDRESSES))


def read_token(path: Path) -> str:
    """A token file: one line, readable by its owner only. Raises ConfigError."""
    try:
        token = path.read_text(encoding="ascii").strip()
        mode = stat.S_IMODE(path.stat().st_mode)
    except (OSError, ValueError) as wrong:
        raise ConfigError(f"{path} holds no token: {wrong}", hint="write one line of text into it") from None
    if mode & 0o077:
        raise ConfigError(f"{path} can be read by others", hint=f"chmod 600 {path}")
    if len(token) < MIN_TOKEN_CHARS or not token.isprintable() or " " in token:
        raise ConfigError(f"{path} holds no token of {MIN_TOKEN_CHARS} characters or more", hint="openssl rand -hex 32")
    return token
