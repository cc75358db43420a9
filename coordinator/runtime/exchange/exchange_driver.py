"""One exchange from its tasks to its replies, over the network or from the store.

`run_exchange` is the `ask` of a method's driver. It replays an exchange that is already closed, continues one that a
crash left open, and opens a new one; all three give the same replies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from coordinator.runtime.exchange.live_exchange import LiveExchange
from coordinator.runtime.exchange.reply_recorder import read_reply
from coordinator.runtime.exchange.task_messages import (
    ExchangeContext,
    NetworkExchange,
    PreparedTask,
    prepare_tasks,
)
from coordinator.storage.exchange_store import ExchangeKey, ReplayDiverged, same_question
from coordinator.storage.store import Store
from coordinator.strategies.base import Replies, StoredReplies
from edge_client.protocol.task import ClientId, Reply

# Arguments: key, tasks, how many replies are wanted (None: all), whether updates that come after closing are kept.
Ask = Callable[[ExchangeKey, NetworkExchange, "int | None", bool], Replies]
RunUntilClosed = Callable[[LiveExchange], None]


def run_exchange(
    key: ExchangeKey,
    tasks: NetworkExchange,
    wanted: int | None,
    context: ExchangeContext,
    run_until_closed: RunUntilClosed,
    *,
    late: bool = False,
) -> Replies:
    """Send these tasks and wait for the replies, `wanted` of them at most; None: all that come before the deadline.

    `run_until_closed` runs the event loop until the exchange is closed. With `late`, updates that come after closing
    are kept, too.
    """
    asked = open_exchange(key, tasks, context)
    replies: dict[ClientId, Reply] = {}
    if context.store.exchanges.closed_with(key) is None:
        live = LiveExchange(key, tasks, asked, wanted, context, late=late)
        live.begin()
        run_until_closed(live)
        replies = live.replies
    return replies_of(key, asked, context.store, replies)


def open_exchange(key: ExchangeKey, tasks: NetworkExchange, context: ExchangeContext) -> dict[ClientId, PreparedTask]:
    """Store these tasks before they are sent; -> them. Raises ReplayDiverged where others are stored."""
    asked = prepare_tasks(key, tasks, context)
    hashes = {cid: a.sha256 for cid, a in asked.items()}
    if not context.store.exchanges.exists(key):
        blobs = {manifest.sha256 for task in asked.values() for manifest in task.blobs}
        context.store.exchanges.open(key, hashes, context.config.round.deadline_s, blobs)
    elif not same_question(context.store.exchanges.task_hashes(key), hashes):
        raise ReplayDiverged(key, context.store.states.run_names())
    return asked


def replies_of(
    key: ExchangeKey, asked: Mapping[ClientId, PreparedTask], store: Store, known: Replies | None = None
) -> Replies:
    """The replies with which an exchange has closed, each read when it is used, unless it is `known`."""
    stored, closed = store.exchanges.replies(key), store.exchanges.closed_with(key) or []
    samples: dict[str, dict[ClientId, int]] = {}
    for cid in closed:
        spec = asked[cid].reply_spec
        samples.setdefault(spec.vector, {})[cid] = spec.samples_that_count(stored[cid].n)
    held = known or {}
    return StoredReplies(closed, lambda cid: held.get(cid) or read_reply(asked[cid], stored[cid], store), samples)
