"""Attacks over HTTP on the dashboard and the enrolment listener: held connections, forged orders, bombs, paths."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass

from coordinator.attack_drill.findings import ACCESS, Attack, Seen
from coordinator.attack_drill.loopback_copy import PATIENCE_S, Installation
from coordinator.config import CoordinatorConfig
from coordinator.dashboard.access import TOKEN_FAILURES_BURST
from coordinator.dashboard.endpoint import Endpoint
from coordinator.dashboard.event_hub import Hub
from coordinator.dashboard.server import MAX_CONNECTIONS_PER_ADDRESS, DashboardServer
from coordinator.identity.enrolment_server import MAX_OPEN_REQUESTS_PER_ADDRESS, open_enrolment_server
from coordinator.storage.exchange_store import ExchangeKey

HOST, FOREIGN = "127.0.0.1", "evil.example"
TOKEN = "a token of the drill"  # noqa: S105 - of a server that ends with the drill
HALF_REQUEST, HALF_HANDSHAKE = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ", b"\x16\x03\x01"
HELD = 100  # connections
GUESSES = 40
OUTSIDE = ("/static/..%2fapp.py", "/api/files/..%2f..%2fsigning.key", "/api/files/%2fetc%2fpasswd", "/..%2fsigning.key")
STOP = json.dumps({"do": "stop"}).encode()
BOMB = gzip.compress(STOP + b" " * (32 << 20))


class _Orders:
    """Counts the orders that got through."""

    count = 0

    def pause(self) -> None:
        self.count += 1

    resume = stop = pause

    def close_round(self, _key: ExchangeKey) -> None:
        self.count += 1


@dataclass(frozen=True, kw_only=True)
class PagesCopy:
    """The ports of a dashboard and of an enrolment listener on this machine, and the orders that got through."""

    dashboard: int
    enrolment: int
    orders: _Orders

    def ask(self, path: str, *, method: str = "GET", body: bytes | None = None, **headers: str) -> int:
        """The status of the dashboard's answer; `headers` with _ for -."""
        with closing(http.client.HTTPConnection(HOST, self.dashboard, timeout=PATIENCE_S)) as link:
            link.request(method, path, body=body, headers={k.replace("_", "-"): v for k, v in headers.items()})
            return link.getresponse().status

    def order(self, body: bytes = STOP, **changes: str) -> int:
        """An order as the page sends it, but for the `changes`."""
        own = {
            "Authorization": f"Bearer {TOKEN}",
            "Content_Type": "application/json",
            "Origin": f"http://{HOST}:{self.dashboard}",
        }
        return self.ask("/api/control", method="POST", body=body, **(own | changes))

    def obeyed(self) -> int:
        """How many orders got through since the last call."""
        count, self.orders.count = self.orders.count, 0
        return count


@contextmanager
def pages_copy(site: Installation, config: CoordinatorConfig) -> Iterator[PagesCopy]:
    """Both servers, until the block ends."""
    orders, endpoint = _Orders(), Endpoint(host=HOST, port=0, control=TOKEN)
    with ExitStack() as stack:
        running = stack.enter_context(closing(DashboardServer(endpoint, config, Hub(), orders)))
        listener = stack.enter_context(open_enrolment_server(site.work.folder, HOST, tell=lambda _: None, port=0))
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        stack.callback(thread.join, PATIENCE_S)
        stack.callback(listener.shutdown)
        yield PagesCopy(dashboard=running.port, enrolment=listener.server_address[1], orders=orders)


def _held(port: int, sent: bytes) -> int:
    """How many of HELD connections the server keeps that have sent the beginning of something."""
    with ExitStack() as stack:
        opened = []
        for _ in range(HELD):
            with suppress(ConnectionError):
                one = stack.enter_context(socket.create_connection((HOST, port), PATIENCE_S))
                one.sendall(sent)
                opened.append(one)
        return sum(not _is_closed(one) for one in opened)


def _is_closed(one: socket.socket) -> bool:
    one.settimeout(0.01)
    try:
        return one.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def _half_requests(here: PagesCopy) -> Seen:
    held = _held(here.dashboard, HALF_REQUEST)
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:  # until the server has seen the end of those
        with suppress(ConnectionError):
            here.ask("/")
            return Seen(held <= MAX_CONNECTIONS_PER_ADDRESS, _kept(held))
    return Seen(held=False, words="the page does not answer any more")


def _half_handshakes(here: PagesCopy) -> Seen:
    held = _held(here.enrolment, HALF_HANDSHAKE)
    return Seen(held <= MAX_OPEN_REQUESTS_PER_ADDRESS, _kept(held))


def _kept(held: int) -> str:
    return f"{held} of {HELD} connections are kept"


def _foreign_name(here: PagesCopy) -> Seen:
    """As a page elsewhere does whose name is made to resolve to this machine."""
    return _refused([here.ask(path, Host=FOREIGN) for path in ("/", "/api/join", "/api/files")])


def _foreign_page(here: PagesCopy) -> Seen:
    """Even where it has the token."""
    origin = f"http://{FOREIGN}"
    kinds = ("application/json", "text/plain")
    return _disobeyed(here, [here.order(Origin=origin, Content_Type=kind) for kind in kinds])


def _guesses(here: PagesCopy) -> Seen:
    answers = [here.order(Authorization=f"Bearer {number}") for number in range(GUESSES)]
    read = answers.count(http.HTTPStatus.UNAUTHORIZED)
    slow = read < GUESSES and answers[-1] == http.HTTPStatus.TOO_MANY_REQUESTS
    obeyed = here.obeyed()
    return Seen(slow and not obeyed, f"{read} of {GUESSES} were looked at, {obeyed} obeyed")


def _bomb(here: PagesCopy) -> Seen:
    encodings = ("gzip", "identity")
    return _disobeyed(here, [here.order(BOMB, Content_Encoding=encoding) for encoding in encodings])


def _paths_outside(here: PagesCopy) -> Seen:
    return _refused([here.ask(path) for path in OUTSIDE])


def _disobeyed(here: PagesCopy, answers: list[int]) -> Seen:
    refused = _refused(answers)
    return Seen(refused.held is True and not here.obeyed(), refused.words)


def _refused(answers: list[int]) -> Seen:
    refused = [http.HTTPStatus.BAD_REQUEST <= status < http.HTTPStatus.INTERNAL_SERVER_ERROR for status in answers]
    return Seen(all(refused), f"answers {', '.join(map(str, answers))}")


PAGE_ATTACKS = (
    Attack(
        tried=f"hold {HELD} half requests at the dashboard",
        bound=f"{MAX_CONNECTIONS_PER_ADDRESS} of one address",
        where=ACCESS,
        play=_half_requests,
    ),
    Attack(
        tried=f"hold {HELD} half handshakes at `enrol`",
        bound=f"{MAX_OPEN_REQUESTS_PER_ADDRESS} of one address",
        where=ACCESS,
        play=_half_handshakes,
    ),
    Attack(tried="ask the dashboard by a foreign name", bound="refused", where=ACCESS, play=_foreign_name),
    Attack(tried="steer from a page elsewhere", bound="refused, also with the token", where=ACCESS, play=_foreign_page),
    Attack(tried="guess the token", bound=f"{TOKEN_FAILURES_BURST:g} at once", where=ACCESS, play=_guesses),
    Attack(tried="a body that unpacks to 32 MiB", bound="refused, not unpacked", where=ACCESS, play=_bomb),
    Attack(tried="paths out of the dashboard's folder", bound="refused", where=ACCESS, play=_paths_outside),
)
