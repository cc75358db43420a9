"""The engine `graphs`: one client's step recorded once as a CUDA graph, then replayed, several clients at a time.

A step of a small CNN is some eighty kernels, each of which ends before the host has launched the next; a replay
launches all of them at once. A lane holds one client in buffers with fixed addresses, has one recording per batch size,
and runs on a stream of its own. A batch shorter than the task's runs the same step unrecorded. The tests run the same
step unrecorded on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coordinator.models.registry import Model
from edge_client.errors import RuntimeMissing
from edge_client.protocol.task import Optimiser
from edge_client.training.learner import Learner, TrainedModel, TrainingJob
from edge_client.training.noise import step_noise
from edge_client.training.optimiser import StepScalars
from emulator.engines.gpu.memory import run_in_parts
from emulator.engines.gpu.objective import Objective, RuleState, sgd_step_, torch_device, use_exact_kernels, use_noise
from emulator.engines.gpu.probing import ProbeMixin
from emulator.engines.gpu.resident_data import DeviceDataCache
from emulator.engines.pickling import pickle_by_value

LANES = 4
WARM_UP = 3  # passes before a recording, in which libraries choose their kernels and allocate
Run = Callable[[], None]
Record = Callable[[Run], Run]


@dataclass(frozen=True, kw_only=True)
class GraphRecipe:
    """The model, torch's device, the dtype, and how many clients train at once, each on its stream."""

    model: Model
    device: str = "cuda"
    dtype: str = "float32"
    lanes: int = LANES

    def open(self) -> Learner:
        """See `Recipe`. Raises RuntimeMissing without CUDA."""
        device = torch_device("cuda" if self.device == "auto" else self.device)
        if device.type != "cuda":
            raise RuntimeMissing(f"graphs are CUDA's, not {device}'s", hint="choose the engine lean, or device cuda")
        objective = Objective(self.model, device=device, dtype=self.dtype)
        return GraphLearner(objective, lanes=self.lanes, record=record_graph)

    def __reduce__(self) -> Any:  # noqa: ANN401 - pickle's
        return pickle_by_value(self)


def record_graph(run: Run) -> Run:
    """The kernels of `run` on the current stream as one graph; a call replays them on the stream that is then current.

    The warm-up runs the step, so the contents of its buffers are lost.
    """
    torch.cuda.synchronize()
    with use_exact_kernels(torch.device("cuda"), search=True):
        for _ in range(WARM_UP):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            run()
    replay: Run = graph.replay
    return replay


class GraphLearner(ProbeMixin):
    """See `Learner`."""

    def __init__(self, objective: Objective, *, lanes: int, record: Record) -> None:
        super().__init__(objective, stacks_batches=False, stacks_models=False)
        self._lanes = [_Lane(objective, self.resident, record) for _ in range(lanes)]

    def train(self, jobs: Sequence[TrainingJob]) -> Iterator[TrainedModel]:
        """A lane per job; when the longest of a group is done, the next group follows."""

        def together(first: int, last: int) -> list[TrainedModel]:
            with use_exact_kernels(self.objective.device):
                return self._together(jobs[first:last])

        for done in run_in_parts(len(jobs), len(self._lanes), together, what="clients", halved=self._halved):
            yield from done

    def _halved(self, size: int) -> None:
        """A lane keeps the memory of its recordings."""
        del self._lanes[size:]
        self.resident.clear()

    def _together(self, jobs: Sequence[TrainingJob]) -> list[TrainedModel]:
        self.objective.training()
        busy = list(zip(self._lanes, jobs, strict=False))
        for lane, job in busy:
            lane.load(job)
        for k in range(max(len(job.batches) for job in jobs)):
            for lane, job in busy:
                if k < len(job.batches):
                    lane.step(k)
        return [lane.read() for lane, _ in busy]


@dataclass(frozen=True, kw_only=True)
class _Feed:
    """The inputs of a step at fixed addresses: x, y, q [batch, ...], and the noise of a model that draws."""

    x: Tensor
    y: Tensor
    q: Tensor
    noise: Tensor | None


