"""Record the data of a run's pictures during the run: models as devices send them, shares at the end of rounds.

The recorder stands between a strategy and its network and changes no message. A model becomes a point of bounded size
at once, so that memory is bounded for any model and fleet. The run's random generators are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from coordinator.strategies.base import Exchange, Fleet, Replies, State
from coordinator.strategies.common.representation import is_representation, represent
from coordinator.strategies.common.updates import unpack_by_client
from coordinator.strategies.numbered_fleet import sorted_names
from edge_client.protocol.nearest.sketch import count_sketch
from edge_client.protocol.task import Array, ClientId, Flat, Schema
from emulator.reports.pictures.records import (
    MAX_DEVICES,
    MAX_KEPT_ROUNDS,
    MAX_SHARE_ROUNDS,
    MAX_WIDTH,
    CenterShares,
    PictureData,
    RoundPoints,
)
from emulator.simulation import checkpoint

Ask = Callable[[Exchange], Replies]
SHARE_LABELS = {"u": "importance weight u", "pi": "mixture weight π"}  # State.extra of FedSoft, of FedEM
DEFAULT_REPRESENTATION = "classifier"  # what is compared for a method that clusters nothing


class RunRecorder:
    """Records a run of `rounds` rounds, models of `moments` of them; `kind` is how its method compares models."""

    def __init__(
        self,
        fleet: Fleet,
        schema: Schema,
        *,
        rounds: int,
        kind: object = DEFAULT_REPRESENTATION,
        moments: int = MAX_KEPT_ROUNDS,
    ) -> None:
        self._schema, self._kind = schema, kind if is_representation(kind) else DEFAULT_REPRESENTATION
        self._shown = frozenset(sample_shown(fleet))
        self._rounds, self._told = spread_rounds(rounds, moments), spread_rounds(rounds, MAX_SHARE_ROUNDS)
        self._points: dict[int, dict[ClientId, Array]] = {}
        self._shares: dict[str, dict[int, dict[ClientId, Array]]] = {}

    def record_exchanges(self, ask: Ask, number: int, state: State) -> Ask:
        """`ask` for round `number`, which begins with `state`; of several models of a device the last is noted."""
        if number not in self._rounds:
            return ask

        def asked(exchange: Exchange) -> Replies:
            replies = ask(exchange)
            for who in sorted(self._shown & replies.keys()):
                model = replies[who].update
                if model is not None and np.isfinite(model).all():
                    self._points.setdefault(number, {})[who] = self._point(model, state)
            return replies

        return asked

    def record_round_end(self, number: int, state: State) -> None:
        """Note the shares that round `number` ended with."""
        if number in self._told:
            for name in SHARE_LABELS:
                if found := {c: u for c, u in unpack_by_client(state.extra, name).items() if c in self._shown}:
                    self._shares.setdefault(name, {})[number] = found

    def picture_data(self) -> PictureData:
        moments = [
            RoundPoints(round=number, who=tuple(sorted(points)), points=np.stack([points[c] for c in sorted(points)]))
            for number, points in sorted(self._points.items())
        ]
        shares = next((_table(SHARE_LABELS[name], told) for name, told in self._shares.items()), None)
        return PictureData(representation=str(self._kind), moments=tuple(moments), shares=shares)

    def keep(self, folder: Path) -> None:
        told = {f"points/{number}": row for number, row in self._points.items()}
        told |= {f"shares/{name}/{number}": row for name, rows in self._shares.items() for number, row in rows.items()}
        checkpoint.save_models(folder, "heard", {(who, slot): row[who] for slot, row in told.items() for who in row})

    def recall(self, folder: Path) -> None:
        found: dict[tuple[ClientId, str], Array] = {}
        checkpoint.load_models(folder, self._shown, found)
        for (who, slot), value in found.items():
            kind, *name, number = slot.split("/")
            rows = self._points if kind == "points" else self._shares.setdefault(name[0], {})
            rows.setdefault(int(number), {})[who] = value

    def _point(self, model: Flat, state: State) -> Array:
        pivot = state.extra.get("start")
        return narrow_point(represent(model[None], self._schema, str(self._kind), pivot=pivot)[0])


def sample_shown(fleet: Fleet) -> list[ClientId]:
    """At most MAX_DEVICES devices, sorted; always the same ones. Chosen by lot, as groups often follow the names."""
    clients = sorted_names(fleet)
    if len(clients) <= MAX_DEVICES:
        return list(clients)
    rng = np.random.Generator(np.random.PCG64(0))
    return [clients[i] for i in sorted(rng.choice(len(clients), size=MAX_DEVICES, replace=False).tolist())]


def spread_rounds(rounds: int, count: int) -> Sequence[int]:
    """At most `count` of the rounds 1..`rounds`, the first and the last among them, evenly spaced."""
    return sorted({int(number) for number in np.linspace(1, rounds, min(rounds, count)).round()})


def narrow_point(point: Array) -> Array:
    """[d] -> [at most MAX_WIDTH] float32: itself, or its count sketch, which keeps inner products.

    A squared distance of two sketches is off by some sqrt(2 / MAX_WIDTH), 4%.
    """
    if len(point) <= MAX_WIDTH:
        return point.astype(np.float32)
    sketch: Array = count_sketch(point[None], MAX_WIDTH)[0].astype(np.float32)
    return sketch


def _table(name: str, told: dict[int, dict[ClientId, Array]]) -> CenterShares:
    who = sorted({c for row in told.values() for c in row})
    centers = max(len(u) for row in told.values() for u in row.values())
    values = np.full((len(told), len(who), centers), np.nan, np.float32)
    for t, number in enumerate(sorted(told)):
        for i, c in enumerate(who):
            if c in told[number]:
                values[t, i, : len(told[number][c])] = told[number][c]
    return CenterShares(name=name, rounds=tuple(sorted(told)), who=tuple(who), values=values)
