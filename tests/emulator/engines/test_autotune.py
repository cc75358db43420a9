"""The choice of an engine is arithmetic on a clock that the test holds, and real where engines are real."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.models.registry import build_model
from edge_client.errors import ProgramRefused, RuntimeMissing
from edge_client.training.learner import Learner, TrainedModel, TrainingJob
from emulator.engines.autotune import (
    EngineCandidate,
    EngineCost,
    Workload,
    candidates,
    cheapest_engine,
    choose_engine,
    measure_engine,
    random_jobs,
)
from emulator.engines.cpu.cpu_engine import CpuRecipe, cpu_recipe
from emulator.engines.gpu.stacked import StackedRecipe
from export.compiler.program import make_source, program_without_containers

MODEL = build_model("digits-mlp", seed=0)
SMALL = Workload(clients=3, steps=2, batch=4)


@dataclass
class WorkClock:
    """Moves when somebody works."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Timed:
    """A recipe and its learner, whose n-th training takes `takes(n)` seconds per client."""

    clock: WorkClock
    takes: Callable[[int], float]
    done: list[int] = field(default_factory=list)  # clients of each training

    def open(self) -> Learner:
        return self  # type: ignore[return-value]  # all that a calibration asks of one

    @property
    def program(self) -> object:
        return program_without_containers(make_source(MODEL.module, input=MODEL.input, target=(10,)))

    def train(self, jobs: Sequence[TrainingJob]) -> Iterator[TrainedModel]:
        self.clock.now += self.takes(len(self.done)) * len(jobs)
        self.done.append(len(jobs))
        return iter(())


@dataclass
class Refusing:
    wrong: Exception

    def open(self) -> Learner:
        raise self.wrong


def cost_of(recipe: Timed, *, processes: int = 1, seconds: float = 1.0) -> float | None:
    candidate = EngineCandidate(recipe=recipe, processes=processes)
    return measure_engine(recipe.open(), candidate, MODEL, SMALL, seconds=seconds, clock=recipe.clock).seconds


def test_the_first_training_counts_for_nothing() -> None:
    assert cost_of(Timed(WorkClock(), lambda n: 0.1 if n else 50.0)) == pytest.approx(0.1)


def test_a_slow_moment_does_not_count() -> None:
    recipe = Timed(WorkClock(), lambda n: 9.0 if n == 4 else 0.1)
    assert cost_of(recipe, seconds=40.0) == pytest.approx(0.1)


def test_a_slow_engine_trains_one_client_three_times_and_no_more() -> None:
    recipe = Timed(WorkClock(), lambda _: 60.0)
    assert cost_of(recipe) == pytest.approx(60.0)
    assert recipe.done == [1, 1, 1]


def test_a_fast_engine_trains_all_clients_at_once_for_as_long_as_was_said() -> None:
    recipe = Timed(WorkClock(), lambda _: 0.01)
    cost_of(recipe, seconds=1.0)
    assert recipe.done[:5] == [1, 1, 2, 3, 3]
    assert recipe.clock.now == pytest.approx(1.0, abs=0.03)


@given(per_client=st.floats(0.01, 1e3), seconds=st.floats(0.01, 2.0))
@settings(max_examples=30)
def test_a_calibration_ends_in_time_or_after_three_trainings_of_one_client(per_client: float, seconds: float) -> None:
    recipe = Timed(WorkClock(), lambda _: per_client)
    assert cost_of(recipe, seconds=seconds) == pytest.approx(per_client)
    assert recipe.clock.now <= seconds + recipe.done[-1] * per_client or recipe.done == [1, 1, 1]


def test_processes_divide_the_cost() -> None:
    assert cost_of(Timed(WorkClock(), lambda _: 0.1), processes=3) == pytest.approx(0.1 / 3)


@given(costs=st.dictionaries(st.text(min_size=1), st.one_of(st.none(), st.floats(1e-9, 1e9)), min_size=1))
def test_nothing_that_was_timed_is_cheaper_than_the_choice(costs: dict[str, float | None]) -> None:
    known = {name: EngineCost(seconds=value, reason="is not there") for name, value in costs.items()}
    timed = [value for value in costs.values() if value is not None]
    if timed:
        assert costs[cheapest_engine(known)] == min(timed)
    else:
        with pytest.raises(RuntimeMissing, match="is not there"):
            cheapest_engine(known)


