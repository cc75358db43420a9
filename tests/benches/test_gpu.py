"""The GPU bench says that it needs one; its loop is the objective's; its arithmetic is right."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from coordinator.models.registry import build_model
from emulator.engines.autotune import Workload, random_jobs
from emulator.engines.gpu.stacked import StackedRecipe
from tests.benches.cuda_parts import clustering_row, convolution_row, stacked_row, step_row
from tests.benches.gpu import REPEATS, Contestant, differences, loop, race, row


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("bench", ["gpu", "cuda_parts"])
def test_without_cuda_it_says_so_prints_no_figure_and_exits_with_3(bench: str) -> None:
    done = subprocess.run([sys.executable, "-m", f"tests.benches.{bench}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "")
    assert "nothing was measured" in done.stderr


def test_its_loop_gives_the_updates_that_our_engines_give() -> None:
    model = build_model("digits-mlp", seed=0)
    learner = StackedRecipe(model=model, device="cpu").open()
    jobs = random_jobs(model, learner.program, Workload(clients=3, steps=4, batch=8))
    for job, plain, ours in zip(jobs, loop(model, jobs, torch.device("cpu")), learner.train(jobs), strict=True):
        update = np.linalg.norm(plain - job.start)
        assert np.linalg.norm(plain - ours.vector) < 1e-3 * update  # float32; four small steps


def test_the_rows_of_what_else_runs_on_cuda_compare_equal_numbers() -> None:
    """Here on the CPU."""
    cpu = torch.device("cpu")
    assert float(clustering_row(20, 50, "torch-cpu").split("|")[-2]) < 1e-6
    assert float(convolution_row(2, (1, 2, 6, 3, 1), cpu).split("|")[-2]) < 1e-5
    assert stacked_row("digits-mlp", 2, cpu).startswith("| digits-mlp | 2 | ")
    assert [cell.strip() for cell in step_row("digits-mlp", cpu).split("|")][1] == "digits-mlp"


class RaceClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def contestant(self, *, clients: int, seconds: float, value: float = 1.0) -> Contestant:
        def turn() -> None:
            self.now += seconds

        return Contestant(clients=clients, turn=turn, first=lambda: np.full(2, value))


def test_a_turn_is_clients_over_seconds() -> None:
    clock = RaceClock()
    some = {"loop": clock.contestant(clients=3, seconds=1.5), "other": clock.contestant(clients=8, seconds=0.5)}
    assert race(some, seconds=1e9, clock=clock) == {"loop": [2.0] * REPEATS, "other": [16.0] * REPEATS}


def test_it_ends_in_time_with_a_turn_of_each_at_least() -> None:
    clock = RaceClock()
    some = {"loop": clock.contestant(clients=1, seconds=6.0), "other": clock.contestant(clients=1, seconds=4.0)}
    assert [len(turns) for turns in race(some, seconds=50.0, clock=clock).values()] == [4, 4]
    assert clock.now <= 50.0
    assert [len(turns) for turns in race(some, seconds=1.0, clock=clock).values()] == [1, 1]


def test_a_contestant_whose_update_is_another_one_gets_no_figure() -> None:
    clock = RaceClock()
    some = {
        "loop": clock.contestant(clients=1, seconds=1.0),
        "fast": clock.contestant(clients=1, seconds=1.0, value=1.01),
        "wrong": clock.contestant(clients=1, seconds=1.0, value=2.0),
        "broken": clock.contestant(clients=1, seconds=1.0, value=float("nan")),
    }
    errors = differences(some, np.zeros(2))
    speeds = {"loop": [2.0, 1.0, 9.0], "fast": [25.0] * 3, "wrong": [9.0] * 3, "broken": [9.0] * 3}
    assert row("m", speeds, errors) == "| m | 2 (1.0x) | 25 (12.5x) | wrong by 1e+00 | wrong by nan | 3 |"
