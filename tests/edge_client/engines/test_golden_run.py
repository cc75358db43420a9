"""The golden run: right runtimes pass it by orders of magnitude, and wrong ones miss it by as much."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.engines.base import FIXED_ROLES, Engine, open_engine
from edge_client.engines.golden_run import POOL, Numbers, golden_inputs, run_golden
from edge_client.engines.onnx import OnnxUpdate
from edge_client.errors import ProgramRefused, RuntimeMissing
from edge_client.protocol.program import ENGINES, Program
from edge_client.protocol.task import Array
from edge_client.runtime.golden_results import require_golden
from export.compiler.golden_run import TOLERANCE, check_golden
from tests.edge_client.engines.broken import break_engine
from tests.support.programs import BATCH, compiled

RIGHT = TOLERANCE / 50  # seen: 1e-7 to 3e-5 over all models of the registry and tests/support/architectures.py
WRONG = TOLERANCE * 5  # seen: 0.1 and more for every term that is gone
each_engine = pytest.mark.parametrize("engine", ENGINES)


@cache
def program() -> Program:
    return compiled("digits-mlp").program


def opened(engine: str, folder: Path) -> Engine:
    made = compiled("digits-mlp")
    path = folder / engine
    path.write_bytes(made.files[made.program.containers[engine]["step"].sha256])
    return open_engine(engine, made.program, {"step": path}, device="cpu")


@each_engine
def test_a_right_runtime_is_far_below_the_tolerance_each_time(engine: str, tmp_path: Path) -> None:
    here, golden = opened(engine, tmp_path), program().golden[engine]
    first = run_golden(here, program(), golden)
    assert first < RIGHT
    seen = list[int]()
    assert run_golden(here, program(), golden, between=lambda: seen.append(1)) == first
    assert len(seen) == len(golden.losses)


@each_engine
@pytest.mark.parametrize("group", FIXED_ROLES)
@pytest.mark.parametrize("by", ["zero", "noise"])
def test_what_is_overwritten_after_it_was_lent_is_found(
    engine: str, group: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.default_rng(1)
    break_engine(
        monkeypatch, engine, group, lambda a: np.zeros_like(a) if by == "zero" else noise.standard_normal(a.shape)
    )
    assert not run_golden(opened(engine, tmp_path), program(), program().golden[engine]) < WRONG


def test_memory_that_is_read_after_it_was_freed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An onnxruntime below 1.30, which holds no array that it reads, under an engine that holds none either."""
    from_numpy, begin = onnxruntime.OrtValue.ortvalue_from_numpy, OnnxUpdate.__init__

    def forgetful(array: Array, *place: object) -> object:
        value = from_numpy(array, *place)
        value._numpy_obj = None
        return value

    def without_hold(self: OnnxUpdate, *given: Any) -> None:  # noqa: ANN401 - as it is called
        begin(self, *given)
        self._lent.clear()

    assert run_golden(opened("onnx", tmp_path), program(), program().golden["onnx"]) < RIGHT
    monkeypatch.setattr(onnxruntime.OrtValue, "ortvalue_from_numpy", staticmethod(forgetful))
    assert run_golden(opened("onnx", tmp_path), program(), program().golden["onnx"]) < RIGHT
    monkeypatch.setattr(OnnxUpdate, "__init__", without_hold)
    assert not run_golden(opened("onnx", tmp_path), program(), program().golden["onnx"]) < WRONG


@each_engine
def test_numbers_that_are_not_finite_are_infinitely_wrong(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_engine(monkeypatch, engine, "lr", lambda a: np.full_like(a, np.nan))
    assert run_golden(opened(engine, tmp_path), program(), program().golden[engine]) == np.inf


@each_engine
def test_weights_that_are_not_finite_after_the_last_step_are_wrong_beside_right_losses(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, golden = opened(engine, tmp_path), program().golden[engine]
    kind = type(here.update(golden_inputs(program(), golden, fixed=here.fixed_batch is not None).start))
    read = kind.read
    monkeypatch.setattr(kind, "read", lambda self: {name: value * np.nan for name, value in read(self).items()})
    assert run_golden(here, program(), golden) == np.inf


@each_engine
def test_a_command_that_trains_refuses_a_wrong_runtime_with_its_version_and_what_to_do(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_golden(opened(engine, tmp_path), program())
    require_golden(opened(engine, tmp_path), replace(program(), golden={}))
    break_engine(monkeypatch, engine, "linear", np.zeros_like)
    with pytest.raises(RuntimeMissing, match=r"[0-9.]+.* computes wrongly on cpu: [\s\S]*hint: install another"):
        require_golden(opened(engine, tmp_path), program())


@settings(deadline=None, max_examples=40)  # one process compiles first
@given(
    group=st.sampled_from(FIXED_ROLES),
    share=st.one_of(st.floats(-1e3, 0.5, allow_subnormal=False), st.floats(1.5, 1e3)),
)
def test_a_term_that_is_half_as_large_again_is_found_whatever_the_term(
    tmp_path_factory: pytest.TempPathFactory, group: str, share: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        break_engine(patch, "onnx", group, lambda a: a * np.float32(share))
        found = run_golden(opened("onnx", tmp_path_factory.mktemp("law")), program(), program().golden["onnx"])
    assert not found < WRONG


@given(seed=st.integers(0, 2**53 - 1), sizes=st.lists(st.integers(1, 2 * POOL), min_size=1, max_size=4))
@settings(deadline=None)
def test_drawn_numbers_are_one_list_read_again_and_again(seed: int, sizes: list[int]) -> None:
    stream = np.random.Generator(np.random.PCG64(seed)).random(POOL, dtype=np.float32)
    numbers = Numbers(seed)
    read = np.concatenate([numbers.fill((size,), "float32", lambda u, _: u) for size in sizes])
    assert np.array_equal(read, stream[np.arange(len(read)) % POOL])


@pytest.mark.parametrize("fixed", [True, False])
def test_the_last_step_has_fewer_samples(fixed: bool) -> None:  # noqa: FBT001 - a parameter
    golden = program().golden["litert" if fixed else "onnx"]
    steps = golden_inputs(program(), golden, fixed=fixed).steps
    assert {len(step["x"]) for step in steps[:-1]} == {golden.batch}
    assert len(steps[-1]["x"]) == (golden.batch if fixed else 5 * BATCH // 8)
    assert np.count_nonzero(steps[-1]["q"]) == 5 * BATCH // 8


def test_a_container_of_another_computation_is_refused_by_the_compiler() -> None:
    made = compiled("digits-mlp")
    right = made.files[made.program.containers["onnx"]["step"].sha256]
    assert check_golden(made.program, "onnx", {"step": right}) < RIGHT
    proto = onnx.load_model_from_string(right)
    for node in proto.graph.node:
        for at, name in enumerate(node.input):
            if name == "mu":
                node.input[at] = "momentum"
    with pytest.raises(ProgramRefused, match=r"'digits-mlp' on onnx is \S+ off in 10 steps, at most 1e-02"):
        check_golden(made.program, "onnx", {"step": proto.SerializeToString()})
