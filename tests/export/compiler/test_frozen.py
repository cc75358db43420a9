"""Frozen parameters are one file beside the containers, and every engine computes with what it holds."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edge_client.engines.base import open_engine, ports_by_role, run_step
from edge_client.engines.frozen import open_frozen
from edge_client.engines.golden_run import golden_inputs
from edge_client.errors import ProgramRefused
from edge_client.protocol.program import FROZEN, Program
from export.compiler.program import CompilerOutput, compile_program, make_source

SILENT = lambda _: None  # noqa: E731 - a listener


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter, as LoRA's; the base is tied to the output layer."""

    def __init__(self, rank: int = 2, seed: int = 0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw) * 0.3

        self.base = nn.Parameter(noise(12, 12), requires_grad=False)
        self.unused = nn.Parameter(noise(3), requires_grad=False)
        self.a, self.b = nn.Parameter(noise(rank, 12)), nn.Parameter(noise(12, rank))
        self.head = nn.Linear(12, 4)
        self.tied = self.base

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(x @ self.base.t() + (x @ self.a.t()) @ self.b.t())
        out: Tensor = self.head(hidden @ self.tied.t())
        return out


def compiled(module: nn.Module, engines: tuple[str, ...] = ("onnx", "litert", "pt2"), **more: str) -> CompilerOutput:
    return compile_program(module, (12,), batch=8, engines=engines, progress=SILENT, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def adapted() -> CompilerOutput:
    return compiled(Adapted())


def paths(made: CompilerOutput, engine: str, folder: Path) -> dict[str, Path]:
    out = {}
    for name, file in made.program.containers[engine].items():
        out[name] = folder / f"{engine}-{name}"
        out[name].write_bytes(made.files[file.sha256])
    return out


def test_onnx_and_pt2_share_one_file_of_frozen_parameters_and_litert_holds_its_own(adapted: CompilerOutput) -> None:
    held = {engine: files.get(FROZEN) for engine, files in adapted.program.containers.items()}
    assert held["onnx"] == held["pt2"] is not None
    assert held["litert"] is None
    assert adapted.program.frozen is not None
    assert [(t.name, t.shape) for t in adapted.program.frozen.tensors] == [("base", (12, 12)), ("unused", (3,))]


def test_only_the_trained_parameters_are_ports(adapted: CompilerOutput) -> None:
    moved = [p.name for p in ports_by_role(adapted.program.functions["step"])[0] if p.name.startswith("w/")]
    assert moved == ["w/a", "w/b", "w/head.weight", "w/head.bias"]


@pytest.mark.parametrize("engine", ["onnx", "pt2"])
def test_no_container_holds_the_base(adapted: CompilerOutput, engine: str) -> None:
    base = Adapted().base.detach().numpy().tobytes()
    for name, file in adapted.program.containers[engine].items():
        assert (base in adapted.files[file.sha256]) == (name == FROZEN), name


def test_models_with_other_adapters_share_the_base(adapted: CompilerOutput) -> None:
    other = compiled(Adapted(rank=3), engines=("onnx",))
    assert other.program.schema != adapted.program.schema
    assert other.program.containers["onnx"][FROZEN] == adapted.program.containers["onnx"][FROZEN]


def test_models_with_other_bases_share_the_containers(adapted: CompilerOutput) -> None:
    other = compiled(Adapted(seed=1), engines=("onnx",)).program.containers["onnx"]
    mine = adapted.program.containers["onnx"]
    assert other[FROZEN] != mine[FROZEN]
    assert [other[f] for f in ("step", "evaluate", "infer")] == [mine[f] for f in ("step", "evaluate", "infer")]


@pytest.mark.parametrize("codec", ["f16", "i8"])
def test_a_smaller_file_trains_with_what_it_holds(codec: str, tmp_path: Path) -> None:
    made = compiled(Adapted(), frozen=codec)  # compared with torch as it is compiled
    stored = open_frozen(made.program, paths(made, "onnx", tmp_path))["frozen/base"]
    far = np.abs(stored - Adapted().base.detach().numpy()).max()
    assert 0 < far < {"f16": 1e-3, "i8": 1e-2}[codec]
    steps = {engine: _one_step(made, engine, tmp_path) for engine in ("onnx", "litert", "pt2")}
    for engine in ("litert", "pt2"):
        for name, value in steps["onnx"].items():
            np.testing.assert_allclose(steps[engine][name], value, rtol=1e-4, atol=1e-5, err_msg=f"{engine} {name}")


def _one_step(made: CompilerOutput, engine: str, folder: Path) -> dict[str, np.ndarray]:
    opened = open_engine(engine, made.program, paths(made, engine, folder), device="cpu")
    run = golden_inputs(made.program, made.program.golden["litert"], fixed=True)
    return run_step(opened, {**run.start, **run.steps[0]})


def test_the_manifest_says_what_is_frozen(adapted: CompilerOutput) -> None:
    told = adapted.program.to_json()
    assert told["frozen"] == [["base", [12, 12]], ["unused", [3]]]
    assert Program.from_json(told) == adapted.program


def test_an_open_base_is_held_once(adapted: CompilerOutput, tmp_path: Path) -> None:
    files = paths(adapted, "onnx", tmp_path)
    first = open_frozen(adapted.program, files)
    os.utime(files[FROZEN], (1, 1))  # as a folder of blobs marks what was used last
    second = open_frozen(adapted.program, files)
    assert first is second
    assert np.shares_memory(first["frozen/base"], second["frozen/base"])


def test_a_file_of_other_tensors_is_refused(adapted: CompilerOutput, tmp_path: Path) -> None:
    class Wider(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.head = nn.Linear(12, 5).requires_grad_(False), nn.Linear(5, 2)  # noqa: FBT003 - torch's own

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.base(x))
            return out

    other = compiled(Wider(), engines=("onnx",))
    files = paths(adapted, "onnx", tmp_path)
    files[FROZEN].write_bytes(other.files[other.program.containers["onnx"][FROZEN].sha256])
    with pytest.raises(ProgramRefused, match="schema"):
        open_engine("onnx", adapted.program, files, device="cpu")


def test_the_file_is_named_by_its_hash(adapted: CompilerOutput) -> None:
    file = adapted.program.containers["onnx"][FROZEN]
    assert hashlib.sha256(adapted.files[file.sha256]).hexdigest() == file.sha256
    assert file.manifest(FROZEN, 65_536).kind == FROZEN


def test_a_mask_of_infinities_is_a_constant_and_no_frozen_parameter() -> None:
    module = Adapted()
    module.mask = nn.Parameter(torch.full((3, 3), -torch.inf).triu(1), requires_grad=False)
    source = make_source(module, input=(12,))
    assert "mask" not in source.frozen_names
    assert torch.equal(source.constants["mask"], module.mask)
