"""A recipe whose work waits at a gate: a test on the other side sees every process that begins, and lets it go on."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edge_client.protocol.program import Program
from edge_client.training.learner import EngineLearner, Learner, TrainedModel, TrainingJob
from tests.support import softmax_program


@dataclass(frozen=True, kw_only=True)
class PlainRecipe:
    """Softmax regression in float64; `buffered`: with running statistics; a sum of so many `members`."""

    buffered: bool = False
    members: int = 1

    def open(self) -> Learner:
        made = softmax_program.program(buffered=self.buffered, members=self.members)
        return EngineLearner(softmax_program.SoftmaxEngine(), made)


@dataclass(frozen=True, kw_only=True)
class GatedRecipe:
    """The same; before it trains, it says its process id at the gate and waits for a byte, or for the gate's end."""

    port: int

    def open(self) -> Learner:
        return WaitingLearner(softmax_program.SoftmaxEngine(), softmax_program.program(), self.port)


class WaitingLearner(EngineLearner):
    def __init__(self, engine: softmax_program.SoftmaxEngine, program: Program, port: int) -> None:
        super().__init__(engine, program)
        self.port = port

    def train(self, jobs: Sequence[TrainingJob]) -> Iterator[TrainedModel]:
        if jobs:
            with socket.create_connection(("127.0.0.1", self.port)) as gate:
                gate.sendall(f"{os.getpid()}\n".encode())
                gate.recv(1)
        yield from super().train(jobs)


@dataclass(frozen=True, kw_only=True)
class FailingRecipe:
    """Cannot be opened."""

    def open(self) -> Learner:
        raise RuntimeError("no such engine here")
