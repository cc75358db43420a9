"""Writes the decisions of one exchange to the store, before the devices hear of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from coordinator.rounds.exchange_rules import OpenExchange
from coordinator.rounds.update_validation import FAR_UPDATES, AskedStage, decode_accepted, outliers, update_moves
from coordinator.runtime.exchange.task_messages import ExchangeContext, NetworkExchange, PreparedTask
from coordinator.storage.exchange_store import ExchangeKey, StoredReply
from coordinator.storage.store import Store
from coordinator.strategies.base import notify_reply
from edge_client.errors import NetworkError
from edge_client.printable import first_of
from edge_client.protocol.task import ClientId, Reply

MOST_NAMES = 5  # of devices, in an error


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
        self._moves: dict[ClientId, dict[str, float]] = {}

    def accept(self, valid: Sequence[tuple[StoredReply, Reply]]) -> None:
        """Store together that these replies count, and show them to a method that streams.

        Raises OSError on a full disk; then none of them counts.
        """
        if valid:
            self._store.exchanges.put_replies(self._key, [record for record, _ in valid])
        for (cid, *_), reply in valid:
            spec = self._prepared[cid].reply_spec
            self._moves[cid] = update_moves(spec, reply)
            notify_reply(self._tasks, cid, reply)
            if not spec.vector:
                self.replies[cid] = reply

    def close(self, exchange: OpenExchange, no_room: Mapping[ClientId, str]) -> None:
        """Store the closing. Raises NetworkError below the quorum if the configuration stops there.

        `no_room` says why an update of these devices could not be stored; some may have sent it again since.

        Devices that refused without the key of their roster count as heard: asked again they would say the same, and
        after the closing they are asked for other keys.
        """
        keys, refused = exchange.accepted.keys(), exchange.refused
        heard = len(keys) + sum(self._lost_key(cid, code) for cid, code in refused.items())
        if heard < exchange.quorum and self._config.round.below_quorum == "stop":
            self._store.exchanges.expire(self._key)
            full = [why for cid, why in no_room.items() if cid not in {*keys, *refused}]
            far = {"rejected", "not_finite"} & set(refused.values())
            hint = (
                "free or mend the coordinator's disk, then start again to repeat the exchange"
                if full
                else f"{FAR_UPDATES}; other settings need a new `folder`"
                if far
                else "look at those devices, then start again to repeat the exchange; or lower `quorum`, or set"
                ' below-quorum = "continue"'
            )
            raise NetworkError(
                f"only {len(keys)} of {exchange.goal} devices gave an answer that counts in round {self._key.round}"
                f"{self._missing_in_words(keys, refused)}"
                + (f"; updates could not be stored: {full[0]}" if full else ""),
                hint=hint,
            )
        self._close_without_outliers(keys)

    def _lost_key(self, cid: ClientId, code: str) -> bool:
        task = self._tasks.get(cid)
        return isinstance(task, AskedStage) and task.stage == "shares" and code == "bad_task"

    def _missing_in_words(self, counted: Collection[ClientId], refused: Collection[ClientId]) -> str:
        """Which devices gave no answer, and which gave one that does not count, with the reason."""
        silent = sorted(self._prepared.keys() - set(counted) - set(refused))
        reasons = self._store.exchanges.refusals(self._key.run, self._key.round)
        told = [f"{cid} did not count ({reasons.get(cid, 'refused')})" for cid in sorted(refused)]
        words = [f"no answer from {first_of(silent, MOST_NAMES)}"] if silent else []
        return "".join(f"; {each}" for each in (*words, *([first_of(told, MOST_NAMES)] if told else [])))

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