class _Lane:
    """One client at a time, in buffers with fixed addresses."""

    def __init__(self, objective: Objective, resident: DeviceDataCache, record: Record) -> None:
        self.objective, self._resident, self._record = objective, resident, record
        on_cuda = objective.device.type == "cuda"
        self._stream = torch.cuda.Stream(objective.device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._recordings: dict[tuple[int, Optimiser | None], tuple[_Feed, Run]] = {}
        self._rules: dict[Optimiser, RuleState] = {}
        with self._current():
            zeros = torch.zeros(3 * objective.n_params, dtype=objective.dtype, device=objective.device)
            self._w, self._v, self._pull = torch.split(zeros, objective.n_params)
            self._b = zeros.new_zeros(objective.size - objective.n_params)
            self._lr, self._momentum, self._mu, self._loss, self._scale, self._floor = (
                zeros.new_zeros(()) for _ in range(6)
            )

    def load(self, job: TrainingJob) -> None:
        """Copy the job of a client into the buffers, before its first step."""
        with self._current():
            self._job, key = job, (job.task.batch, job.task.optimiser)
            if any(len(index) == job.task.batch for index in job.batches) and key not in self._recordings:
                feed, rule = self._feed(job.task.batch), self._rule(job.task.optimiser)
                self._recordings[key] = feed, self._record(lambda: self._advance(feed, rule))
            self._fill(job)
            self._x, self._y = self._resident.tensors_of(job.data)
            self._rows = torch.from_numpy(np.concatenate(job.batches)).to(self.objective.device)
            self._q = self.objective.tensor(np.concatenate([job.weights[index] / len(index) for index in job.batches]))
            self._ends = np.cumsum([len(index) for index in job.batches])
            self._losses = self._q.new_zeros(len(job.batches))

    def step(self, k: int) -> None:
        """Step number k of the client: a replay for a full batch, an unrecorded step for a shorter one."""
        batch = len(self._job.batches[k])
        uses = slice(self._ends[k] - batch, self._ends[k])
        with self._current():
            optimiser = self._job.task.optimiser
            feed, run = self._recordings[batch, optimiser] if batch == self._job.task.batch else self._short(batch)
            if optimiser is not None:
                now = StepScalars.of(optimiser, k + 1)
                self._scale.fill_(now.scale)
                self._floor.fill_(now.floor)
            torch.index_select(self._x, 0, self._rows[uses], out=feed.x)
            torch.index_select(self._y, 0, self._rows[uses], out=feed.y)
            feed.q.copy_(self._q[uses])
            if feed.noise is not None:
                drawn = step_noise(self.objective.program, self._job.task.seed, k, batch)["noise"]
                feed.noise.copy_(self.objective.tensor(drawn))
            run()
            self._losses[k] = self._loss

    def read(self) -> TrainedModel:
        """Wait for the client's last step, and return its result."""
        with self._current():
            losses = self._losses.double().cpu().numpy()
            return TrainedModel(vector=self.objective.vector(self._w, self._b), losses=losses)

    def _advance(self, feed: _Feed, rule: RuleState | None) -> None:
        """One step: reads the feed and updates the lane's buffers."""
        with use_noise(feed.noise):
            g, after, loss = self.objective.gradient(self._w, self._b, feed.x, feed.y, feed.q)
        if rule is None:
            sgd_step_(self._w, self._v, g, self._pull, self._lr, self._momentum, self._mu)
        else:
            rule.step_(self._w, g, self._pull, self._lr, self._mu, self._scale, self._floor)
        self._b.copy_(after)
        self._loss.copy_(loss)

    def _short(self, batch: int) -> tuple[_Feed, Run]:
        feed, rule = self._feed(batch), self._rule(self._job.task.optimiser)
        return feed, lambda: self._advance(feed, rule)

    def _rule(self, optimiser: Optimiser | None) -> RuleState | None:
        """The lane's own sums for this optimiser, at a fixed address."""
        if optimiser is None:
            return None
        if optimiser not in self._rules:
            self._rules[optimiser] = RuleState.zeros(optimiser, self._w)
        return self._rules[optimiser]

    def _feed(self, batch: int) -> _Feed:
        source, new = self.objective.source, self._w.new_zeros
        drawn = new(batch, source.noise) if source.noise else None
        return _Feed(x=new(batch, *source.input), y=new(batch, *source.target), q=new(batch), noise=drawn)

    def _fill(self, job: TrainingJob) -> None:
        task, n = job.task, self.objective.n_params
        for scalar, value in ((self._lr, task.lr), (self._momentum, task.momentum), (self._mu, task.mu)):
            scalar.fill_(value)
        self._v.zero_()
        rule = self._rule(task.optimiser)
        for sums in () if rule is None else (rule.sums, rule.squares):
            if sums is not None:
                sums.zero_()
        start = self.objective.tensor(job.start)
        self._w.copy_(start[:n])
        self._b.copy_(start[n:])
        self._pull.zero_()
        for vector, scale in ((task.linear, 1.0), (task.anchor, -task.mu)):
            if vector is not None:
                self._pull.add_(self.objective.tensor(np.asarray(vector)[:n]), alpha=scale)

    def _current(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
