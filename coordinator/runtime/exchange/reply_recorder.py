"""Writes the decisions of one exchange to the store, before the devices hear of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from coordinator.rounds.exchange_rules import Close
from coordinator.rounds.update_validation import decode_accepted, outliers, update_moves
from coordinator.runtime.exchange.task_messages import ExchangeContext, NetworkExchange, PreparedTask
from coordinator.storage.exchange_store import ExchangeKey, StoredReply
from coordinator.storage.store import Store
from coordinator.strategies.base import notify_reply
from edge_client.errors import NetworkError
from edge_client.protocol.task import ClientId, Reply


def read_reply(prepared: PreparedTask, stored: StoredReply, store: Store) -> Reply:
    """Decode a stored reply to this task, as it was decoded when it arrived."""
    return decode_accepted(prepared.reply_spec, store.updates(stored.cid).read(stored.sha256), stored.n)


class ReplyRecorder:
    """The replies of one exchange. `replies` holds the accepted ones without a vector; vectors stay on disk."""

    def __init__(
        self,
        key: ExchangeKey,
        tasks: NetworkExchange,
        prepared: Mapping[ClientId, PreparedTask],
        context: ExchangeContext,
    ) -> None:
        self.replies: dict[ClientId, Reply] = {}
        self._key, self._tasks, self._prepared = key, tasks, prepared
        self._config, self._store = context.config, context.store
        self._valid: dict[ClientId, tuple[StoredReply, Reply]] = {}
        self._moves: dict[ClientId, dict[str, float]] = {}

    def hold(self, record: StoredReply, reply: Reply) -> None:
        """Remember a valid reply, whose blob is on disk, until it is accepted."""
        self._valid[record.cid] = (record, reply)

    def accept(self, cids: Iterable[ClientId]) -> None:
        """Store together that these replies count, and show them to a method that streams.

        Raises OSError on a full disk; then none of them counts.
        """
        valid = [self._valid.pop(cid) for cid in cids]
        if valid:
            self._store.exchanges.put_replies(self._key, [record for record, _ in valid])
        for (cid, *_), reply in valid:
            spec = self._prepared[cid].reply_spec
            self._moves[cid] = update_moves(spec, reply)
            notify_reply(self._tasks, cid, reply)
            if not spec.vector:
                self.replies[cid] = reply

    def close(self, command: Close, goal: int) -> None:
        """Store the closing. Raises NetworkError below the quorum if the configuration stops there."""
        if not command.enough and self._config.round.below_quorum == "stop":
            self._store.exchanges.expire(self._key)
            raise NetworkError(
                f"only {len(command.keys)} of {goal} devices gave an answer that counts in round {self._key.round}",
                hint="`fedcenters-coordinator status` says who refused and why; start again to repeat the exchange,"
                ' lower `quorum`, or set below-quorum = "continue"',
            )
        self._close_without_outliers(command.keys)

    def _close_without_outliers(self, keys: Collection[ClientId]) -> None:
        """Store which replies count, which are outliers, and the scales of the next closing, in one transaction."""
        forgotten = [cid for cid in keys if cid not in self._moves]  # accepted before a crash
        stored = self._store.exchanges.replies(self._key) if forgotten else {}
        for cid in forgotten:
            asked = self._prepared[cid]
            self._moves[cid] = update_moves(asked.reply_spec, read_reply(asked, stored[cid], self._store))
        moves = {cid: self._moves[cid] for cid in keys}
        scales, ratio = self._store.exchanges.scales(self._key.run), self._config.update.max_ratio
        refused, scales = outliers(moves, scales, ratio=ratio)
        self._store.exchanges.close(self._key, set(keys) - refused.keys(), refused=refused, scales=scales)
