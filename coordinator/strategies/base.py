"""What a method is: a generator of exchanges over a serialisable state. No network, no clock, no disk, no torch.

`round` yields `{client: Fit | Probe}`, is sent `{client: Reply}`, and returns the next state. A missing key is a device
that did not answer. Draw only from `rng`; go through clients in sorted order, so that a replay is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypedDict, TypeVar, cast

import numpy as np

from edge_client.protocol.task import Array, ClientId, Fit, Flat, OwnModel, Probe, Reply, Schema

Exchange = Mapping[ClientId, Fit | Probe]
Replies = Mapping[ClientId, Reply]
ReplyObserver = Callable[[ClientId, Reply], None]
Fleet = Mapping[ClientId, int]  # enrolled clients and their number of training samples
Mixture = tuple[tuple[float, Flat], ...]  # weights and models; a device is served their mixture of probabilities
ServedModels = tuple[
    tuple[float, Flat | OwnModel], ...
]  # the same, where a model may be one that the device keeps itself


class ServingOptions(TypedDict):
    """How devices evaluate the models that they are served: fields of a `Probe`."""

    buffers: str
    label_prior: str


class StreamingExchange(dict[ClientId, Fit | Probe]):
    """An exchange of which `see` is shown every accepted reply, when it is accepted and before the exchange closes.

    For work that need not wait for the last device, not for decisions: a replay shows nothing, some replies are shown
    more than once, and the exchange may close without one that was shown. If it closes with it, it is the same reply.
    """

    def __init__(self, tasks: Exchange, see: ReplyObserver) -> None:
        super().__init__(tasks)
        self.on_reply = see


class RequireAll(dict[ClientId, Fit | Probe]):
    """An exchange that needs all whom it asks; over-selection, which stops at a cohort's number, leaves it alone."""


def notify_reply(exchange: Exchange, who: ClientId, reply: Reply) -> None:
    """For drivers: a reply of this exchange was accepted."""
    if isinstance(exchange, StreamingExchange):
        exchange.on_reply(who, reply)


class RepliesWithLate(dict[ClientId, Reply]):
    """The replies to a round's first exchange, and `late`: updates of earlier rounds that came after closing.

    Only for methods that say `uses_late`, and only of devices that were asked then: whose start was an older center.
    """

    def __init__(self, replies: Replies, late: Replies) -> None:
        super().__init__(replies)
        self.late = late


def late_replies(replies: Replies) -> Replies:
    """The late updates of devices that have not answered this exchange."""
    late = replies.late if isinstance(replies, RepliesWithLate) else {}
    return {who: reply for who, reply in late.items() if who not in replies}


def uses_late(strategy: Strategy) -> bool:
    """Whether a method wants what came after closing: it then has a setting `late_weight` above zero."""
    return float(getattr(strategy, "late_weight", 0.0)) > 0


@dataclass(frozen=True, kw_only=True)
class State:
    """What a method carries from round to round; plain arrays and numbers, so that any method can be stored.

    `centers` is [n_centers, schema.size]; `assignment` maps a client to its center, or to the one of largest weight
    where several share a client (scores and pictures use that, no prediction does). It is empty before the first
    clustering, and where no center stands for any client. `extra` holds whatever else a method needs, by name.
    """

    centers: Array
    assignment: Mapping[ClientId, int] = field(default_factory=dict)
    extra: Mapping[str, Array] = field(default_factory=dict)


Round = Generator[Exchange, Replies, State]


class Strategy(Protocol):
    """One method. Frozen dataclass of its settings; all state is in `State`."""

    def begin(self, model: Flat, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> State:
        """The state before the first round, from one common initial model [schema.size]."""
        ...

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """One round. The input state is left as it was."""
        ...

    @property
    def serving(self) -> ServingOptions:
        """How devices evaluate models: with which running statistics, and told what of their labels."""
        ...

    def predictor(self, state: State, who: ClientId | None) -> ServedModels:
        """What serves `who`: models that travel, or those that the device keeps itself.

        None is a device that never trained and has not chosen yet; it is served models that travel.
        """
        ...


T = TypeVar("T")


def drive(exchanges: Generator[Exchange, Replies, T], ask: Callable[[Exchange], Replies]) -> T:
    """Run a generator of exchanges to its end; `ask` is the network, the emulator, or a log of stored replies."""
    try:
        exchange = next(exchanges)
        while True:
            exchange = exchanges.send(ask(exchange))
    except StopIteration as done:
        return cast("T", done.value)
