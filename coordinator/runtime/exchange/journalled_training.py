"""The state machine of rounds/asynchronous/training.py under its journal, for devices over the network.

Each step is stored before the machine takes it (storage/journal_store.py); the journal decides the order. A round that
was interrupted takes the steps of its journal and goes on from there. What devices are to be told is returned, and told
by live_updates.py. A step for which the disk has no room has not happened, and may be tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from coordinator.rounds.asynchronous import training as machine
from coordinator.rounds.asynchronous.counts import RoundCounts
from coordinator.rounds.asynchronous.snapshot import Snapshot
from coordinator.rounds.asynchronous.training import Rules, Taken, Training
from coordinator.rounds.update_validation import update_moves
from coordinator.runtime.exchange.reply_recorder import read_reply
from coordinator.runtime.exchange.task_messages import ExchangeContext, PreparedTask, prepare_each
from coordinator.storage.exchange_store import ExchangeKey, ReplayDiverged, StoredReply, same_question
from coordinator.storage.journal_store import END, EXPIRE, HAND, TAKE, OpenedTask, Step
from edge_client.protocol.task import ClientId, Reply

EXPIRED = "no answer within deadline-s"
STALE = "stale: its center is too many versions further"


@dataclass(kw_only=True)
class Orders:
    """What devices are told after steps: who has a new task, and whose task is wanted no more."""

    given: list[ClientId] = field(default_factory=list)
    stopped: dict[ClientId, ExchangeKey] = field(default_factory=dict)


class JournalledTraining:
    """One run without rounds: `training` is the machine's state, `counts` and `refused` are those of the round.

    `tasks` has the exchange of each device at work, `prepared` the last task of each device.
    """

    def __init__(self, run: str, context: ExchangeContext) -> None:
        self._run, self._context, self._journal = run, context, context.store.journal
        self.tasks: dict[ClientId, ExchangeKey] = {}
        self.prepared: dict[ClientId, PreparedTask] = {}
        self._stopped: list[dict[ClientId, ExchangeKey]] = []  # not stored yet

    def open_round(self, number: int, before: Snapshot, rules: Rules, context: ExchangeContext) -> None:
        """Round `number` begins where the one `before` ended, or goes on after its journal.

        The program of `context` has the engines of the devices that were let in. Raises ReplayDiverged where the
        journal has other tasks.
        """
        self._context = context
        training = before.training
        self.round, self.training, self.rules, self._place = number, training, rules, 0
        self.counts, self.refused, self.closed = RoundCounts(), dict[ClientId, str](), False
        keys = {
            who: ExchangeKey(self._run, before.rounds[who], handed.number) for who, handed in training.at_work.items()
        }
        again = {who: machine.task_again(training, rules, who) for who in keys}
        self._put(keys, prepare_each(keys, again, self._context))
        for step in self._journal.steps(self._run, number):
            self._play(step)
            self._place += 1

    @property
    def rounds(self) -> dict[ClientId, int]:
        """In which round each device at work got its task."""
        return {who: key.round for who, key in self.tasks.items()}

    @property
    def wanted(self) -> int:
        """So many more updates end the round."""
        return machine.round_target(self.rules) - len(self.counts.staleness)

    def has_its_part(self, who: ClientId) -> bool:
        """Whether a device waits for the next round, as `RoundCounts` says."""
        return self.counts.has_its_part(who, self.training, self.rules)

    # -- steps, each stored before the machine takes it

    def hand_out(self, may_get: Callable[[ClientId], bool]) -> Orders | None:
        """Give tasks to free devices that may get one; where none works and none may, empty the buffers.

        -> None where the disk has no room.
        """
        training, tasks, made = machine.hand_out(self.training, self.rules, self.round, may_get)
        if not tasks and not made:
            return Orders()
        keys = self._keys(training, tasks)
        prepared = prepare_each(keys, tasks, self._context)
        opened = self._opened(keys, prepared)
        if not self._store(lambda: self._journal.hand(self._run, self.round, self._place, opened)):
            return None
        return self._handed(training, made, keys, prepared)

    def take(self, batch: Mapping[ClientId, tuple[StoredReply, Reply]]) -> Orders | None:
        """Take replies of devices at work in this order, `wanted` at most; None where the disk has no room."""
        records = {self.tasks[cid]: record for cid, (record, _) in batch.items()}
        if not self._store(lambda: self._journal.take(self._run, self.round, self._place, records), len(batch)):
            return None
        orders = Orders()
        for cid, (record, reply) in batch.items():
            self._take(cid, reply, record.n, orders)
        return orders

    def end(self, what: str, cid: ClientId, why: str) -> bool:
        """The task of a device at work ends without a reply that counts, by REFUSE or EXPIRE; False: no room."""
        key = self.tasks[cid]
        step = Step(what, [cid], (key.round, key.exchange))
        stored = self._store(lambda: self._journal.end(self._run, self.round, self._place, step, why))
        if stored:
            self._ended(what, cid, why)
        return stored

    def close(self) -> bool:
        """End the round now, with the updates that it has; False where the disk has no room."""
        self.closed = self._store(lambda: self._journal.end_round(self._run, self.round, self._place))
        return self.closed

    def finish(self) -> dict[ClientId, ExchangeKey]:
        """The run is over; -> the tasks that are under way, which are not wanted any more."""
        left, self.tasks = self.tasks, {}
        self._journal.stop(left, "late")
        return left

    def _store(self, write: Callable[[], None], steps: int = 1) -> bool:
        """Write steps of the journal; -> False where the disk has no room."""
        try:
            write()
        except OSError:
            return False
        self._place += steps
        self._store_stopped()
        return True

    def _store_stopped(self) -> None:
        """Note the tasks that steps have stopped; with the next step where the disk has no room."""
        with suppress(OSError):  # until then an update of one is answered `busy`
            while self._stopped:
                self._journal.stop(self._stopped[0], STALE)
                del self._stopped[0]

    # -- what a step does, live or in a replay

    def _play(self, step: Step) -> None:
        """Take a step again that is stored."""
        what, devices, task = step
        if what == HAND:
            chosen = frozenset(devices)
            training, tasks, made = machine.hand_out(self.training, self.rules, self.round, chosen.__contains__)
            keys = self._keys(training, tasks)
            prepared = prepare_each(keys, tasks, self._context)
            store, same = self._context.store, keys.keys() == chosen
            for who, key in keys.items():
                same &= same_question(store.exchanges.task_hashes(key), {who: prepared[who].sha256})
            if not same:
                raise ReplayDiverged(ExchangeKey(self._run, self.round, 0), store.states.run_names())
            self._handed(training, made, keys, prepared)
        elif what == TAKE:
            cid, key = devices[0], ExchangeKey(self._run, *task)
            stored = self._context.store.exchanges.replies(key)[cid]
            reply = read_reply(self.prepared[cid], stored, self._context.store)
            self._take(cid, reply, stored.n, Orders())
        elif what == END:
            self.closed = True
        else:
            told = self._context.store.exchanges.refusals(self._run, task[0])  # of the round that gave the task
            self._ended(what, devices[0], told.get(devices[0], what))

    def _handed(
        self,
        training: Training,
        made: Sequence[Taken],
        keys: Mapping[ClientId, ExchangeKey],
        prepared: Mapping[ClientId, PreparedTask],
    ) -> Orders:
        orders, self.training = Orders(), training
        for taken in made:
            self._note(taken, orders)
        self._put(keys, prepared)
        orders.given += keys
        return orders

    def _take(self, cid: ClientId, reply: Reply, n: int, orders: Orders) -> None:
        key, spec = self.tasks.pop(cid, None), self.prepared[cid].reply_spec
        if reply.update is not None:
            reply = replace(reply, n=spec.samples_that_count(n))  # as in a replay: with the fleet of this round
        self.training, taken = machine.take(self.training, self.rules, cid, reply, update_moves(spec, reply))
        if taken.task is not None:
            keys = {cid: ExchangeKey(self._run, self.round, self.training.at_work[cid].number)}
            self._put(keys, prepare_each(keys, {cid: taken.task}, self._context))
            self._open(cid)
            orders.given.append(cid)
        elif taken.what == "counted":
            self.counts.count(cid, taken.staleness)
        elif key is not None:  # else its task was stopped by an update that came with it
            self.counts.stale += 1
        self._note(taken, orders)
        self.closed = self.closed or self.wanted <= 0

    def _note(self, taken: Taken, orders: Orders) -> None:
        """What a new version brings with it: outliers that do not count, and tasks that are too old now."""
        self.refused |= taken.refused
        self.counts.stale += len(taken.stopped)
        stopped = {who: self.tasks.pop(who) for who in taken.stopped if who in self.tasks}
        self.refused |= dict.fromkeys(stopped, STALE)
        orders.stopped |= stopped
        orders.given = [who for who in orders.given if who not in stopped]
        self._stopped += [stopped] if stopped else []
        self._store_stopped()

    def _ended(self, what: str, cid: ClientId, why: str) -> None:
        self.tasks.pop(cid, None)
        self.training = machine.release(self.training, cid)
        self.counts.expired += what == EXPIRE
        self.refused[cid] = why

    # -- tasks

    def _keys(self, training: Training, tasks: Iterable[ClientId]) -> dict[ClientId, ExchangeKey]:
        return {who: ExchangeKey(self._run, self.round, training.at_work[who].number) for who in tasks}

    def _put(self, keys: Mapping[ClientId, ExchangeKey], prepared: Mapping[ClientId, PreparedTask]) -> None:
        self.prepared.update(prepared)
        self.tasks.update(keys)

    def _open(self, who: ClientId) -> None:
        """A task that follows from a step which is stored: it is stored once."""
        if not self._context.store.exchanges.exists(self.tasks[who]):
            self._journal.open(self._opened({who: self.tasks[who]}, self.prepared))

    @staticmethod
    def _opened(keys: Mapping[ClientId, ExchangeKey], prepared: Mapping[ClientId, PreparedTask]) -> list[OpenedTask]:
        blobs = {who: {manifest.sha256 for manifest in prepared[who].blobs} for who in keys}
        return [OpenedTask(keys[who], who, prepared[who].sha256, blobs[who]) for who in sorted(keys)]
