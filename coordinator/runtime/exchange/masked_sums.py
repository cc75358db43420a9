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
from typing import TypeVar

import numpy as np

from coordinator.aggregation.packed_words import add_packed_into, check_packed, read_upload
from coordinator.aggregation.possible_sums import why_impossible
from coordinator.rounds.sealed_round import is_sealed
from coordinator.rounds.secure_recovery import Secrets
from coordinator.rounds.secure_sum import (
    SecureSum,
    SumFailed,
    ask_shares,
    checked_shares,
    open_sum,
    recover,
    relay,
    unmask_into,
)
from coordinator.rounds.update_validation import AskedStage
from coordinator.runtime.exchange.task_messages import NetworkExchange
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.storage.store import Store
from coordinator.strategies.base import Exchange, PartOfCohort, Replies, SealedSums, Strategy, SumByCenter
from edge_client.errors import ConfigError, Malformed
from edge_client.protocol.secure.keys import PublicPrekey, check_public
from edge_client.protocol.secure.masks import packed_size
from edge_client.protocol.secure.parameters import LEAST_COHORT
from edge_client.protocol.secure.sum_messages import (
    MAX_SUM_MESSAGE_BYTES,
    UPLOAD_HEADER,
    PrekeyBatch,
    RevealedShares,
    SumForm,
)
from edge_client.protocol.sum_codec import KEPT, decode_told, words_of
from edge_client.protocol.summed_task import SummedFit, SummedProbe, Words
from edge_client.protocol.task import ClientId, Fit, Probe, Reply

STAGES = 4  # exchanges of one `SumByCenter`
Done = TypeVar("Done")
Running = Mapping[int, tuple[SecureSum, Mapping[ClientId, bytes]]]  # group -> its sum, and what its devices are sent
Ask = Callable[[ExchangeKey, NetworkExchange], Collection[ClientId]]  # -> the devices that answered


def told_choices(tasks: Exchange) -> NetworkExchange:
    """The exchange as it travels: a device tells its choice of a center, and nothing else; others stay as they are."""
    if not any(isinstance(task, SummedFit) for task in tasks.values()):
        return tasks  # a `StreamingExchange` is shown each reply
    told = {cid: _tell(task) if isinstance(task, SummedFit) else task for cid, task in tasks.items()}
    return PartOfCohort(told, of=tasks.of) if isinstance(tasks, PartOfCohort) else told


def _tell(task: SummedFit) -> AskedStage:
    k = len(task.centers)

    def decode(data: bytes) -> Reply:
        return Reply(n=1, words=decode_told(data, k))

    return AskedStage(stage="tell", work=task, decode=decode, max_bytes=4 * k, needs_quorum=True)


