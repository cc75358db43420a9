"""What a runtime has to compute right, in an environment of its own: whole local updates against torch in float64.

Runs where our client, a runtime and pytest are installed and nothing else is: `pytest --noconftest suite.py`, with the
folder of write.py in FEDCENTERS_UPDATES.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from edge_client.engines.base import Engine, open_engine
from edge_client.protocol.messages import parse_json
from edge_client.protocol.program import MAX_PROGRAM_BYTES, Program
from edge_client.protocol.task import Array, Tensors

FOLDER = Path(os.environ["FEDCENTERS_UPDATES"])
EVALUATION = 1e-5  # one pass in float32
Trained = dict[str, Array]


@dataclass(frozen=True)
class RuntimeCase:
    """A program opened with one engine, and the arrays of its update."""

    engine: Engine
    arrays: dict[str, Array]

    def part(self, name: str) -> dict[str, Array]:
        """The arrays of one part, by their own names."""
        return {key.partition("/")[2]: value for key, value in self.arrays.items() if key.partition("/")[0] == name}

    @property
    def batches(self) -> list[dict[str, Array]]:
        """What each step reads."""
        return [self.part(str(k)) for k in range(len(self.arrays["losses"]))]

    def check(self, trained: Trained) -> None:
        """What an update ended with is what torch ended with."""
        off = relative(trained, self.part("after") | {"losses": self.arrays["losses"]})
        assert off < float(self.arrays["limit"]), off


@pytest.fixture(params=sorted(FOLDER.glob("*.npz")), ids=lambda path: path.stem)
def case(request: pytest.FixtureRequest) -> RuntimeCase:
    model, _, engine = request.param.stem.rpartition("-")
    program = Program.from_json(parse_json((FOLDER / f"{model}.json").read_bytes(), MAX_PROGRAM_BYTES))
    containers = program.containers[engine]
    files = {function: FOLDER / containers[function].sha256 for function in ("step", "evaluate")}
    return RuntimeCase(open_engine(engine, program, files), dict(np.load(request.param)))


def relative(got: Tensors, expected: Tensors) -> float:
    """The largest difference of a tensor, relative to its own largest value."""
    assert set(expected) <= set(got)
    return float(np.max([np.abs(got[n] - v).max() / max(1e-6, np.abs(v).max()) for n, v in expected.items()]))


def trained(case: RuntimeCase, lend: Callable[[Tensors], Tensors] = dict) -> Trained:
    """One update over all batches; `lend` makes the arrays that it is given, which are then dropped here."""
    given = case.part("given")
    update = case.engine.update(lend(given))
    litter = [np.full_like(value, np.nan) for value in given.values() for _ in range(4)]  # lies in memory that is free
    losses = [update.step(lend(batch)) for batch in case.batches]
    del litter
    return update.read() | {"losses": np.array(losses)}


def copied(feeds: Tensors) -> Tensors:
    """Arrays that live as long as who was given them keeps them."""
    return {name: value.copy() for name, value in feeds.items()}


def in_fortran_order(feeds: Tensors) -> Tensors:
    """The same values, column by column."""
    return {name: np.array(value, order="F") for name, value in feeds.items()}


@pytest.mark.parametrize("lend", [dict, copied, in_fortran_order])
def test_a_whole_update_with_every_term_is_torchs(case: RuntimeCase, lend: Callable[[Tensors], Tensors]) -> None:
    case.check(trained(case, lend))


def test_an_evaluation_is_torchs_and_disturbs_no_update(case: RuntimeCase) -> None:
    def looking(batches: list[dict[str, Array]]) -> Iterator[dict[str, Array]]:
        for batch in batches:
            told.append(case.engine.evaluate(case.part("asked")))
            yield batch

    told: list[dict[str, Array]] = []
    update = case.engine.update(case.part("given"))
    losses = [update.step(batch) for batch in looking(case.batches)]
    case.check(update.read() | {"losses": np.array(losses)})
    assert max(relative(each, case.part("told")) for each in told) < EVALUATION


def test_a_second_update_of_the_same_engine_starts_anew(case: RuntimeCase) -> None:
    first, second = trained(case), trained(case)
    assert all(np.array_equal(first[name], second[name]) for name in first)
