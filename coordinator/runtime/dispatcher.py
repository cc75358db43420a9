"""Every message from the broker arrives here: decoded once, rate-limited, and passed to the part that answers it.

The topic names the sender; a payload does not. A message that breaks a rule is answered with the rule's code and
changes nothing. A device that never announced itself costs no memory.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from coordinator.runtime.block_server import BlockServer
from coordinator.runtime.catalog_server import CatalogServer
from coordinator.runtime.envelope import Envelope, open_envelope
from coordinator.runtime.exchange.current_exchange import CurrentExchange
from coordinator.runtime.leadership import Leadership
from coordinator.runtime.presence import DevicePresence, FleetPresence, TokenBucket
from coordinator.runtime.sender import CoordinatorSender
from coordinator.storage.event_log import EventLog
from coordinator.storage.key_value_store import REVOKED_FACT
from coordinator.storage.store import Store
from edge_client.errors import Malformed
from edge_client.protocol.message_schemas import ERR_CODES, MAX_DETAIL_CHARS
from edge_client.protocol.task import ClientId
from edge_client.protocol.topics import Route
from edge_client.transport.base import Message
from edge_client.transport.clock import Clock

log = logging.getLogger(__name__)

REQUESTS_PER_S, REQUESTS_BURST = 20.0, 40.0
LOOK_S = 2.0  # from one look at the revoked names to the next
UNHEARD_S = 5.0  # after the time over which devices spread their announcements to a new connection
RETRY_MS = {"rate": 2_000, "busy": 5_000}


class Dispatcher:
    """Takes every message that the coordinator subscribes to; `exchange` and `catalog` answer for their parts."""

    def __init__(  # noqa: PLR0913 - the parts that answer
        self,
        *,
        clock: Clock,
        store: Store,
        sender: CoordinatorSender,
        downloads: BlockServer,
        fleet: FleetPresence,
        event_log: EventLog,
        newcomers: Callable[[], str] = lambda: "now",
        revoked: Callable[[], Collection[ClientId]] = tuple,
    ) -> None:
        self.fleet = fleet
        self.exchange = CurrentExchange(store, sender)
        self.catalog = CatalogServer(store, sender, downloads, event_log)
        self.bytes_up = self.blocks_up = 0
        self.unreadable = 0  # messages
        self._clock, self._sender, self._downloads, self._event_log = clock, sender, downloads, event_log
        self._newcomers = newcomers  # when a device takes part that is not enrolled (PROTOCOL.md, `coord`)
        self._leadership = Leadership(sender, store)
        self._trainers = set(store.states.enrolled())  # devices whose samples the log knows
        self._revoked, self._facts, self._look_at_s = revoked, store.facts, -math.inf
        self._ask_at_s = math.inf  # when to ask devices of which this connection has heard nothing
        self._drop_at_s = math.inf  # when those that did not answer are not online any more
        self._buckets: dict[ClientId, TokenBucket] = {}
        self._strangers = TokenBucket(REQUESTS_PER_S, REQUESTS_BURST)  # one bucket for all unknown devices
        self._other_versions: set[ClientId] = set()  # devices of which the log says that they cannot take part
        self._handlers: Mapping[str, Callable[[Envelope], None]] = {
            "get": downloads.answer,
            "rdy": self.exchange.on_ready,
            "nack": self._on_nack,
            "near": self.catalog.on_near,
            "served": self.catalog.on_served,
        }

    def dispatch(self, message: Message, *, more: bool = False) -> None:
        """Handle one message from the broker. Raises Superseded when another coordinator leads.

        With `more` an update that it brings waits for `exchange.sync`, which stores it together with others.
        """
        self._dispatch(message)
        if not more:
            self.exchange.sync()

    def begin_link(self) -> None:
        """The connection to the broker is new: devices announce themselves to it."""
        self.fleet.doubt_all()
        self._ask_at_s = self._clock.now_s() + self._sender.spread_ms / 1000 + UNHEARD_S
        self._drop_at_s = math.inf

    def tick(self) -> None:
        """Delete what is due; ask, once for each connection, the devices that should have announced themselves to it.

        One that is there answers, also when it heard nothing of the new connection.
        """
        self._sender.delete_due()
        now_s = self._clock.now_s()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            self._turn_away(set(self._revoked()) - self.fleet.revoked)
        if now_s >= self._ask_at_s:
            self._ask_at_s, self._drop_at_s = math.inf, now_s + UNHEARD_S
            for cid in self.fleet.unheard():
                self._sender.send(cid, "rebirth")
        if now_s >= self._drop_at_s:
            self._drop_at_s = math.inf
            self.fleet.drop_doubted(self._clock.unix_ms())

    def _turn_away(self, names: Collection[ClientId]) -> None:
        """These names are revoked: the training goes on without them."""
        if not names:
            return
        told = set(json.loads(self._facts.get(REVOKED_FACT) or "[]"))
        concerned = [cid for cid in sorted(names) if cid in self.fleet.devices or cid in self._trainers]
        self.fleet.revoke(names)
        for cid in concerned:
            self._sender.delete_retained(self._sender.topics.state(cid))
        new = {cid for cid in concerned if cid not in told and self._event_log.note("revoked", device=cid)}
        if new:
            with suppress(OSError):  # on a full disk the next start logs them again
                self._facts.put(REVOKED_FACT, json.dumps(sorted(told | new)))
        self.exchange.on_revoked(names)

    def _dispatch(self, message: Message) -> None:
        self.bytes_up += len(message.payload)
        route = self._read_topic(message)
        if route is None or self._is_revoked(route, message):
            return
        if route.kind == "coord":
            record = open_envelope(route, message.payload)
            if record.error is None:
                self._leadership.on_record(record, live=not message.retained)
            else:
                self.unreadable += 1
        elif route.cid is None:
            self.unreadable += 1
        elif route.kind == "st":
            if message.payload:  # an empty one is a retained presence that was deleted
                self._on_presence(open_envelope(route, message.payload), message)
        elif route.kind == "rq":
            self._on_request(route.cid, route, message.payload)
        elif route.kind == "in" and route.index is not None:
            self.blocks_up += 1
            self.exchange.on_block(route.cid, route.label, route.index, message.payload)
        if route.cid is not None and not message.retained:
            self.fleet.mark_heard(route.cid, self._clock.unix_ms())

    def _is_revoked(self, route: Route, message: Message) -> bool:
        """Whether the sender is revoked: the broker keeps what it said, or has not read the access list yet."""
        if route.cid is None or route.cid not in self.fleet.revoked:
            return False
        if route.kind == "st" and message.payload and message.retained:
            self._sender.delete_retained(message.topic)
        elif route.kind == "rq" and self._strangers.allow(self._clock.now_s()):
            self._sender.send(route.cid, "err", code="not_member")
        return True

    def _read_topic(self, message: Message) -> Route | None:
        """The route; None for no topic of ours, and for a request or block that its sender had retained.

        Those are deleted at the broker, which would keep them for a device that left long ago.
        """
        route = None
        try:
            route = self._sender.topics.parse(message.topic)
        except Malformed:
            self.unreadable += 1
        if not message.retained or (route is not None and route.kind not in ("rq", "in")):
            return route
        if message.payload:  # an empty one is a deletion
            self._sender.delete_left(message.topic)
        return None

    def _on_presence(self, said: Envelope, message: Message) -> None:
        cid = said.cid
        if said.error is not None:
            self.unreadable += 1
            if said.error.code != "bad_version":
                self._sender.delete_left(message.topic)
            elif self._strangers.allow(self._clock.now_s()):
                self._on_another_version(said, said.error)
            return
        before, rejected = self.fleet.devices.get(cid), self.fleet.rejected
        if before is None and message.retained and said.fields["s"] in ("off", "lost"):
            self._sender.delete_retained(message.topic)  # it left before this process began
            return
        if self.fleet.update(cid, said.fields, unix_ms=self._clock.unix_ms(), retained=message.retained):
            self._on_change(cid, before)
        elif not rejected and self.fleet.rejected:  # the first one says it for all
            why = f"max-devices is {self.fleet.limit}, and none of them has been away for a day"
            self._event_log.note("left-out", device=cid, why=why)
        while self.fleet.gone:
            self._sender.delete_retained(self._sender.topics.state(self.fleet.gone.pop()))

    def _on_change(self, cid: ClientId, before: DevicePresence | None) -> None:
        """The presence of a device is another; one that only the broker calls online is not here yet."""
        if not self.fleet.devices[cid].is_online:
            return
        self._log_device(cid, known=before is not None and before.met)
        if self._bucket(cid).allow(self._clock.now_s()):  # its task is sent again
            self.exchange.on_connected(cid)

    def _log_device(self, cid: ClientId, *, known: bool) -> None:
        """Log a device that is new, and one that has samples now: a phone joins without, and then takes part."""
        device = self.fleet.devices[cid]
        trains = device.n > 0  # a device without samples only asks for a center
        if cid in self._trainers or (known and not trains):
            return
        when = {"takes_part": self._newcomers()} if trains and self._newcomers() != "now" else {}
        kind = "offers" if known else "joined"
        if self._event_log.note(kind, device=cid, engine=device.engine, n=device.n, **when) and trains:
            self._trainers.add(cid)

    def _on_request(self, cid: ClientId, route: Route, payload: bytes) -> None:
        """Decode a request only if its sender's rate allows an answer."""
        now_s, before = self._clock.now_s(), self.fleet.devices.get(cid)
        if self.fleet.confirm(cid):
            self._on_change(cid, before)
        if before is None:
            if self._strangers.allow(now_s):
                self._answer_stranger(open_envelope(route, payload))
            return
        bucket = self._bucket(cid)
        if bucket.allow(now_s):
            self._answer(open_envelope(route, payload))
        elif bucket.first_refusal():
            self._send_error(open_envelope(route, payload), Malformed("rate", "too many requests"))

    def _bucket(self, cid: ClientId) -> TokenBucket:
        """Of a device of the fleet."""
        if cid not in self._buckets and len(self._buckets) >= 2 * self.fleet.limit:  # half are of devices that left
            self._buckets = {known: bucket for known, bucket in self._buckets.items() if known in self.fleet.devices}
            self.catalog.forget_all_but(self.fleet.devices)
        return self._buckets.setdefault(cid, TokenBucket(REQUESTS_PER_S, REQUESTS_BURST))

    def _answer(self, request: Envelope) -> None:
        try:
            if request.error is not None:
                raise request.error
            self._handlers[request.fields["k"]](request)
        except Malformed as wrong:
            self._send_error(request, wrong)

    def _send_error(self, request: Envelope, wrong: Malformed) -> None:
        """An `err` that names the request, if the request could be read."""
        code = wrong.code if wrong.code in ERR_CODES else "bad_field"
        detail, retry_ms = str(wrong)[:MAX_DETAIL_CHARS], RETRY_MS.get(code)
        self._sender.send(request.cid, "err", re=request.ident, code=code, detail=detail, retry_ms=retry_ms)

    def _on_another_version(self, said: Envelope, wrong: Malformed) -> None:
        """The device cannot take part; its owner is told why, and once the log of this side."""
        if said.cid not in self._other_versions and len(self._other_versions) < self.fleet.limit:
            self._other_versions.add(said.cid)
            log.warning("%s cannot take part: %s", said.cid, wrong.message)
        self._send_error(said, wrong)

    def _answer_stranger(self, request: Envelope) -> None:
        if request.error is not None and request.error.code == "bad_version":
            self._on_another_version(request, request.error)
        elif len(self.fleet.devices) >= self.fleet.limit:
            self._sender.send(request.cid, "err", code="not_member")
        else:
            self._sender.send(request.cid, "rebirth")

    def _on_nack(self, nack: Envelope) -> None:
        log.info("%s refuses: %s %s", nack.cid, nack.fields["code"], nack.fields.get("detail", ""))
        if nack.fields["code"] == "old_epoch":
            self._leadership.on_old_epoch(nack)
        self.exchange.on_nack(nack)
