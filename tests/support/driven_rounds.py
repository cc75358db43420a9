"""Rounds of a method on devices that the test keeps, with the exchanges that it yielded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from coordinator.rounds.round import round_rng
from coordinator.strategies.base import Exchange, Replies, State, Strategy, drive
from edge_client.protocol.task import ClientId, Flat, Task
from emulator.simulation.emulated_devices import EmulatedDevices

AnswerRule = Callable[[int, int, ClientId, Task], bool]  # round, exchange, device, task -> whether it answers


def answer_always(_round: int, _exchange: int, _who: ClientId, _task: Task) -> bool:
    return True


@dataclass
class DrivenMethod:
    """`devices` and their models after the rounds; `asked[r]` and `said[r]` are the exchanges of round r + 1."""

    strategy: Strategy
    devices: EmulatedDevices
    start: Flat
    seed: int = 0
    answers: AnswerRule = answer_always
    asked: list[list[Exchange]] = field(default_factory=list)
    said: list[list[Replies]] = field(default_factory=list)

    def __post_init__(self) -> None:
        schema, fleet = self.devices.program.schema, self.devices.fleet
        self.state: State = self.strategy.begin(self.start, schema, fleet, round_rng(self.seed, 0))

    def play(self, rounds: int) -> State:
        for _ in range(rounds):
            self.asked.append([])
            self.said.append([])
            number = len(self.asked)
            exchanges = self.strategy.round(
                self.state, self.devices.program.schema, self.devices.fleet, round_rng(self.seed, number)
            )
            self.state = drive(exchanges, partial(self._ask, number))
        return self.state

    def own(self, who: ClientId, slot: str) -> Flat:
        return self.devices.own[who, slot]

    def _ask(self, number: int, exchange: Exchange) -> Replies:
        self.asked[-1].append(exchange)
        position = len(self.asked[-1]) - 1
        replies = {
            c: self.devices.answer(c, task) for c, task in exchange.items() if self.answers(number, position, c, task)
        }
        self.said[-1].append(replies)
        return replies
