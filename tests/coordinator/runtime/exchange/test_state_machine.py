"""Any interleaving of announcements, blocks, refusals, silence and crashes: no accepted update is lost or counts twice.

Exchange rules, dispatcher, uploads and store as the server wires them, driven by bytes; a crash drops all of them, and
only the folder remains. `Killed` at a write of the store is a SIGKILL right before or right after its commit.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from coordinator.runtime.exchange.exchange_driver import run_exchange
from coordinator.runtime.exchange.live_exchange import LiveExchange
from coordinator.storage.exchange_store import ExchangeKey
from edge_client.protocol.blocks import Bitmap
from tests.support.virtual_federation import BALLAST
from tests.support.virtual_time import Killed, VirtualClock
from tests.support.wired_coordinator import DEVICES, SAMPLES, WiredCoordinator

EXCHANGES = 3
ANYONE = st.sampled_from(DEVICES)
ATTEMPT = st.integers(0, 1)  # the second one is another result for the same task


class Machine(RuleBasedStateMachine):
    """One run of three exchanges. `accepted` is what devices were told counts; it must be what counts."""

    alive: WiredCoordinator

    @initialize(
        ballast=st.sampled_from([0, BALLAST]),
        free=st.integers(1, 3),
        wanted=st.sampled_from([None, 3]),
        window=st.integers(1, len(DEVICES)),
    )
    def start(self, ballast: int, free: int, wanted: int | None, window: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.clock = VirtualClock()
        self.ballast, self.credits, self.wanted, self.window = ballast, free, wanted, window
        self.number = 0
        self.accepted: dict[tuple[ExchangeKey, str], str] = {}
        self.closings: dict[ExchangeKey, list[str]] = {}
        self.granted: dict[str, dict[str, Any]] = {}  # device -> its last `go`
        self.lives = 0
        self.reopen()

    @property
    def key(self) -> ExchangeKey:
        return ExchangeKey("run1", 1, self.number)

    # -- what happens

    @rule(cid=ANYONE, attempt=ATTEMPT)
    def announces(self, cid: str, attempt: int) -> None:
        self.survive(lambda: self.alive.announce(cid, attempt, self.key))

    @rule(cid=ANYONE, attempt=ATTEMPT, indices=st.lists(st.integers(0, 5), max_size=8))
    def sends_blocks(self, cid: str, attempt: int, indices: list[int]) -> None:
        self.survive(lambda: self.alive.send(self.key, cid, attempt, indices))

    @rule(cid=ANYONE, index=st.integers(0, 4))
    def sends_a_damaged_block(self, cid: str, index: int) -> None:
        self.survive(lambda: self.alive.send(self.key, cid, 0, [index], flip=True))

    @rule(cid=ANYONE)
    def delivers(self, cid: str) -> None:
        self.survive(lambda: self.deliver(cid))

    @rule(cid=ANYONE)
    def refuses(self, cid: str) -> None:
        key = self.key._asdict()
        re = f"c{self.alive.sender.epoch}-1"
        self.survive(lambda: self.alive.hear(cid, "nack", re=re, code="unavailable", **key))

    @rule(cid=ANYONE, attempt=ATTEMPT)
    def says_an_old_thing_again(self, cid: str, attempt: int) -> None:
        """Of the exchange before, or of one that never was."""
        key = self.key._replace(exchange=self.number - 1) if self.number else self.key._replace(round=9)
        self.survive(lambda: self.alive.announce(cid, attempt, key))

    @rule(seconds=st.sampled_from([1.0, 9.0, 31.0, 120.0, 301.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.time_s += seconds
        self.survive(self.tick)

    @rule()
    def the_broker_forgets(self) -> None:
        live = self.alive.dispatcher.exchange.live
        if live is not None:
            self.survive(live.begin)

    @rule()
    def messages_wait(self) -> None:
        """From here on updates wait for the disk together."""
        self.alive.more = True

    @rule()
    def no_message_waits(self) -> None:
        self.alive.more = False
        self.survive(self.alive.dispatcher.exchange.sync)
        self.survive(self.alive.dispatcher.exchange.on_quiet)

    @rule()
    def is_killed(self) -> None:
        self.reopen()

    @rule(nth=st.integers(1, 3), before=st.booleans())
    def will_be_killed_at_a_write(self, nth: int, before: bool) -> None:  # noqa: FBT001 - drawn by name
        database = self.alive.store.database
        database.fatal, database.before = database.writes + nth, before

    @precondition(lambda self: self.alive.dispatcher.exchange.live is None and self.number + 1 < EXCHANGES)
    @rule()
    def the_next_exchange_begins(self) -> None:
        self.number += 1
        self.survive(lambda: self.alive.ask(self.key, self.wanted))

    # -- what must hold

    @invariant()
    def what_was_acknowledged_is_stored(self) -> None:
        for (key, cid), sha256 in self.accepted.items():
            stored = self.alive.store.exchanges.replies(key)[cid]
            assert stored.sha256 == sha256
            assert self.alive.store.updates(cid).has(sha256)

    @invariant()
    def a_closing_stands_for_ever_and_misses_nobody(self) -> None:
        for key in [self.key._replace(exchange=number) for number in range(self.number + 1)]:
            closed = self.alive.store.exchanges.closed_with(key)
            if key in self.closings:
                assert closed == self.closings[key]
            elif closed is not None:
                self.closings[key] = closed
            if closed is not None:
                assert closed == sorted(self.alive.store.exchanges.replies(key))
                assert {cid for known, cid in self.accepted if known == key} <= set(closed)

    def teardown(self) -> None:
        """Whatever happened: with devices that answer the run finishes, and each counts once with what was stored."""
        if not hasattr(self, "alive"):
            return
        try:
            self.finish()
        finally:
            self.alive.store.close()
            shutil.rmtree(self.folder)

    def finish(self) -> None:
        self.alive.store.database.fatal = 0
        self.reopen()
        while True:
            for cid in DEVICES:
                self.deliver(cid)
            assert self.alive.dispatcher.exchange.live is None
            self.read_back()
            if self.number + 1 == EXCHANGES:
                return
            self.number += 1
            self.alive.ask(self.key, self.wanted)

    def read_back(self) -> None:
        """What a method is given: once per device that the exchange closed with, start + the delta that was stored."""
        for number in range(self.number + 1):
            key = self.key._replace(exchange=number)
            replies = run_exchange(key, self.alive.tasks(key), self.wanted, self.alive.context, _never)
            assert sorted(replies) == self.closings.get(key, sorted(replies))
            stored = self.alive.store.exchanges.replies(key)
            for cid, reply in replies.items():
                attempt = [self.alive.update(key, cid, a)[0].sha256 for a in (0, 1)].index(stored[cid].sha256)
                assert reply.n == SAMPLES - attempt
                expected = self.alive.base(key) + self.alive.delta(cid, attempt)
                np.testing.assert_array_equal(reply.update, expected)

    # -- devices

    def deliver(self, cid: str) -> None:
        """As a device does: announce, wait for the credit, send what is missing; without one, once more later."""
        for _ in range(len(DEVICES) + 1):
            self.granted.pop(cid, None)
            self.alive.announce(cid, 0, self.key)
            self.listen()
            go = self.granted.get(cid)
            if go is not None:
                manifest, _ = self.alive.update(self.key, cid, 0)
                have = Bitmap.from_base64(manifest.total, go["have"]) if "have" in go else Bitmap(manifest.total)
                self.alive.send(self.key, cid, 0, [index for index in range(manifest.total) if not have.has(index)])
            self.tick()
            self.listen()
            if go is not None or (self.key, cid) in self.accepted:
                return
            self.clock.time_s += 31.0  # other credits fall back
            self.tick()

    # -- a process and its end

    def survive(self, act: Callable[[], None]) -> None:
        """Do it; if that was the end of the process, start the next one."""
        try:
            act()
            self.tick()
        except Killed:
            self.listen()  # what it said before counts
            self.reopen()
        self.listen()

    def tick(self) -> None:
        """The event loop's part: time, and the end of an exchange."""
        live = self.alive.dispatcher.exchange.live
        self.clock.time_s += 0.1
        if live is not None and not live.closed and self.clock.time_s >= live.wakes_at_s:
            live.tick()
        if live is not None and live.closed:
            self.alive.dispatcher.exchange.end()

    def reopen(self) -> None:
        """What is on disk at this moment, as another process finds it."""
        self.lives += 1
        here = self.folder / str(self.lives)
        if self.lives > 1:
            shutil.copytree(self.folder / str(self.lives - 1), here)
            self.alive.store.close()
            shutil.rmtree(self.folder / str(self.lives - 1))
        self.alive = WiredCoordinator(here, self.clock, self.ballast, self.credits, task_window=self.window)
        self.granted.clear()
        self.alive.ask(self.key, self.wanted)
        self.listen()

    def listen(self) -> None:
        """Take in what the devices were told; a second "ok" for another update would be a second vote."""
        for cid, message in self.alive.said():
            if message["k"] == "go":
                self.granted[cid] = message
            if message["k"] != "ack":
                continue
            key = ExchangeKey(message["run"], message["round"], message["exchange"])
            sha256, status = message["sha256"], message["status"]
            known = self.accepted.get((key, cid))
            if status == "ok":
                assert known is None
                self.accepted[key, cid] = sha256
            elif status == "dup":
                # an "ok" that a kill kept from being sent: from now on the device counts on it
                assert self.accepted.setdefault((key, cid), sha256) == sha256
            elif status == "superseded":
                assert self.alive.store.exchanges.replies(key)[cid].sha256 != sha256
            else:
                assert status in ("late", "bad_hash")
                assert status == "bad_hash" or cid not in self.alive.store.exchanges.replies(key)


def _never(_live: LiveExchange) -> None:
    raise AssertionError("a closed exchange asks no device")


def test_no_interleaving_and_no_crash_loses_an_accepted_update_or_counts_one_twice() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=30, stateful_step_count=40, deadline=None))
