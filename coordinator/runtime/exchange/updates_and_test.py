"""A run without rounds, with the test that goes on beside its updates: one object for the event loop.

A device of the test is asked when it has no task, and gets no task before it has answered or the test is over. The
others train meanwhile. A test has its own exchange (live_exchange.py), and may outlast the round in which it began.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from coordinator.runtime.envelope import Envelope
from coordinator.runtime.exchange.live_exchange import LiveExchange
from coordinator.runtime.exchange.live_updates import LiveUpdates, Presence
from coordinator.runtime.exchange.task_messages import ExchangeContext
from coordinator.runtime.exchange.upload_receiver import Announcement
from coordinator.storage.exchange_store import ExchangeKey
from edge_client.protocol.task import ClientId


class UpdatesAndTest:
    """`updates` always go on; `test` is None between two tests.

    `is_online` says which devices are connected, `newcomers` whether one waits to be let in, which is between rounds.
    """

    late_updates = None  # an update of a task that was stopped is never used
    count_answers = None  # of the devices that it waits for: there are none

    def __init__(
        self,
        run: str,
        context: ExchangeContext,
        *,
        is_online: Callable[[ClientId], bool],
        newcomers: Callable[[], bool],
    ) -> None:
        self.test: LiveExchange | None = None
        presence = Presence(
            is_free=lambda who: is_online(who) and not self._tests(who), at_test=self._is_testing, newcomers=newcomers
        )
        self.updates = LiveUpdates(run, context, presence)
        self._not_asked: set[ClientId] = set()  # of the test: devices that had a task when it was begun

    def postpone_tests(self) -> None:
        """Before a round is opened: the time since the last one, as of a pause, is taken from no test."""
        for test in self._open_tests():
            test.postpone(self.updates.unheard_s)

    @property
    def key(self) -> ExchangeKey:
        return self.updates.key

    @property
    def closed(self) -> bool:
        """Whether the round is over; the test does not hold it up."""
        return self.updates.closed

    @property
    def wakes_at_s(self) -> float:
        return min([self.updates.wakes_at_s, *(test.wakes_at_s for test in self._open_tests())])

    @property
    def unsynced_since_s(self) -> float:
        return min([self.updates.unsynced_since_s, *(test.unsynced_since_s for test in self._open_tests())])

    def takes(self, said: Announcement) -> bool:
        return self.updates.takes(said) or (self.test is not None and self.test.takes(said))

    def progress(self) -> dict[str, Any]:
        """That of the updates; `updates` tells of the test, too, while there is one."""
        found = self.updates.progress()
        for test in self._open_tests():
            now = test.progress()
            found["updates"]["test"] = {"answered": len(now["answered"]), "wanted": now["wanted"]}
        return found

    def begin(self) -> None:
        """After each connection to the broker."""
        if self.test is not None:
            self.begin_test(self.test)
        self.updates.begin()

    def begin_test(self, test: LiveExchange) -> None:
        """Ask the devices of a test: those that are free now, the others when they have done their task."""
        self.test = test
        self._not_asked = {who for who in self.updates.journalled.tasks if test.wants(who)}
        test.begin()

    def resend_task(self, cid: ClientId) -> None:
        """A device is here."""
        if self.test is not None and self._tests(cid) and not self.updates.has_task(cid):
            self.test.resend_task(cid)
        else:
            self.updates.resend_task(cid)

    def tick(self) -> None:
        for test in self._open_tests():
            test.tick()
        self.updates.tick()
        self._go_on()

    def on_quiet(self) -> None:
        for test in self._open_tests():
            test.on_quiet()

    def close(self) -> None:
        """End the round now; the test goes on."""
        self.updates.close()

    def finish(self) -> None:
        """The run is over: neither tasks nor the test are wanted any more."""
        for test in self._open_tests():
            test.close()
        self.updates.finish()

    def sync(self) -> None:
        for test in self._open_tests():
            test.sync()
        self.updates.sync()
        self._go_on()

    def on_ready(self, said: Announcement) -> None:
        """An announcement for one of both, which `takes` it. Raises Malformed with the code of the error answer."""
        if self.updates.takes(said):
            self.updates.on_ready(said)
        elif self.test is not None:
            self.test.on_ready(said)
        self._go_on()

    def on_block(self, cid: ClientId, label: str | None, index: int, message: bytes) -> None:
        if self.test is not None and self._tests(cid) and not self.updates.has_task(cid):
            self.test.on_block(cid, label, index, message)
        else:
            self.updates.on_block(cid, label, index, message)
        self._go_on()

    def on_revoked(self, names: Collection[ClientId]) -> None:
        """The test does not wait for these devices, and their tasks end."""
        for test in self._open_tests():
            test.on_revoked(names)
        self.tick()

    def on_nack(self, message: Envelope) -> None:
        """A refusal of one of both; each knows its own messages."""
        for test in self._open_tests():
            test.on_nack(message)
        self.updates.on_nack(message)
        self._go_on()

    def _open_tests(self) -> list[LiveExchange]:
        return [self.test] if self.test is not None and not self.test.closed else []

    def _is_testing(self) -> bool:
        return bool(self._open_tests())

    def _tests(self, who: ClientId) -> bool:
        return self.test is not None and self.test.wants(who)

    def _go_on(self) -> None:
        """Ask the devices that have become free for their test, and give tasks to those that have done it."""
        if self.test is not None:
            free = [who for who in self._not_asked if not self.updates.has_task(who)]
            self._not_asked.difference_update(free)
            for who in sorted(free):
                self.test.resend_task(who)
        self.updates.step()
