"""One round of the real coordinator on a copy: honest devices answer at once, a caller plays the hostile one.

Nothing trains: the devices' answers are drawn (plausible_replies.py). The coordinator's clock can be set forward, so
that minutes of a round pass at once.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from coordinator.attack_drill.loopback_copy import (
    FLEET,
    HONEST_SAMPLES,
    HOSTILE,
    PATIENCE_S,
    SHA256,
    TOPICS,
    BrokerClient,
    Installation,
    presence,
)
from coordinator.attack_drill.plausible_replies import (
    TEST_SAMPLES,
    all_wrong,
    encoded_delta,
    is_test,
    is_update,
    plausible_delta,
    plausible_statistics,
)
from coordinator.config import CoordinatorConfig
from coordinator.identity.broker_acl import COORDINATOR_CLIENT_ID
from coordinator.identity.signing_key import coordinator_credentials
from coordinator.rounds.sample_weights import max_samples
from coordinator.runtime.server import Server
from coordinator.storage.store import Store
from edge_client.errors import FedcentersError, NetworkError
from edge_client.protocol import blocks, codecs, messages
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array
from edge_client.protocol.topics import routing_label
from edge_client.transport.base import Message, Transport, Will
from edge_client.transport.clock import SystemClock
from edge_client.transport.mqtt import MqttTransport

LISTEN_S = 0.05  # between two looks at whether the round is over


class ForwardClock(SystemClock):
    """The machine's clock, which can be set forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s


class PlayedDevice:
    """A device of the fleet.

    `told` are the answers to its announcements: (status, detail) of `ack` and `err`. `aside` are tasks that came while
    it waited for something else.
    """

    def __init__(self, link: BrokerClient, program: Program, *, block: int) -> None:
        self.name, self.link, self.program = link.name, link, program
        self.block, self._count = block, 0
        self._offered: dict[str, tuple[Manifest, bytes]] = {}
        self.told: list[tuple[str, str]] = []
        self.aside: deque[dict[str, Any]] = deque()

    def say(self, kind: str, **fields: Any) -> None:  # noqa: ANN401 - the message's fields
        self._count += 1
        payload = messages.write_message(kind, ident=f"d-{self._count}", t_ms=0, **fields)
        self.link.transport.publish(TOPICS.request(self.name), payload)

    def hear(self) -> dict[str, Any] | None:
        """The coordinator's next message to this device, or None when none came for a while."""
        event = self.link.transport.receive(LISTEN_S)
        if not isinstance(event, Message) or event.topic != TOPICS.down(self.name):
            return None
        said = messages.read_message(event.payload, "t")
        if said["k"] == "ack":
            self.told.append((said["status"], said.get("detail", "")))
        elif said["k"] == "err" and said["code"] != "not_yours":  # the answer to `settle`
            self.told.append((said["code"], said.get("detail", "")))
        return said

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
        if is_update(task):
            delta = plausible_delta(task, self.name, self.program)
            return self.offer(task, encoded_delta(task, delta, self.program), n=n)
        if is_test(task):
            n = wrong_tests or TEST_SAMPLES
        said = plausible_statistics(task, self.name, self.program, n)
        said = all_wrong(said) if is_test(task) and wrong_tests else said
        return self.offer(task, codecs.encode_stats(said, self.program.schema), n=n)

    def offer(self, task: Mapping[str, Any], data: bytes, *, n: int = HONEST_SAMPLES, attempt: int = 0) -> Manifest:
        """Announce any bytes as the answer; `send` sends them."""
        what = "delta" if is_update(task) else "stats"
        manifest = manifest_of(data, what, block=self.block)
        self._offered[manifest.sha256] = (manifest, data)
        key = {name: task[name] for name in ("run", "round", "exchange")}
        self.say("rdy", **key, attempt=attempt, n=n, what=what, update=manifest, seconds=1.0)
        return manifest

    def send(self, go: Mapping[str, Any], *indices: int) -> None:
        """Send these blocks of an announced answer; all of them without any index."""
        manifest, data = self._offered[go["sha256"]]
        for index in indices or range(manifest.total):
            body = data[slice(*blocks.body_range(manifest, index))]
            topic = TOPICS.upload(go["shard"], self.name, routing_label(manifest.sha256), index)
            self.link.transport.publish(topic, blocks.pack_block(body, index, manifest.total))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The centers [n_centers, schema.size] after the round, and its line of metrics.jsonl without time and traffic."""

    centers: Array
    record: Mapping[str, Any]

    def equals(self, other: Outcome) -> bool:
        """To the last bit."""
        return self.centers.tobytes() == other.centers.tobytes() and self.record == other.record


class PlayedRound:
    """A round that is under way. Honest devices answer while `may_answer` is set."""

    def __init__(self, server: Server, clock: ForwardClock, store: Store, fleet: list[PlayedDevice]) -> None:
        self.hostile, *self.honest = fleet
        self.store, self.may_answer = store, threading.Event()
        self.may_answer.set()
        self._server, self._clock, self._over = server, clock, threading.Event()
        self._failure: BaseException | None = None
        self.answered: set[str] = set()  # honest devices whose answer to the first task was taken
        self._lead = threading.Thread(target=self._serve, daemon=True)
        self._others = [threading.Thread(target=self._live, args=(one,), daemon=True) for one in self.honest]

    def begin(self) -> None:
        for thread in (self._lead, *self._others):
            thread.start()

    def tasks(self) -> Iterator[dict[str, Any]]:
        """Each task of the hostile device, until the round is over; credits are used up meanwhile."""
        seen = set()
        while not self._over.is_set():
            said = self.hostile.aside.popleft() if self.hostile.aside else self.hostile.hear()
            if said is not None and said["k"] == "go":
                self.hostile.send(said)
            elif said is not None and said["k"] == "task" and said["exchange"] not in seen:
                seen.add(said["exchange"])
                yield said

    def refuse(self, task: Mapping[str, Any]) -> None:
        """The hostile device refuses a task, so that the coordinator does not wait for it."""
        key = {name: task[name] for name in ("run", "round", "exchange")}
        self.hostile.say("nack", re=task["id"], code="unavailable", **key)

    def pass_time(self, seconds: float) -> None:
        """Set the coordinator's clock forward, and wait until it has dealt with that and all that we sent."""
        self._clock.ahead_s += seconds
        self.settle()

    def settle(self) -> None:
        """Return when the coordinator has dealt with all that the hostile device sent."""
        self.hostile.say("get", sha256=SHA256, block=4096, at=[[0, 1]])
        self.hostile.wait("err")

    def end(self) -> None:
        """Wait for the end of the round. Raises what ended the coordinator."""
        self._lead.join(PATIENCE_S)
        if self._lead.is_alive():
            self._server.stop()
            self._lead.join(PATIENCE_S)
            raise NetworkError("the round did not end", hint="run the drill again")
        if isinstance(self._failure, FedcentersError):
            raise self._failure
        if self._failure is not None:
            hint = "report it as a bug, with the configuration"
            raise FedcentersError(f"the coordinator ended: {self._failure!r}", hint=hint) from self._failure

    def leave(self) -> None:
        """Stop everything that still runs."""
        self.may_answer.set()
        self._over.set()
        self._server.stop()
        for thread in (self._lead, *self._others):
            if thread.is_alive():
                thread.join(PATIENCE_S)

    def partial_files(self) -> int:
        """How many unfinished uploads of the hostile device are on the coordinator's disk."""
        return len(list((self.store.folder / "updates" / HOSTILE / "partial").glob("*")))

    def outcome(self) -> Outcome:
        """After the end."""
        (run,) = self.store.states.run_names()
        found = self.store.states.last(run)
        events = [json.loads(line) for line in self.store.events.lines()]
        records = [event for event in events if event["event"] == "round"]
        if found is None or not records:
            raise NetworkError("the round was not played", hint="run the drill again")
        record = {k: v for k, v in records[0].items() if k not in ("bytes", "seconds", "unix_ms")}
        return Outcome(centers=found[1].centers, record=record)

    def _serve(self) -> None:
        try:
            self._server.run()
        except BaseException as wrong:  # noqa: BLE001 - raised again by `end`
            self._failure = wrong
        finally:
            self._over.set()

    def _live(self, device: PlayedDevice) -> None:
        first = None
        while not self._over.is_set():
            said = device.hear()
            if said is None:
                continue
            if said["k"] == "task":
                first = said["exchange"] if first is None else first
                self.may_answer.wait()
                device.answer(said)
            elif said["k"] == "go":
                device.send(said)
            elif said["k"] == "ack" and said["status"] in ("ok", "dup") and said["exchange"] == first:
                self.answered.add(device.name)


