"""A device's session with its coordinator: presence, subscriptions, messages in, requests out, blobs that are fetched.

`Session` has no loop. Its owner (runtime/client.py, nearest/over_mqtt.py) waits for events and hands each one to
`handle`. The owner's handlers take the checked messages, by kind.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from edge_client.config import ClientConfig
from edge_client.errors import Malformed, ProtocolError
from edge_client.protocol import messages, signing
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.message_schemas import MAX_DETAIL_CHARS
from edge_client.protocol.topics import Topics
from edge_client.runtime.downloader import Downloader, open_cache
from edge_client.runtime.sender import DeviceSender, presence_message
from edge_client.runtime.state import DeviceState
from edge_client.transport.base import Connected, Dial, Event, Message, Will
from edge_client.transport.clock import Clock

log = logging.getLogger(__name__)

WAIT_CODES = ("busy", "rate")  # the device asks again by itself
QUIET_S = 600.0
Handler = Callable[[Mapping[str, Any]], None]
ClientLoop = Generator[float, Event | None, None]  # yields seconds; is sent the event that came within them, or None


class Session:
    """The session of one device.

    `presence` gives the fields of the device's presence message. A device with a handler for `task` answers a message
    that it cannot read with a `nack`, so that the coordinator does not wait; a device without one reads the catalog.
    `retry_s` is the wait after an error answer that names none.
    """

    def __init__(  # noqa: PLR0913 - the parts of a session
        self,
        config: ClientConfig,
        dial: Dial,
        *,
        handlers: Mapping[str, Handler],
        presence: Callable[[], dict[str, Any]],
        clock: Clock,
        rng: np.random.Generator,
        retry_s: float = 0.0,
    ) -> None:
        self.config, self.clock = config, clock
        self._handlers, self._presence, self._retry_s = handlers, presence, retry_s
        self._topics = Topics(config.federation)
        self.state = DeviceState(
            config.state,
            federation=config.federation,
            device_id=config.device_id,
            trusted_keys=[signing.key_id(key) for key in config.signing_keys],
        )
        self.transport = dial(self._will)
        self.sender = DeviceSender(self._topics, config.device_id, self.transport, clock=clock, rng=rng)
        self.cache = open_cache(config)
        self.downloads = Downloader(self.cache, self.sender.request_blocks)
        self.stopping = threading.Event()
        self.failure: ProtocolError | None = None
        self._quiet_until_s: dict[str, float] = {}  # by text
        self.is_live = False  # whether the message at hand was sent just now; else the broker had it

    def close(self) -> None:
        """Leave: a presence message "off", then a clean disconnection."""
        self.downloads.pause()
        self.sender.send_presence("off", self.state.birth)
        self.transport.close()

    def stop(self) -> None:
        """Ask the owner's loop to end; from any thread."""
        self.stopping.set()
        self.transport.wake()

    def fail(self, why: str, *, hint: str) -> None:
        """End the session with an error that a retry does not repair."""
        self.failure = ProtocolError(why, hint=hint)
        self.stopping.set()

    def raise_failure(self) -> None:
        """Raise the ProtocolError of `fail`, if there is one."""
        if self.failure is not None:
            raise self.failure

    def announce(self) -> None:
        self.sender.send_presence("on", self.state.birth, **self._presence())

    def fetch(self, manifests: Iterable[Manifest]) -> Iterator[float]:
        """Fetch blobs: yields the seconds to wait for the next event, until all are in the cache. Raises Malformed."""
        self.downloads.start(manifests)
        while (wait_s := self.downloads.step(self.clock.now_s())) is not None:
            yield wait_s

    def handle(self, event: Event | None) -> None:
        if isinstance(event, Message):
            self._on_message(event)
        elif isinstance(event, Connected):
            self.transport.subscribe(*self._topics.device_filters(self.config.device_id))
            self._rejoin()

    def _on_message(self, event: Message) -> None:
        takes_tasks = "task" in self._handlers
        self.is_live = not event.retained
        try:
            route = self._topics.parse(event.topic)
            if route.kind == "b" and route.label is not None and route.index is not None:
                self.downloads.on_block(route.label, route.index, event.payload)
                return
            if not event.payload or (takes_tasks and route.kind not in ("t", "coord")):
                return
            message = messages.read_message(event.payload, route.kind)
        except Malformed as wrong:
            self.note("cannot read a message on %.99s: %.200s", event.topic, wrong.message)
            if takes_tasks:
                self._refuse_unreadable(event.payload, wrong)
            return
        if self._is_current(message):
            self._dispatch(message)
        elif takes_tasks and route.kind == "t":
            detail = f"epoch {message['epoch']}; {self.state.epoch} was seen before"
            self.sender.send("nack", re=message["id"], code="old_epoch", detail=detail)

    def _is_current(self, message: Mapping[str, Any]) -> bool:
        """Whether no later coordinator is known. Only the epoch of a signed record is stored."""
        if message["k"] != "coord":
            return bool(message["epoch"] >= self.state.epoch)
        try:
            keys, federation = self.config.signing_keys, self.config.federation
            epoch = signing.verify_record(message, keys, federation, known=self.state.epoch)
        except Malformed as wrong:
            self.note("ignored a coordinator's record: %s", wrong.message)
            return False
        return self.state.see_epoch(epoch, message["key"])

    def _refuse_unreadable(self, payload: bytes, wrong: Malformed) -> None:
        """Answer a message that breaks a rule, if its id can be read."""
        try:
            ident = messages.parse_json(payload)["id"]
            self.sender.send("nack", re=ident, code=wrong.code, detail=wrong.message[:MAX_DETAIL_CHARS])
        except (Malformed, KeyError, TypeError):
            return

    def _dispatch(self, message: Mapping[str, Any]) -> None:
        kind = message["k"]
        if kind == "rebirth":
            self._rejoin()
        elif kind == "err":
            self._on_error(message)
        if kind in self._handlers:
            self._handlers[kind](message)

    def _on_error(self, message: Mapping[str, Any]) -> None:
        code = message["code"]
        level = logging.INFO if code in WAIT_CODES else logging.WARNING
        self.note(f"the coordinator answers {code}: %s", message.get("detail", "no detail"), level=level)
        if code == "not_member":
            self.fail("this device is not enrolled here", hint="ask for a new join file")
        wait_s = message.get("retry_ms", self._retry_s * 1000) / 1000
        self.downloads.on_error(message.get("re"), code, self.clock.now_s() + wait_s)

    def note(self, text: str, *facts: object, level: int = logging.WARNING) -> None:
        """Log what a broker can cause: a line of each text in QUIET_S."""
        now_s = self.clock.now_s()
        if now_s >= self._quiet_until_s.get(text, now_s):
            self._quiet_until_s[text] = now_s + QUIET_S
            log.log(level, text, *facts)

    def _rejoin(self) -> None:
        """The coordinator may have dropped the device's requests: announce it, and ask for the blocks again."""
        self.announce()
        self.downloads.link_lost()

    def _will(self) -> Will:
        """The will of the next connection, with its birth number; called from any thread."""
        birth = self.state.next_birth()
        payload = presence_message("lost", birth, ident=f"lost-{birth}", t_ms=self.clock.unix_ms())
        return Will(self._topics.state(self.config.device_id), payload)
