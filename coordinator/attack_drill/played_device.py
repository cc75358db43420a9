"""A device of a drill: what it says, hears and offers. Nothing trains; answers are drawn (plausible_replies.py)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from coordinator.attack_drill.loopback_copy import HONEST_SAMPLES, PATIENCE_S, TOPICS, BrokerClient
from coordinator.attack_drill.plausible_replies import (
    TEST_SAMPLES,
    all_wrong,
    encoded_delta,
    is_test,
    is_update,
    plausible_delta,
    plausible_statistics,
)
from coordinator.attack_drill.played_sums import PlayedSums
from edge_client.errors import NetworkError
from edge_client.protocol import blocks, codecs, messages
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.protocol.program import Program
from edge_client.protocol.topics import routing_label
from edge_client.transport.base import Message

LISTEN_S = 0.05  # between two looks at whether a round is over


class PlayedDevice:
    """A device of the fleet.

    `told` are the answers to its announcements: (status, detail) of `ack` and `err`. `aside` are tasks that came while
    it waited for something else, `blocks` counts the blocks that it was sent.
    """

    def __init__(self, link: BrokerClient, program: Program, read: Callable[[str], bytes], *, block: int) -> None:
        self.name, self.link, self.program = link.name, link, program
        self.sums = PlayedSums(link.name, program, read)
        self.refuses: frozenset[str] = frozenset()  # stages of sums
        self.block, self.blocks, self._count = block, 0, 0
        self._offered: dict[str, tuple[Manifest, bytes]] = {}
        self.told: list[tuple[str, str]] = []
        self.aside: deque[dict[str, Any]] = deque()
        self._there = b""
        self._known_to: tuple[str, int] | None = None  # the coordinator's process and connection

    def announce_itself(self, presence: bytes) -> None:
        """Say that it is here; `hear` says it again to each new connection of the coordinator."""
        self._there = presence
        self.link.transport.publish(TOPICS.state(self.name), presence, retain=True)

    def say(self, kind: str, **fields: Any) -> str:  # noqa: ANN401 - the message's fields
        """Send a request; -> its id."""
        self._count += 1
        ident = f"d-{self._count}"
        self.link.transport.publish(
            TOPICS.request(self.name), messages.write_message(kind, ident=ident, t_ms=0, **fields)
        )
        return ident

    def hear(self) -> dict[str, Any] | None:
        """The coordinator's next message to this device, or None when none came for a while."""
        event = self.link.transport.receive(LISTEN_S)
        if isinstance(event, Message) and event.topic == TOPICS.coord() and not event.retained:
            self._on_record(messages.read_message(event.payload, "coord"))
        if not isinstance(event, Message) or event.topic != TOPICS.down(self.name):
            self.blocks += isinstance(event, Message) and event.topic.startswith(TOPICS.down(self.name)[:-1] + "b/")
            return None
        said = messages.read_message(event.payload, "t")
        if said["k"] == "ack":
            self.told.append((said["status"], said.get("detail", "")))
        elif said["k"] == "err" and said["code"] != "not_yours":  # the answer to `settle`
            self.told.append((said["code"], said.get("detail", "")))
        return said

    def _on_record(self, told: Mapping[str, Any]) -> None:
        link = (told["boot"], told.get("link", 0))
        if self._there and told["online"] and link != self._known_to:
            self.announce_itself(self._there)
        self._known_to = link

    def wait(self, *kinds: str) -> dict[str, Any]:
        """The next message of one of these kinds. Raises NetworkError."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            said = self.hear()
            if said is not None and said["k"] in kinds:
                return said
            if said is not None and said["k"] == "task":
                self.aside.append(said)
        raise NetworkError(f"{self.name} waits for {' or '.join(kinds)}", hint="run the drill again")

    def answer(self, task: Mapping[str, Any], *, n: int = HONEST_SAMPLES, wrong_tests: int = 0) -> Manifest:
        """Announce an answer such as training would give, or a test of so many samples that are all wrong."""
        if task["job"] == "sum":
            return self.offer(task, self.sums.answer(task))
        if is_update(task):
            delta = plausible_delta(task, self.name, self.program)
            return self.offer(task, encoded_delta(task, delta, self.program), n=n)
        if is_test(task):
            n = wrong_tests or TEST_SAMPLES
        said = plausible_statistics(task, self.name, self.program, n)
        said = all_wrong(said) if is_test(task) and wrong_tests else said
        return self.offer(task, codecs.encode_stats(said, self.program.schema), n=n)

    def offer(self, task: Mapping[str, Any], data: bytes, *, n: int = HONEST_SAMPLES, attempt: int = 0) -> Manifest:
        """Announce any bytes as the answer; `send` sends them. Those of a sum count as one sample."""
        summed = task["job"] == "sum"
        what = "masked" if summed else "delta" if is_update(task) else "stats"
        manifest = manifest_of(data, what, block=self.block)
        self._offered[manifest.sha256] = (manifest, data)
        self._ready(task, manifest, n=1 if summed else n, attempt=attempt)
        return manifest

    def refuse(self, task: Mapping[str, Any], code: str = "unavailable") -> None:
        """Refuse a task, so that the coordinator does not wait for it."""
        key = {name: task[name] for name in ("run", "round", "exchange")}
        self.say("nack", re=task["id"], code=code, **key)

    def announce(self, task: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
        """Announce an update of which there is only this manifest; -> the coordinator's answer."""
        ident = self._ready(task, manifest)
        while (said := self.wait("go", "ack", "err")).get("re", ident) != ident:
            pass
        return said

    def _ready(self, task: Mapping[str, Any], manifest: Manifest, *, n: int = HONEST_SAMPLES, attempt: int = 0) -> str:
        key = {name: task[name] for name in ("run", "round", "exchange")}
        return self.say("rdy", **key, attempt=attempt, n=n, what=manifest.kind, update=manifest, seconds=1.0)

    def send(self, go: Mapping[str, Any], *indices: int) -> None:
        """Send these blocks of an announced answer; all of them without any index."""
        manifest, data = self._offered[go["sha256"]]
        for index in indices or range(manifest.total):
            body = data[slice(*blocks.body_range(manifest, index))]
            topic = TOPICS.upload(go["shard"], self.name, routing_label(manifest.sha256), index)
            self.link.transport.publish(topic, blocks.pack_block(body, index, manifest.total))
