"""The interface of a method: a generator of exchanges over a serialisable state.

`round` yields an exchange `{client: Fit | Probe}`, receives `{client: Reply}`, and returns the next state. A client
that did not answer is missing from the replies. A replay of stored replies gives the same state to the last bit if a
method draws random numbers from `rng` only and goes through clients in sorted order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypedDict, TypeVar, cast

import numpy as np

from edge_client.protocol.summed_task import Words
from edge_client.protocol.task import Array, ClientId, Fit, Flat, OwnModel, Probe, Reply, Schema

Exchange = Mapping[ClientId, Fit | Probe]
Replies = Mapping[ClientId, Reply]
ReplyObserver = Callable[[ClientId, Reply], None]
Fleet = Mapping[ClientId, int]  # enrolled clients -> number of training samples
# Weights and models, whose probabilities a device mixes; the second where a model may be one that it keeps itself.
Mixture = tuple[tuple[float, Flat], ...]
ServedModels = tuple[tuple[float, Flat | OwnModel], ...]
T = TypeVar("T")


class ServingOptions(TypedDict):
    """How devices evaluate the models that they are served: fields of a `Probe`."""

    buffers: str


class StreamingExchange(dict[ClientId, Fit | Probe]):
    """An exchange that passes each reply to `see` when it is accepted, before the exchange closes.

    It is for work that can start before the last reply, not for decisions: in a replay `see` is never called, it may
    be called twice with the same reply, and the exchange may close without a reply that `see` received.
    """

    def __init__(self, tasks: Exchange, see: ReplyObserver) -> None:
        super().__init__(tasks)
        self.on_reply = see


class RequireAll(dict[ClientId, Fit | Probe]):
    """An exchange that needs a reply from each client it asks; over-selection does not apply to it."""


class PartOfCohort(dict[ClientId, T]):
    """An exchange that asks some of the `of` clients of a round. As many may be missing as of all of them.

    With the quorum of its own clients one that is asked alone could end a run.
    """

    def __init__(self, tasks: Mapping[ClientId, T], *, of: int) -> None:
        super().__init__(tasks)
        self.of = of


class StoredReplies(Mapping[ClientId, Reply]):
    """Replies of which those with a vector are on disk: each access reads the reply again.

    `samples` has, by "update" and "grad", the samples `n` of each reply that has this vector.
    """

    def __init__(
        self,
        clients: Iterable[ClientId],
        read: Callable[[ClientId], Reply],
        samples: Mapping[str, Mapping[ClientId, int]],
    ) -> None:
        self._clients, self._read, self._samples = dict.fromkeys(clients), read, samples

    def samples(self, vector: str) -> dict[ClientId, int]:
        """`n` of each reply that has the `vector`, sorted by client; no vector is read."""
        given = self._samples.get(vector, {})
        return {who: given[who] for who in sorted(given) if who in self._clients}

    def of(self, clients: Iterable[ClientId]) -> StoredReplies:
        """The replies of these clients only."""
        return StoredReplies((who for who in clients if who in self._clients), self._read, self._samples)

    def __getitem__(self, who: ClientId) -> Reply:
        if who not in self._clients:
            raise KeyError(who)
        return self._read(who)

    def __contains__(self, who: object) -> bool:
        return who in self._clients

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


def vector_samples(replies: Replies, vector: str) -> dict[ClientId, int]:
    """`n` of each reply that has an "update" or a "grad", sorted by client."""
    if isinstance(replies, StoredReplies):
        return replies.samples(vector)
    return {who: reply.n for who, reply in sorted(replies.items()) if getattr(reply, vector) is not None}


def some_replies(replies: Replies, clients: Collection[ClientId]) -> Replies:
    """The replies of those `clients` that answered; nothing is read."""
    if isinstance(replies, StoredReplies):
        return replies.of(clients)
    return {who: reply for who, reply in replies.items() if who in clients}


class SumByCenter(dict[ClientId, Fit | Probe]):
    """An exchange of which the method is sent the sums of the devices' words only (`SealedSums`), never one reply.

    `groups` are devices that are summed apart from each other; a device that no group names belongs to group 0. A group
    of which fewer than `least` devices answered is not summed.
    """

    def __init__(self, tasks: Exchange, *, least: int, groups: Mapping[ClientId, int] | None = None) -> None:
        super().__init__(tasks)
        self.least, self.groups = least, groups or {}


class SealedSums(dict[ClientId, Reply]):
    """What the server learns of a `SumByCenter`: the sum of the words of each group, and which devices are in it."""

    def __init__(self, exchange: SumByCenter, replies: Replies) -> None:
        super().__init__()
        members: dict[int, list[ClientId]] = {}
        for who in sorted(replies):
            members.setdefault(exchange.groups.get(who, 0), []).append(who)
        self.members = {group: who for group, who in members.items() if len(who) >= exchange.least}
        self.sums = {group: _sum(replies[c].words for c in who) for group, who in self.members.items()}

    @classmethod
    def unmasked(cls, sums: Mapping[int, tuple[list[ClientId], Words | None]]) -> SealedSums:
        """The sums that were made under masks: which devices are in the sum of each group, and its words.

        None for a sum that the server has seen and does not use.
        """
        made = cls(SumByCenter({}, least=0), {})
        made.members = {group: who for group, (who, _) in sums.items()}
        made.sums = {group: words for group, (_, words) in sums.items() if words is not None}
        return made


def learned(exchange: Exchange, replies: Replies) -> Replies:
    """What a method is sent when an exchange has closed: the replies, or sums of them; drivers call this."""
    return SealedSums(exchange, replies) if isinstance(exchange, SumByCenter) else replies


def _sum(parts: Iterable[Array | None]) -> Words:
    """Words modulo 2^32, and so modulo every lower power of two; the order does not matter."""
    total = np.zeros(0, dtype=np.uint32)
    for words in parts:
        if words is None:
            continue
        if total.size:
            total += words
        else:
            total = words.astype(np.uint32)
    return total


def notify_reply(exchange: Mapping[ClientId, object], who: ClientId, reply: Reply) -> None:
    """Pass an accepted reply to a `StreamingExchange`; drivers call this."""
    if isinstance(exchange, StreamingExchange):
        exchange.on_reply(who, reply)


class RepliesWithLate(StoredReplies):
    """The replies to a round's first exchange, and `late`: updates that arrived after their own round had closed.

    A late update was trained from a center of an earlier round. Only methods for which `uses_late` is true receive it.
    """

    def __init__(self, replies: Replies, late: Replies) -> None:
        samples = {vector: vector_samples(replies, vector) for vector in ("update", "grad")}
        super().__init__(replies, replies.__getitem__, samples)
        self.late = late


def late_replies(replies: Replies) -> Replies:
    """The late updates of clients that did not answer this exchange."""
    late = replies.late if isinstance(replies, RepliesWithLate) else {}
    return some_replies(late, [who for who in late if who not in replies])


def uses_late(strategy: Strategy) -> bool:
    """Whether a method uses late updates: its setting `late_weight` is above zero."""
    return float(getattr(strategy, "late_weight", 0.0)) > 0


def takes_newcomers(strategy: Strategy) -> bool:
    """Whether the fleet may grow between the rounds of a run: the method's class attribute of this name.

    Such a method knows devices by their ids, and asks and serves a device that its state does not hold. A method of a
    user's own that says nothing keeps the fleet that its run began with.
    """
    return bool(getattr(strategy, "takes_newcomers", False))


@dataclass(frozen=True, kw_only=True, eq=False)
class State:
    """What a method carries from round to round, as plain arrays, so that each method's state can be stored.

    `centers` is [n_centers, schema.size]. `assignment` maps a client to its center, or to the center of largest weight
    where a client mixes several; scores and figures use it, predictions do not. It is empty before the first
    clustering, and for methods without assignment; where such a state has one center, reports count every device on
    it. `extra` holds the other arrays of a method by name. States are equal where all their bits are.

    >>> import numpy as np
    >>> State(centers=np.zeros((2, 4)), assignment={"device-00": 1}).centers.shape
    (2, 4)
    """

    centers: Array
    assignment: Mapping[ClientId, int] = field(default_factory=dict)
    extra: Mapping[str, Array] = field(default_factory=dict)

    __hash__ = None  # type: ignore[assignment]  # as of all that is compared by value and holds arrays

    def __eq__(self, other: object) -> bool:
        return _bits(self) == _bits(other) if isinstance(other, State) else NotImplemented


def _bits(state: State) -> tuple[object, ...]:
    arrays = {name: np.asarray(array) for name, array in [("", state.centers), *state.extra.items()]}
    return dict(state.assignment), {name: (a.dtype, a.shape, a.tobytes()) for name, a in arrays.items()}


Round = Generator[Exchange, Replies, State]


class Strategy(Protocol):
    """One method: a frozen dataclass of its settings. What changes between rounds is in `State`."""

    def begin(self, model: Flat, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> State:
        """The state before the first round, from one common initial model [schema.size]."""

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """The exchanges of one round; returns the next state and does not change the input state."""

    @property
    def serving(self) -> ServingOptions:
        """With which running statistics devices evaluate models."""

    def predictor(self, state: State, who: ClientId | None) -> ServedModels:
        """The models that serve `who`, with weights: rows of `state.centers`, or kept on the device (`OwnModel`).

        None stands for a device that never trained; its models are centers.
        """


def relay(
    exchanges: Round,
    *,
    change: Callable[[Exchange], Exchange] = lambda exchange: exchange,
    see: Callable[[Replies], object] = lambda _: None,
) -> Round:
    """The exchanges of a round, each changed before it is asked; `see` is told the replies to each."""
    try:
        exchange = next(exchanges)
        while True:
            replies = yield change(exchange)
            see(replies)
            exchange = exchanges.send(replies)
    except StopIteration as done:
        return cast("State", done.value)


Ask = TypeVar("Ask")
Answer = TypeVar("Answer")


def drive(asked: Generator[Ask, Answer, T], answer: Callable[[Ask], Answer]) -> T:
    """Run a generator of exchanges to its end and return its result; `answer` returns the replies to one exchange."""
    try:
        exchange = next(asked)
        while True:
            exchange = asked.send(answer(exchange))
    except StopIteration as done:
        return cast("T", done.value)
