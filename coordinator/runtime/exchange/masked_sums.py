"""The sums of one `SumByCenter` over the network: up to four exchanges, whose answers are masked or sealed.

    number  stage    every device of a sum
    +0      prekeys  offers fresh one-time keys; asked of those of which none is unused
    +1      shares   takes its roster, deals shares of its secrets to its neighbours
    +2      add      trains and sends masked words
    +3      show     shows the shares that take the masks off the sum

The groups of an exchange are summed apart, stage by stage together. The state of a sum (rounds/secure_sum.py) is
computed from the closed exchanges, which are stored, and from the prekeys that it took; so a replay needs nothing else.
A device that misses a stage has dropped out. A sum that cannot be unmasked, or that shows a device which did not keep
to its task (possible_sums.py), ends without a result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from coordinator.aggregation.possible_sums import why_impossible
from coordinator.rounds.sealed_round import is_sealed
from coordinator.rounds.secure_sum import (
    MaskedVectorStored,
    RevealArrived,
    SecureCommand,
    SecureEvent,
    SecureSum,
    SendSumMessage,
    SharesArrived,
    StageDeadline,
    SumFailed,
    SumReady,
    advance,
    checked_shares,
    open_sum,
    unmask_into,
)
from coordinator.rounds.update_validation import AskedStage
from coordinator.runtime.exchange.task_messages import NetworkExchange
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.storage.store import Store
from coordinator.strategies.base import Exchange, Replies, SealedSums, Strategy, SumByCenter
from edge_client.errors import ConfigError, Malformed
from edge_client.protocol.secure.keys import PublicPrekey, check_public
from edge_client.protocol.secure.masks import Words, add_packed_into, check_packed, packed_size
from edge_client.protocol.secure.parameters import LEAST_COHORT
from edge_client.protocol.secure.sum_messages import (
    MAX_SUM_MESSAGE_BYTES,
    UPLOAD_HEADER,
    PrekeyBatch,
    RevealedShares,
    SumForm,
    read_upload,
)
from edge_client.protocol.sum_codec import KEPT, decode_told, words_of
from edge_client.protocol.summed_task import SummedFit, SummedProbe
from edge_client.protocol.task import ClientId, Fit, Probe, Reply

STAGES = 4  # exchanges of one `SumByCenter`
Ask = Callable[[ExchangeKey, NetworkExchange], Collection[ClientId]]  # -> the devices that answered


def told_choices(tasks: Exchange) -> NetworkExchange:
    """The exchange as it travels: a device tells its choice of a center, and nothing else; others stay as they are."""
    if not any(isinstance(task, SummedFit) for task in tasks.values()):
        return tasks  # a `StreamingExchange` is shown each reply
    return {cid: _tell(task) if isinstance(task, SummedFit) else task for cid, task in tasks.items()}


def _tell(task: SummedFit) -> AskedStage:
    k = len(task.centers)

    def decode(data: bytes) -> Reply:
        return Reply(n=1, words=decode_told(data, k))

    return AskedStage(stage="tell", work=task, decode=decode, max_bytes=4 * k, needs_quorum=True)


def check_masked(strategy: Strategy) -> None:
    """Raise ConfigError for sums that no masks protect."""
    if is_sealed(strategy) and strategy.server.least_members < LEAST_COHORT:
        raise ConfigError(
            f"secure: least-members is {strategy.server.least_members}, and a masked sum is of {LEAST_COHORT} or more",
            hint=f"set least-members to {LEAST_COHORT} or more",
        )


@dataclass(kw_only=True)
class MaskedSums:
    """Asks sums over the network. `failures` tells why sums have no result, in the words of secure_sum.py."""

    ask: Ask
    store: Store
    federation: str
    failures: list[str] = field(default_factory=list)

    def sums(self, first: ExchangeKey, exchange: SumByCenter) -> Replies:
        """The sums of an exchange whose stages have the numbers from `first` on."""
        work = next(iter(exchange.values()), None)
        if not isinstance(work, SummedFit | SummedProbe):
            self.ask(_at(first, 2), {cid: _keep(task) for cid, task in exchange.items()})
            return SealedSums.unmasked({})
        running = self._begin(first, exchange, words_of(work), work.scale.bits)
        messages: list[SecureCommand] = [command for _, commands in running.values() for command in commands]
        states = {group: state for group, (state, _) in running.items()}
        for number, (stage, awaited, event) in enumerate(_STAGES, 1):
            tasks = {c.cid: self._stage(stage, states, c, exchange) for c in messages if isinstance(c, SendSumMessage)}
            if not tasks:
                break
            key = _at(first, number)
            answered = self.ask(key, tasks)
            if stage == "shares":
                self._forget_lost(key, tasks.keys() - set(answered))
            messages = []
            for group, state in states.items():
                events = [event(cid, self._answer(key, cid, stage)) for cid in sorted(answered) if cid in state.devices]
                states[group], commands = _advanced(state, [*events, StageDeadline(awaited)])
                messages += commands
                self.failures += [command.reason for command in commands if isinstance(command, SumFailed)]
        return SealedSums.unmasked(self._unmasked(first, states, messages, exchange))

    def _begin(
        self, first: ExchangeKey, exchange: SumByCenter, words: int, bits: int
    ) -> dict[int, tuple[SecureSum, list[SendSumMessage]]]:
        """The sums of the groups that have enough devices with a prekey, and their rosters."""
        least, groups = max(exchange.least, LEAST_COHORT), dict[int, list[ClientId]]()
        for cid in sorted(exchange):
            groups.setdefault(exchange.groups.get(cid, 0), []).append(cid)
        wanted = {cid for cids in groups.values() if len(cids) >= least for cid in cids}
        taken = self._prekeys(first, wanted) if wanted else {}
        begun = {}
        for group, cids in sorted(groups.items()):
            devices = {cid: taken[cid] for cid in cids if cid in taken}
            if len(devices) < least:
                self.failures.append(f"{len(devices)} devices have a key for the sum; at least {least} must")
                continue
            form = SumForm(
                federation=self.federation, run=first.run, round=first.round, exchange=first.exchange + 1,
                words=words, bits=bits,
            )  # fmt: skip
            begun[group] = open_sum(form, devices, least_members=least)
        return begun

    def _prekeys(self, first: ExchangeKey, cids: Collection[ClientId]) -> Mapping[ClientId, PublicPrekey]:
        """One prekey of each device that has any, taken for this sum; devices without an unused one are asked."""
        prekeys, roster = self.store.prekeys, _at(first, 1)
        if taken := prekeys.taken(roster):
            return taken
        offered = {}
        if lacking := sorted(prekeys.lacking(cids)):
            answered = self.ask(first, {cid: _offer(prekeys.newest(cid)) for cid in lacking})
            offered = {cid: PrekeyBatch.from_bytes(self._answer(first, cid)) for cid in sorted(answered)}
        return prekeys.take(roster, cids, offered)

    def _stage(
        self, stage: str, states: Mapping[int, SecureSum], command: SendSumMessage, exchange: SumByCenter
    ) -> AskedStage:
        """What a device is asked in a stage of its sum, and how its answer is checked when it arrives."""
        state = next(state for state in states.values() if command.cid in state.devices)
        form, size = state.form, MAX_SUM_MESSAGE_BYTES

        def decode(data: bytes) -> Reply:
            if stage == "shares":
                checked_shares(state, command.cid, data)
            elif stage == "show":
                RevealedShares.from_bytes(data)
            else:
                packed = read_upload(data, roster=state.roster, words=form.words, bits=form.bits)
                check_packed(packed, form.words, form.bits)
            return Reply(n=1)

        work = None
        if stage == "add":
            work, size = exchange[command.cid], UPLOAD_HEADER.size + packed_size(form.words, form.bits)
        return AskedStage(
            stage=stage, message=command.data, work=work, decode=decode, max_bytes=size, needs_quorum=stage == "shares"
        )

    def _forget_lost(self, key: ExchangeKey, silent: Collection[ClientId]) -> None:
        """A device that refuses its roster does not have the prekey any more; it is asked for others next time."""
        refused = self.store.exchanges.refusals(key.run, key.round)
        for cid in sorted(silent):
            if refused.get(cid, "").startswith("bad_task"):
                self.store.prekeys.forget(key, cid)

    def _answer(self, key: ExchangeKey, cid: ClientId, stage: str = "") -> bytes:
        """The stored answer of a device; a masked vector is read when it is added, one at a time."""
        if stage == "add":
            return b""
        return self.store.updates(cid).read(self.store.exchanges.replies(key)[cid].sha256)

    def _unmasked(
        self, first: ExchangeKey, states: Mapping[int, SecureSum], commands: list[SecureCommand], exchange: SumByCenter
    ) -> dict[int, tuple[list[ClientId], Words | None]]:
        """The sums of those groups that can be unmasked: one vector of each group in memory, and one upload.

        A sum that no devices can give which keep to the task is None.
        """
        sums, key = {}, _at(first, 2)
        ready = [command for command in commands if isinstance(command, SumReady)]
        hashes = {cid: reply.sha256 for cid, reply in self.store.exchanges.replies(key).items()} if ready else {}
        for one in ready:
            group, state = next((g, s) for g, s in states.items() if s.uploaded == set(one.survivors))
            form, total = state.form, np.zeros(state.form.words, np.uint32)
            for cid in one.survivors:
                data = self.store.updates(cid).read(hashes[cid])
                packed = read_upload(data, roster=state.roster, words=form.words, bits=form.bits)
                add_packed_into(total, packed, form.bits)
            unmask_into(state, one, total)
            reason = why_impossible([exchange[cid] for cid in one.survivors], total)
            self.failures += [] if reason is None else [reason]
            sums[group] = (list(one.survivors), total if reason is None else None)
        return sums


_STAGES: tuple[tuple[str, str, Callable[[ClientId, bytes], SecureEvent]], ...] = (
    ("shares", "shares", SharesArrived),
    ("add", "uploads", lambda cid, _: MaskedVectorStored(cid)),
    ("show", "unmask", RevealArrived),
)


def _advanced(state: SecureSum, events: list[SecureEvent]) -> tuple[SecureSum, list[SecureCommand]]:
    commands: list[SecureCommand] = []
    for event in events:
        state, more = advance(state, event)
        commands += more
    return state, commands


def _offer(newest: int) -> AskedStage:
    def decode(data: bytes) -> Reply:
        batch = PrekeyBatch.from_bytes(data)
        if not batch.keys or batch.keys[0].number <= newest:
            raise Malformed("rejected", f"a prekey with a number up to {newest}, which was offered before")
        for key in batch.keys:  # a neighbour would refuse the whole sum
            check_public(key.seal)
            check_public(key.mask)
        return Reply(n=1)

    return AskedStage(stage="prekeys", after=newest, decode=decode, max_bytes=MAX_SUM_MESSAGE_BYTES)


def _keep(task: Fit | Probe) -> AskedStage:
    def decode(data: bytes) -> Reply:
        if data != KEPT:
            raise Malformed("bad_schema", "a fit of which nothing is told is answered by a zero byte")
        return Reply(n=1)

    return AskedStage(stage="keep", work=task, decode=decode, max_bytes=len(KEPT), needs_quorum=True)


def _at(first: ExchangeKey, number: int) -> ExchangeKey:
    return ExchangeKey(first.run, first.round, first.exchange + number)