def check_masked(strategy: Strategy, *, min_devices: int) -> None:
    """Raise ConfigError for sums that no masks protect, and for a training that may begin with too few devices."""
    if not is_sealed(strategy):
        return
    least = strategy.server.least_members
    if least < LEAST_COHORT:
        raise ConfigError(
            f"secure: least-members is {least}, and a masked sum is of {LEAST_COHORT} or more",
            hint=f"set least-members to {LEAST_COHORT} or more",
        )
    if min_devices < least:
        raise ConfigError(
            f"secure: no sum of fewer than {least} devices is made, and training would start with min-devices = "
            f"{min_devices}",
            hint=f"set min-devices to {least} or more; with some more devices a sum is made though one drops out",
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
        running: Running = self._begin(first, exchange, words_of(work), work.scale.bits)
        running = self._stage(_at(first, 1), "shares", running, exchange, relay)
        running = self._stage(_at(first, 2), "add", running, exchange, ask_shares)
        secrets = self._stage(_at(first, 3), "show", running, exchange, recover)
        states = {group: state for group, (state, _) in running.items() if group in secrets}
        return SealedSums.unmasked(self._unmasked(_at(first, 2), states, secrets, exchange))

    def _stage(
        self,
        key: ExchangeKey,
        stage: str,
        running: Running,
        exchange: SumByCenter,
        end: Callable[[SecureSum, Mapping[ClientId, bytes]], Done],
    ) -> dict[int, Done]:
        """Ask a stage, and end it for each group with the answers of its devices; a sum that fails is gone."""
        tasks = {
            cid: _asked(stage, state, cid, message, exchange, spare=len(messages) - state.least_members)
            for state, messages in running.values()
            for cid, message in messages.items()
        }
        if not tasks:
            return {}
        answered, done = sorted(self.ask(key, tasks)), {}
        if stage == "shares":
            self._forget_lost(key, tasks.keys() - set(answered))
        for group, (state, _) in running.items():
            answers = self._answers(key, [cid for cid in answered if cid in state.devices], stage)
            try:
                done[group] = end(state, answers)
            except SumFailed as failed:
                self.failures.append(failed.message)
        return done

    def _begin(
        self, first: ExchangeKey, exchange: SumByCenter, words: int, bits: int
    ) -> dict[int, tuple[SecureSum, dict[ClientId, bytes]]]:
        """The sums of the groups that have enough devices with a prekey, and their rosters."""
        least, groups = max(exchange.least, LEAST_COHORT), dict[int, list[ClientId]]()
        for cid in sorted(exchange):
            groups.setdefault(exchange.groups.get(cid, 0), []).append(cid)
        wanted = {cid for cids in groups.values() if len(cids) >= least for cid in cids}
        spare = min((len(cids) - least for cids in groups.values() if len(cids) >= least), default=0)
        taken = self._prekeys(first, wanted, spare) if wanted else {}
        begun = {}
        for group, cids in sorted(groups.items()):
            devices = {cid: taken[cid] for cid in cids if cid in taken}
            if len(devices) < least:
                few = f"{len(devices)} devices have a key" if len(cids) >= least else f"{len(cids)} devices are asked"
                self.failures.append(f"{few} for the sum; at least {least} must")
                continue
            form = SumForm(
                federation=self.federation, run=first.run, round=first.round, exchange=first.exchange + 1,
                words=words, bits=bits,
            )  # fmt: skip
            begun[group] = open_sum(form, devices, least_members=least)
        return begun

    def _prekeys(self, first: ExchangeKey, cids: Collection[ClientId], spare: int) -> Mapping[ClientId, PublicPrekey]:
        """One prekey of each device that has any, taken for this sum; devices without an unused one are asked.

        Each sum may lose `spare` devices.
        """
        prekeys, exchanges, roster = self.store.prekeys, self.store.exchanges, _at(first, 1)
        taken = prekeys.taken(roster)
        if taken or (exchanges.closed_with(first) == [] and set(cids) <= exchanges.task_hashes(first).keys()):
            return taken  # by an earlier process; of none, where no device had or offered any
        offered = {}
        if lacking := sorted(prekeys.lacking(cids)):
            answered = self.ask(first, {cid: _offer(prekeys.newest(cid), spare) for cid in lacking})
            offered = {c: PrekeyBatch.from_bytes(data) for c, data in self._answers(first, sorted(answered)).items()}
        return prekeys.take(roster, cids, offered)

    def _forget_lost(self, key: ExchangeKey, silent: Collection[ClientId]) -> None:
        """A device that refuses its roster does not have the prekey any more; it is asked for others next time."""
        refused = self.store.exchanges.refused(key)
        for cid in sorted(silent):
            if refused.get(cid, "").startswith("bad_task"):
                self.store.prekeys.forget(key, cid)

    def _answers(self, key: ExchangeKey, cids: Collection[ClientId], stage: str = "") -> dict[ClientId, bytes]:
        """The stored answers of these devices; a masked vector is read when it is added, one at a time."""
        if stage == "add":
            return dict.fromkeys(cids, b"")
        stored = self.store.exchanges.replies(key)
        return {cid: self.store.updates(cid).read(stored[cid].sha256) for cid in cids}

    def _unmasked(
        self,
        key: ExchangeKey,
        states: Mapping[int, SecureSum],
        secrets: Mapping[int, Secrets],
        exchange: SumByCenter,
    ) -> dict[int, tuple[list[ClientId], Words | None]]:
        """The sums of those groups that can be unmasked: one vector of each group in memory, and one upload.

        A sum that no devices can give which keep to the task is None.
        """
        sums = {}
        hashes = {cid: reply.sha256 for cid, reply in self.store.exchanges.replies(key).items()} if states else {}
        for group, state in states.items():
            form, total, survivors = state.form, np.zeros(state.form.words, np.uint32), sorted(state.uploaded)
            for cid in survivors:
                data = self.store.updates(cid).read(hashes[cid])
                packed = read_upload(data, roster=state.roster, words=form.words, bits=form.bits)
                add_packed_into(total, packed, form.bits)
            unmask_into(state, secrets[group], total)
            reason = why_impossible([exchange[cid] for cid in survivors], total)
            self.failures += [] if reason is None else [reason]
            sums[group] = (survivors, total if reason is None else None)
        return sums


def _asked(
    stage: str, state: SecureSum, cid: ClientId, message: bytes, exchange: SumByCenter, *, spare: int
) -> AskedStage:
    """What a device is asked in a stage of its sum, and how its answer is checked when it arrives.

    `spare` devices may be lost; in the last stage others, too, since not all shares are needed.
    """
    form, size = state.form, MAX_SUM_MESSAGE_BYTES

    def decode(data: bytes) -> Reply:
        if stage == "shares":
            checked_shares(state, cid, data)
        elif stage == "show":
            RevealedShares.from_bytes(data)
        else:
            packed = read_upload(data, roster=state.roster, words=form.words, bits=form.bits)
            check_packed(packed, form.words, form.bits)
        return Reply(n=1)

    work = None
    if stage == "add":
        work, size = exchange[cid], UPLOAD_HEADER.size + packed_size(form.words, form.bits)
    return AskedStage(
        stage=stage, message=message, work=work, decode=decode, max_bytes=size, needs_quorum=stage == "shares",
        spare=None if stage == "show" else spare,
    )  # fmt: skip


def _offer(newest: int, spare: int) -> AskedStage:
    def decode(data: bytes) -> Reply:
        batch = PrekeyBatch.from_bytes(data)
        if not batch.keys or batch.keys[0].number <= newest:
            raise Malformed("rejected", f"a prekey with a number up to {newest}, which was offered before")
        for key in batch.keys:  # a neighbour would refuse the whole sum
            check_public(key.seal)
            check_public(key.mask)
        return Reply(n=1)

    return AskedStage(stage="prekeys", after=newest, decode=decode, max_bytes=MAX_SUM_MESSAGE_BYTES, spare=spare)


def _keep(task: Fit | Probe) -> AskedStage:
    def decode(data: bytes) -> Reply:
        if data != KEPT:
            raise Malformed("bad_schema", "a fit of which nothing is told is answered by a zero byte")
        return Reply(n=1)

    return AskedStage(stage="keep", work=task, decode=decode, max_bytes=len(KEPT), needs_quorum=True)


def _at(first: ExchangeKey, number: int) -> ExchangeKey:
    return ExchangeKey(first.run, first.round, first.exchange + number)
