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
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
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
    Installation,
    presence,
)
from coordinator.attack_drill.played_device import PlayedDevice
from coordinator.config import CoordinatorConfig
from coordinator.identity.broker_acl import COORDINATOR_CLIENT_ID
from coordinator.identity.signing_key import coordinator_credentials
from coordinator.rounds.sample_weights import max_samples
from coordinator.runtime.server import Server
from coordinator.storage.store import Store
from edge_client.errors import FedcentersError, NetworkError
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array
from edge_client.transport.base import Transport, Will
from edge_client.transport.clock import SystemClock
from edge_client.transport.mqtt import MqttTransport

TASK_PATIENCE_S = 60.0  # real seconds
STEP_S = 5.0  # of the coordinator's clock; after a longer one it takes itself for a process that was stopped
Task = Mapping[str, Any]  # the message
Told = list[tuple[str, str]]  # the status and the detail of each answer to an announcement


class ForwardClock(SystemClock):
    """The machine's clock, which can be set forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s


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
        self._taken = defaultdict[tuple[int, int], set[str]](set)  # honest devices, by round and exchange
        self._settling = threading.Condition()  # guards the next one
        self._unsettled = set[str]()  # honest devices that may have to deal with what the coordinator told them
        self._lead = threading.Thread(target=self._serve, daemon=True)
        self._others = [threading.Thread(target=self._live, args=(one,), daemon=True) for one in self.honest]

    def begin(self) -> None:
        for thread in (self._lead, *self._others):
            thread.start()

    def tasks(self) -> Iterator[dict[str, Any]]:
        """Each task of the hostile device, until the round is over; credits are used up meanwhile.

        Raises NetworkError where none comes for TASK_PATIENCE_S.
        """
        seen, until_s = set[int](), time.monotonic() + TASK_PATIENCE_S
        while not self._over.is_set():
            said = self._hear_task(until_s)
            if said is not None and said["exchange"] not in seen:
                seen.add(said["exchange"])
                yield said
                until_s = time.monotonic() + TASK_PATIENCE_S

    def tasks_in_time(self) -> Iterator[dict[str, Any] | None]:
        """As `tasks`; None for each STEP_S that passes once all others have answered.

        Raises NetworkError.
        """
        task, until_s = dict[str, Any](), time.monotonic() + PATIENCE_S
        while not self._over.is_set():
            said = self._hear_task(until_s)
            if said is not None and _place(said) != _place(task):
                task, until_s = said, time.monotonic() + PATIENCE_S
                yield task
            elif task and len(self.taken(task)) == len(self.honest):
                until_s = time.monotonic() + PATIENCE_S
                yield None
                self._clock.ahead_s += STEP_S
                self._settle_or_end(until_s)

    def _hear_task(self, until_s: float) -> dict[str, Any] | None:
        """The hostile device's task, if one has come; a credit is used up. Raises NetworkError after `until_s`."""
        if time.monotonic() > until_s:
            raise NetworkError("the others do not answer", hint="run the drill again")
        said = self.hostile.aside.popleft() if self.hostile.aside else self.hostile.hear()
        if said is not None and said["k"] == "go":
            self.hostile.send(said)
        return said if said is not None and said["k"] == "task" else None

    def taken(self, task: Mapping[str, Any]) -> set[str]:
        """The honest devices whose answer in the same exchange was taken."""
        return self._taken[_place(task)]

    def pass_time(self, seconds: float) -> None:
        """Set the coordinator's clock forward, and wait until all have dealt with that.

        On a busy machine an honest device would otherwise lose its turn, which ends after seconds of that clock.
        """
        self._clock.ahead_s += seconds
        self.settle()
        if self.may_answer.is_set():
            self._settle_others()

    def settle(self) -> None:
        """Return when the coordinator has dealt with all that the hostile device sent."""
        if not self._settle_or_end(time.monotonic() + PATIENCE_S):
            raise NetworkError("the coordinator does not answer", hint="run the drill again")

    def _settle_others(self) -> None:
        """Return when each honest device has dealt with all that the coordinator told it."""
        with self._settling:
            self._unsettled = {device.name for device in self.honest}
        for device in self.honest:
            device.link.transport.wake()
        with self._settling:
            if not self._settling.wait_for(lambda: not self._unsettled or self._over.is_set(), PATIENCE_S):
                raise NetworkError("the others do not answer", hint="run the drill again")

    def _settle_or_end(self, until_s: float) -> bool:
        """Whether the coordinator has dealt with all that the hostile device sent; else it ended, or takes too long."""
        asked = self.hostile.say("get", sha256=SHA256, block=4096, at=[[0, 1]])
        while not self._over.is_set() and time.monotonic() < until_s:
            said = self.hostile.hear() or {"k": "nothing"}
            if said["k"] in ("task", "go"):
                self.hostile.aside.append(said)
            elif said["k"] == "err" and said.get("re") == asked:
                return True
        return False

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
            with self._settling:
                self._settling.notify_all()

    def _live(self, device: PlayedDevice) -> None:
        asked = ""  # the request whose answer follows all that it was told
        while not self._over.is_set():
            if not asked and device.name in self._unsettled:
                asked = device.say("get", sha256=SHA256, block=4096, at=[[0, 1]])
            said = device.hear()
            if said is None:
                continue
            if said["k"] == "err" and said.get("re") == asked:
                asked = ""
                with self._settling:
                    self._unsettled.discard(device.name)
                    self._settling.notify_all()
            elif said["k"] == "task":
                self.may_answer.wait()
                if said.get("stage") in device.refuses:
                    device.refuse(said)
                else:
                    device.answer(said)
            elif said["k"] == "go":
                device.send(said)
            elif said["k"] == "ack" and said["status"] in ("ok", "dup"):
                self.taken(said).add(device.name)