def test_the_cheapest_that_can_run_is_chosen_and_all_are_named(caplog: pytest.LogCaptureFixture) -> None:
    clock = WorkClock()
    slow, fast = Timed(clock, lambda _: 1.0), Timed(clock, lambda _: 0.1)
    some = {
        "slow": EngineCandidate(recipe=slow),
        "absent": EngineCandidate(recipe=Refusing(RuntimeMissing("is not installed", hint="install it"))),
        "unable": EngineCandidate(recipe=Refusing(ProgramRefused("cannot do this model"))),
        "fast": EngineCandidate(recipe=fast),
    }
    with caplog.at_level(logging.INFO):
        name, recipe = choose_engine(MODEL, some, workload=SMALL, clock=clock)
    assert (name, recipe) == ("fast", fast)
    told = "slow 1e+03 ms per update; absent is not installed; unable cannot do this model; fast 100 ms per update"
    assert caplog.messages == [f"engine fast for model digits-mlp: {told}"]


@dataclass
class Failing(Timed):
    """Opens, and fails when it trains, as an engine does whose recording CUDA refuses."""

    wrong: Exception = field(default_factory=RuntimeError)

    def train(self, jobs: Sequence[TrainingJob]) -> Iterator[TrainedModel]:
        raise self.wrong


@pytest.mark.parametrize(
    "broken",
    [
        Failing(WorkClock(), lambda _: 1.0, wrong=RuntimeError("CUDA error: operation not permitted\nwhen capturing")),
        Refusing(RuntimeError("CUDA error: operation not permitted\nwhen capturing")),
    ],
    ids=["while it trains", "when it opens"],
)
def test_an_engine_that_fails_in_its_trial_is_left_out_with_its_reason(
    broken: Failing | Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    clock = WorkClock()
    well = Timed(clock, lambda _: 0.1)
    some = {"broken": EngineCandidate(recipe=broken), "well": EngineCandidate(recipe=well)}
    with caplog.at_level(logging.INFO):
        name, recipe = choose_engine(MODEL, some, workload=SMALL, clock=clock)
    assert (name, recipe) == ("well", well)
    reason = "failed in its trial: RuntimeError: CUDA error: operation not permitted"
    assert caplog.messages[0] == f"engine broken {reason}"
    assert caplog.messages[1].startswith(f"engine well for model digits-mlp: broken {reason}; well ")


def test_where_every_engine_fails_all_reasons_are_told() -> None:
    some = {
        "first": EngineCandidate(recipe=Failing(WorkClock(), lambda _: 1.0, wrong=torch.OutOfMemoryError("no memory"))),
        "second": EngineCandidate(recipe=Failing(WorkClock(), lambda _: 1.0, wrong=ZeroDivisionError("by zero"))),
    }
    with pytest.raises(
        RuntimeMissing, match=r"first failed in its trial: OutOfMemoryError: no memory; second .*by zero"
    ):
        choose_engine(MODEL, some, workload=SMALL, clock=WorkClock())


@pytest.mark.parametrize("name", ["digits-mlp", "linear-regression"])
def test_made_up_devices_train_in_whole_batches(name: str) -> None:
    model = build_model(name, seed=0)
    recipe = StackedRecipe(model=model, device="cpu")
    jobs = random_jobs(model, recipe.open().program, SMALL)
    assert [[len(index) for index in job.batches] for job in jobs] == [[4, 4]] * 3
    assert len(list(recipe.open().train(jobs))) == 3


def test_the_only_engine_that_can_run_is_not_timed(caplog: pytest.LogCaptureFixture) -> None:
    recipe = Timed(WorkClock(), lambda _: 1.0)
    absent = EngineCandidate(recipe=Refusing(RuntimeMissing("finds no device")))
    with caplog.at_level(logging.INFO):
        name, _ = choose_engine(MODEL, {"absent": absent, "here": EngineCandidate(recipe=recipe)}, clock=recipe.clock)
    assert (name, recipe.done) == ("here", [])
    assert caplog.messages == ["engine here for model digits-mlp: absent finds no device; here is the only one left"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_the_lean_loop_is_chosen() -> None:
    name, recipe = choose_engine(MODEL, candidates(MODEL))
    assert name == "lean"
    assert isinstance(recipe, CpuRecipe)


def test_real_engines_are_timed_with_a_real_clock() -> None:
    some = {
        "lean": EngineCandidate(recipe=cpu_recipe(MODEL)),
        "stacked": EngineCandidate(recipe=StackedRecipe(model=MODEL, device="cpu")),
    }
    name, recipe = choose_engine(MODEL, some, workload=SMALL, seconds=0.01)
    assert recipe is some[name].recipe
