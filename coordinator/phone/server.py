"""`fedcenters-coordinator phone`: the phone's page alone, for a coordinator without a dashboard."""

from __future__ import annotations

import sys
from pathlib import Path

import uvicorn
from starlette.responses import RedirectResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from coordinator.config import CoordinatorConfig, read_config
from coordinator.identity import join_links
from coordinator.phone import routes
from edge_client.errors import NetworkError, UsageError
from edge_client.printable import put_on_stderr
from export.serve.http_gate import Refusal, RequestHead, create_gated_app
from export.serve.listener import ConnectionSlots, is_loopback, open_listener
from export.serve.rate_limits import RateLimiter
from export.serve.uvicorn_settings import uvicorn_config

THIS_COMPUTER = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - all addresses of it are none for a browser
FACTS_PER_S, FACTS_BURST = 50.0, 200.0  # of an address, which many phones may have
MAX_CONNECTIONS, MAX_CONNECTIONS_PER_ADDRESS = 512, 64


def run_phone_server(path: Path, listen: str, *, url: str, certificate: Path | None, key: Path | None) -> None:
    """Serve until Ctrl-C. Raises UsageError for wrong options, NetworkError for a port in use."""
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not port.isdecimal() or int(port) >= 1 << 16:
        raise UsageError(f"--listen is {listen!r}", hint="use HOST:PORT, as 127.0.0.1:8090")
    if (certificate is None) != (key is None):
        raise UsageError("https needs a certificate and its key", hint="give --certificate and --key together")
    settings = uvicorn_config(phone_app(read_config(path)), certificate=certificate, key=key)
    try:
        settings.load()
    except OSError as wrong:
        raise NetworkError(f"cannot speak TLS: {wrong}", hint="is the certificate right, is it the key's?") from None
    opened = open_listener(host, int(port), what="the phone's page", option="--listen", slots=connection_slots(host))
    mine = THIS_COMPUTER.get(host, host)
    named = f"[{mine}]" if ":" in mine else mine
    base = url or f"{'http' if certificate is None else 'https'}://{named}:{opened.getsockname()[1]}"
    link = join_links.phone_link(base)
    here = is_loopback(mine) and not url
    wanted = "--listen 0.0.0.0 and --url" if mine == host else "--url, the address by which they reach it"
    where = f"in a browser of this computer (phones need {wanted})" if here else "on a phone"
    put_on_stderr(f"{join_links.qr_terminal(link)}open this link {where}:\n")
    sys.stdout.write(f"{link}\n")
    sys.stdout.flush()
    uvicorn.Server(settings).run(sockets=[opened])


def phone_app(config: CoordinatorConfig, *, third: Path | None = None) -> ASGIApp:
    """The page; also for a person who types the address without a path."""
    front = Route("/", lambda _: RedirectResponse(routes.RELATIVE_PATH))
    facts = RateLimiter(FACTS_PER_S, FACTS_BURST)

    def refuse(head: RequestHead) -> Refusal | None:
        is_flood = head.path == join_links.PHONE_FACTS and facts.wait_s(head.client, head.now_s) > 0
        return Refusal(status=429, error="too many requests") if is_flood else None

    return create_gated_app([front, *routes.phone_routes(config, third=third)], rule=refuse)


def connection_slots(host: str) -> ConnectionSlots:
    """How many connections may be open. A loopback address is reached by this machine, or by a proxy for all."""
    one_address = MAX_CONNECTIONS if is_loopback(host) else MAX_CONNECTIONS_PER_ADDRESS
    return ConnectionSlots(total=MAX_CONNECTIONS, per_address=one_address)