def _place(said: Mapping[str, Any]) -> tuple[int, int]:
    return said.get("round", 0), said.get("exchange", 0)


@dataclass(frozen=True, kw_only=True)
class RoundsCopy:
    """What the rounds of a drill share: the configuration, and a store with its program that each round copies."""

    site: Installation
    config: CoordinatorConfig
    program: Program
    prepared: Path
    others: tuple[str, ...] = FLEET

    @property
    def most(self) -> int:
        """The samples that count of one device in training."""
        return max_samples([HONEST_SAMPLES] * len(self.others), self.config.fleet.max_samples_ratio)

    @contextmanager
    def round(
        self,
        *,
        n: int = HONEST_SAMPLES,
        rounds: int = 1,
        deadline_s: float | None = None,
        **transfer: Any,  # noqa: ANN401 - of the section
    ) -> Iterator[PlayedRound]:
        """A round, or so many, in which the hostile device announces `n` samples; it ends with the block."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self.site.folder)))
            shutil.copytree(self.prepared, folder / "store")
            runs = tuple(replace(run, rounds=rounds) for run in self.config.runs)
            config = replace(
                self.config,
                folder=folder,
                runs=runs,
                round=replace(self.config.round, deadline_s=deadline_s or self.config.round.deadline_s),
                transfer=replace(self.config.transfer, **transfer),
            )
            store = stack.enter_context(closing(Store(folder / "store")))
            links = [self.site.connect(name, stack) for name in (HOSTILE, *self.others)]
            fleet = [PlayedDevice(link, self.program, store.blobs.read, block=config.transfer.block) for link in links]
            for device in fleet:
                samples = n if device.name == HOSTILE else HONEST_SAMPLES
                there = presence(samples, config.model.engines[0])
                device.announce_itself(there)
                device.link.transport.drain(0, PATIENCE_S)
            clock = ForwardClock()
            server = Server(config, store, dial=lambda will: self._dial(config, will), clock=clock)
            played = PlayedRound(server, clock, store, fleet)
            stack.callback(played.leave)
            played.begin()
            yield played

    def attack(
        self,
        meant: Callable[[Task], bool],
        answer: Callable[[PlayedDevice, Task], object],
        *,
        refusing: tuple[int, str] = (0, ""),
    ) -> tuple[Outcome, Told]:
        """A round in which the hostile device does `answer` for each task that is `meant`, and is honest in the others.

        `refusing`: so many honest devices drop out of this stage of a sum. -> the outcome, and what it was told.
        """
        many, stage = refusing
        with self.round() as played:
            for device in played.honest[len(played.honest) - many :]:
                device.refuses = frozenset({stage})
            for task in played.tasks():
                if meant(task):
                    answer(played.hostile, task)
                else:
                    played.hostile.answer(task)
            played.end()
            return played.outcome(), played.hostile.told

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