@dataclass(frozen=True, kw_only=True)
class RoundsCopy:
    """What the rounds of a drill share: the configuration, and a store with its program that each round copies."""

    site: Installation
    config: CoordinatorConfig
    program: Program
    prepared: Path

    @property
    def most(self) -> int:
        """The samples that count of one device in training."""
        return max_samples([HONEST_SAMPLES] * len(FLEET), self.config.fleet.max_samples_ratio)

    @contextmanager
    def round(self, *, n: int = HONEST_SAMPLES, **transfer: Any) -> Iterator[PlayedRound]:  # noqa: ANN401 - of the section
        """A round in which the hostile device announces `n` samples; it ends with the block."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self.site.folder)))
            shutil.copytree(self.prepared, folder / "store")
            config = replace(self.config, folder=folder, transfer=replace(self.config.transfer, **transfer))
            store = stack.enter_context(closing(Store(folder / "store")))
            links = [self.site.connect(name, stack) for name in (HOSTILE, *FLEET)]
            fleet = [PlayedDevice(link, self.program, block=config.transfer.block) for link in links]
            for device in fleet:
                samples = n if device.name == HOSTILE else HONEST_SAMPLES
                there = presence(samples, config.model.engines[0])
                device.link.transport.publish(TOPICS.state(device.name), there, retain=True)
                device.link.transport.drain(0, PATIENCE_S)
            clock = ForwardClock()
            server = Server(config, store, dial=lambda will: self._dial(config, will), clock=clock)
            played = PlayedRound(server, clock, store, fleet)
            stack.callback(played.leave)
            played.begin()
            yield played

    def play(self, *, n: int, wrong_tests: int) -> Outcome:
        """A round in which the hostile device claims `n` samples, and tests on which every center is wrong."""
        with self.round(n=n) as played:
            for task in played.tasks():
                played.hostile.answer(task, n=n, wrong_tests=wrong_tests)
            played.end()
            return played.outcome()

    @cached_property
    def fair(self) -> Outcome:
        """A round in which the hostile device claims as many samples as count of any device."""
        return self.play(n=self.most, wrong_tests=self.most)

    def _dial(self, config: CoordinatorConfig, will: Will | None) -> Transport:
        client_id = f"{config.federation}.{COORDINATOR_CLIENT_ID}"
        return MqttTransport(config.broker, client_id, will=will, credentials=coordinator_credentials(config))
