"""The task that a device works on: fetch what it needs, run it, and store its result.

engine_selection.py chooses the engine, task_runner.py computes. A result is on disk before it is announced, so a
power cut at any line repeats at most the training.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from edge_client.errors import TOO_LITTLE_MEMORY, DeviceRefused, Malformed, ProgramRefused, RuntimeMissing, lacks_memory
from edge_client.protocol import sum_codec, task_codec
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.protocol.message_schemas import MAX_DETAIL_CHARS, NACK_CODES
from edge_client.protocol.secure import device_stages
from edge_client.protocol.summed_task import SOFT, SummedFit, SummedProbe
from edge_client.protocol.task import Schema
from edge_client.runtime.engine_selection import select_engine
from edge_client.runtime.session import ClientLoop, Session
from edge_client.runtime.state import StoredResult, SumProgress, TaskKey, residual_name
from edge_client.runtime.task_runner import TaskResult, TaskRunner
from edge_client.training.summed_work import SummedMemory
from edge_client.transport.base import Event

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2  # between two looks at the events while training


class TaskDropped(Exception):
    """The coordinator stopped or replaced the task, or the device stops."""


@dataclass
class ActiveTask:
    """A valid task message and what carries it out. `take` handles the events that come in the meantime."""

    key: TaskKey
    message: Mapping[str, Any]
    until_s: float  # on the session's clock; a result after it is useless
    session: Session
    runner: TaskRunner
    take: Callable[[Event | None], None]
    dropped: bool = False
    _next_poll_s: float = 0.0

    def ask_again(self, message: Mapping[str, Any], until_s: float) -> None:
        """The same task came under another id, maybe with more time; its content stays, as that is what was checked."""
        self.message, self.until_s = {**self.message, "id": message["id"], "epoch": message["epoch"]}, until_s

    def execute(self) -> Generator[float, Event | None, tuple[TaskResult, float]]:
        """Fetch in the order of trust (the signed program, its containers, the vectors), then run.

        Yields and takes what `ClientLoop` does. -> (result, seconds of training). Raises TaskDropped, and what
        `refuse` tells the coordinator.
        """
        check_secure(self.message, self.session.config.secure)
        run, state, runner, clock = self.key.run, self.session.state, self.runner, self.session.clock
        manifest = Manifest.from_json(self.message["program"])
        needed = task_codec.container_functions(self.message)
        runner.check_signature(manifest)
        yield from self._fetch([manifest])
        program = runner.program(manifest)
        if self.message["job"] == "sum" and "work" not in self.message:
            orders = task_codec.task_manifests(self.message)
            runner.check_signature(*orders)
            yield from self._fetch(orders)
            return self._sum_stage(program.schema), 0.0
        for field, function in needed.items():
            runner.check_container(program, function, Manifest.from_json(self.message[field]))
        message = task_codec.without_unneeded_inits(
            self.message, lambda slot: state.own_model(run, slot, program.schema) is not None
        )
        vectors = task_codec.task_manifests(message)
        runner.check_signature(*vectors)  # a crafted model could make its update give away the samples
        yield from select_engine(runner, self.session, manifest, set(needed.values()), self._fetch)
        self.session.cache.pinned |= {vector.sha256 for vector in vectors}
        yield from self._fetch(vectors)
        began_s = clock.now_s()
        if message["job"] == "sum":
            return self._summed(message, program.schema), clock.now_s() - began_s
        result = runner.run(
            message,
            own=lambda slot, schema: state.own_model(run, slot, schema),
            residual=lambda schema: state.residual(self.key, message.get("center"), schema),
            posterior=lambda: state.posterior(self.key),
            between=self._poll,
        )
        return result, clock.now_s() - began_s

    def _sum_stage(self, schema: Schema) -> TaskResult:
        """The answer to a stage of a sum that trains nothing."""
        sums, stage = self.session.state.sums, self.message["stage"]
        if stage == "prekeys":
            random = secrets.token_bytes(device_stages.RANDOM_BYTES)
            sums, data = device_stages.offer_prekeys(sums, random, self.message.get("after", -1))
        elif stage == "shares":
            sums, data = device_stages.deal(sums, self._order(), self._place)
        else:
            sums, data = device_stages.show(sums, self._order(), self._place)
        progress = SumProgress(sums=sums)
        return TaskResult(what="masked", data=data, n=1, metrics={}, schema=schema, progress=progress)

    def _summed(self, message: Mapping[str, Any], schema: Schema) -> TaskResult:
        """The answer to a stage of a sum that computes: masked words, a choice that is told, or nothing."""
        state, run, stage = self.session.state, self.key.run, message["stage"]

        def memory(slot: str) -> SummedMemory:
            own = partial(state.own_model, run, schema=schema)
            return SummedMemory(trained=state.trained(self.key, slot), choice=state.choice(run), own=own)

        work, found = self.runner.add_words(message, memory, self._poll)
        sums, data = state.sums, sum_codec.KEPT
        if stage == "add" and isinstance(work, SummedFit | SummedProbe):
            sums, data = device_stages.mask(sums, self._order(), self._place, work.scale, found.words, self._poll)
        elif stage == "tell" and isinstance(work, SummedFit) and work.stage == "choose":
            data = sum_codec.encode_told(found.words)
        elif stage != "keep":
            raise Malformed("bad_task", f"stage {stage} tells nothing of this work")
        slot = work.slot if isinstance(work, SummedFit) else ""
        trained = None if found.trained is None else (slot, found.trained)
        progress = SumProgress(sums=sums, choice=found.choice, trained=trained)
        return TaskResult(what="masked", data=data, n=1, metrics={}, schema=schema, own=found.own, progress=progress)

    @property
    def _place(self) -> device_stages.Place:
        return self.key.run, self.key.round, self.key.exchange

    def _order(self) -> bytes:
        """The fetched message of the coordinator in this stage."""
        return self.runner.blobs.read(Manifest.from_json(self.message["message"]).sha256)

    def store(self, result: TaskResult, seconds: float, *, block: int) -> None:
        """Write the result to disk durably; its update travels in blocks of `block` bytes."""
        state, schema, residual = self.session.state, result.schema, result.residual
        stored = StoredResult(
            key=self.key,
            n=result.n,
            what=result.what,
            update=manifest_of(result.data, result.what, block=block, inline=True),
            seconds=seconds,
            metrics=result.metrics,
            epoch=self.message["epoch"],
            told=self.message.get("stage") == "tell",
            residual=None if residual is None else residual_name(self.key.run, self.message.get("center"), schema),
            residual_sha256=None if residual is None else state.keep_residual(residual, schema),
        )
        state.store_result(
            stored, result.data, schema, own=result.own, posterior=result.posterior, progress=result.progress
        )

    def refuse(self, wrong: Exception) -> tuple[str, str]:
        """Tell the coordinator why there is no result; -> the code and the detail of the `nack`."""
        code, detail, retry_ms = nack_fields(wrong)
        if code == "internal":
            log.warning("cannot do %s", self.key, exc_info=wrong)
        fields = {**vars(self.key), "code": code, "detail": detail, "retry_ms": retry_ms}
        self.session.sender.send("nack", re=self.message["id"], **fields)
        return code, detail

    def _fetch(self, manifests: list[Manifest]) -> ClientLoop:
        """Take events until the blobs are here, the task is dropped, or its time is over."""
        for wait_s in self.session.fetch(manifests):
            self.take((yield min(wait_s, self.left_s())))
            self.check_wanted()

    def _poll(self) -> None:
        """Between two training steps: take in at most one event, without waiting."""
        now_s = self.session.clock.now_s()
        if self.session.stopping.is_set() or now_s >= self._next_poll_s:
            self._next_poll_s = now_s + POLL_INTERVAL_S
            self.take(self.session.transport.receive(0.0))
            self.check_wanted()

    def left_s(self) -> float:
        """Seconds until a result is useless."""
        return max(0.0, self.until_s - self.session.clock.now_s())

    def check_wanted(self) -> None:
        """Raise TaskDropped or Malformed("deadline") when no result is wanted any more."""
        if self.dropped or self.session.stopping.is_set():
            raise TaskDropped
        if self.session.clock.now_s() >= self.until_s:
            raise Malformed("deadline", "the time was over before the task was done")


def check_secure(message: Mapping[str, Any], least: str) -> None:
    """Raise Malformed for a task that would tell more of this device than `secure` of its client.toml allows."""
    if least != "off" and message["job"] != "sum":
        raise Malformed("bad_task", "this run is without `secure`, which this device's client.toml demands")
    work, told = message.get("work", {}).get("sum", {}), message.get("stage") == "tell"
    choose = work.get("choose")
    if told and choose in SOFT:  # in both modes weights are hidden; no coordinator asks for them
        raise Malformed("bad_task", "weights in several centers are never told in the clear")
    if least != "updates+membership":
        return
    if told:
        raise Malformed("bad_task", f"this run asks for the choice of a center; client.toml demands secure = {least}")
    if choose in ("loss", "nearest") and work["part"] == "add" and work["share"] != 1:
        raise Malformed("bad_task", f"known weights would tell the center; client.toml demands secure = {least}")


def may_announce(result: StoredResult, least: str) -> bool:
    """Whether a result, maybe of before `secure` was set, tells no more than that allows; as `check_secure`."""
    return least == "off" or (result.what == "masked" and not (result.told and least == "updates+membership"))


def nack_fields(wrong: Exception) -> tuple[str, str, int | None]:
    """-> (code, detail, retry_ms) of the `nack` that tells of an error."""
    if isinstance(wrong, DeviceRefused):
        return "unavailable", wrong.reason[:MAX_DETAIL_CHARS], int(wrong.retry_s * 1000)
    if isinstance(wrong, Malformed):
        code = wrong.code if wrong.code in NACK_CODES else "internal"
        return code, wrong.message.removeprefix(f"{wrong.code}: ")[:MAX_DETAIL_CHARS], None
    if isinstance(wrong, RuntimeMissing):
        return "no_engine", wrong.message[:MAX_DETAIL_CHARS], None
    if isinstance(wrong, ProgramRefused):
        return "bad_program", wrong.message[:MAX_DETAIL_CHARS], None
    if isinstance(wrong, OSError) or lacks_memory(wrong):
        return "no_space", (str(wrong) or TOO_LITTLE_MEMORY)[:MAX_DETAIL_CHARS], None
    return "internal", "see this device's own log", None
