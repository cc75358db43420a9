"""compile_program: what it writes, what it leaves alone, what it refuses; vectors and schemas."""

from __future__ import annotations

import copy
import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edge_client.data.dataset import Dataset
from edge_client.engines.base import open_engine
from edge_client.errors import Malformed, ProgramRefused, UsageError
from edge_client.protocol.messages import canonical_json, parse_json
from edge_client.protocol.program import FUNCTIONS, MAX_PROGRAM_BYTES, Program
from edge_client.protocol.task import Fit
from edge_client.training.fit_probe import run_fit
from edge_client.training.learner import EngineLearner
from export.bundle.bundle_contents import BundleSource
from export.bundle.writer import write_bundle
from export.compiler.program import CompilerOutput, compile_program, load_vector, make_source, schema_of, vector_of
from export.diagnostics import first_sentence
from tests.support.programs import BATCH, compiled, model, opened


def compile_small(module: nn.Module, **settings: Any) -> None:  # noqa: ANN401 - compile_program's own
    usual: dict[str, Any] = {"input": (6,), "engines": ("pt2",)}
    compile_program(module, **usual | settings)


def test_every_container_is_there_under_its_hash_and_nothing_else() -> None:
    made = compiled("digits-mlp")
    named = {c.sha256: c.size for files in made.program.containers.values() for c in files.values()}
    assert {sha: len(data) for sha, data in made.files.items()} == named
    assert all(hashlib.sha256(data).hexdigest() == sha for sha, data in made.files.items())
    assert all(set(files) == set(FUNCTIONS) for files in made.program.containers.values())


def test_one_tflite_file_holds_every_function() -> None:
    assert len({c.sha256 for c in compiled("digits-mlp").program.containers["litert"].values()}) == 1


def test_only_litert_fixes_the_batch() -> None:
    assert compiled("digits-mlp").program.batch == {"onnx": "any", "litert": BATCH, "pt2": "any"}


def test_compiling_leaves_the_module_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
    before = copy.deepcopy(module.state_dict())
    compile_small(module)
    assert not module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_batch_of_samples_is_enough_to_compile_for() -> None:
    program = compile_program(nn.Linear(6, 3), torch.zeros(5, 6), engines=("pt2",)).program
    assert (program.model, program.input, program.target, program.classes) == ("Linear", (6,), (3,), 3)


@pytest.fixture(scope="module")
def grid() -> CompilerOutput:
    """Six numbers in, a table of 3 x 4 out."""
    module = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Unflatten(1, (3, 4)))
    return compile_program(module, (6,), target=(3, 4), loss="squared-error", engines=("onnx",))


def test_targets_of_any_shape_are_in_the_manifest_and_survive_the_wire(grid: CompilerOutput) -> None:
    assert Program.from_json(parse_json(canonical_json(grid.program.to_json()), MAX_PROGRAM_BYTES)).target == (3, 4)
    assert next(p.shape for p in grid.program.functions["step"].inputs if p.name == "y") == ("batch", 3, 4)


def test_a_device_trains_towards_targets_of_that_shape_and_refuses_others(grid: CompilerOutput, tmp_path: Path) -> None:
    rng, program = np.random.default_rng(0), grid.program
    x = rng.standard_normal((32, 6)).astype(np.float32)
    data = Dataset(x, np.tanh(x @ rng.standard_normal((6, 12))).astype(np.float32).reshape(32, 3, 4))
    start = 0.1 * rng.standard_normal(program.schema.size).astype(np.float32)
    engine = opened(grid, "onnx", tmp_path)
    task = Fit(start=start, steps=60, lr=0.5, momentum=0.9, batch=8, seed=0)
    before, after = (
        float(EngineLearner(engine, program).evaluate([model], data, batch=8)[0].mean())
        for model in (start, run_fit(EngineLearner(engine, program), task, data).vector)
    )
    assert after < 0.5 * before
    with pytest.raises(Malformed, match=r"targets of shape \[12\], the program reads \[3, 4\]"):
        run_fit(EngineLearner(engine, program), task, Dataset(x, data.y.reshape(32, 12)))


def test_a_schema_has_parameters_then_buffers_and_no_integers() -> None:
    schema = schema_of(model("wecfl-cnn").module)
    assert "".join(t.role for t in schema.tensors) == "p" * 10 + "b" * 4
    assert not any("num_batches" in t.name for t in schema.tensors)
    assert schema.n_params == 29_034


@pytest.mark.parametrize(
    ("name", "classifier"),
    [
        ("digits-mlp", ("3.weight", "3.bias")),
        ("wecfl-cnn", ("9.weight", "9.bias")),
        ("gn-cnn", ("head.weight", "head.bias")),
    ],
)
def test_the_classifier_is_the_last_linear_layer(name: str, classifier: tuple[str, ...]) -> None:
    assert schema_of(model(name).module).classifier == classifier


@pytest.mark.parametrize("name", ["digits-mlp", "wecfl-cnn", "gn-cnn"])
def test_a_vector_put_in_comes_out_again(name: str) -> None:
    module = copy.deepcopy(model(name).module)
    schema = schema_of(module)
    vector = np.random.default_rng(0).random(schema.size, dtype=np.float32)
    load_vector(module, schema, vector)
    assert np.array_equal(vector_of(module, schema), vector)


def test_a_vector_does_not_share_memory_with_the_module() -> None:
    module = nn.Linear(6, 3)
    vector_of(module, schema_of(module))[:] = 7.0
    assert not torch.any(module.weight == 7.0)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ProgramRefused, match="every parameter is frozen"):
        compile_small(nn.Linear(6, 3).requires_grad_(False))  # noqa: FBT003 - torch's own


def test_a_frozen_last_layer_is_no_classifier() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3).requires_grad_(False))  # noqa: FBT003 - torch's own
    assert schema_of(module).classifier == ("0.weight", "0.bias")


def test_a_shared_weight_travels_once_and_the_classifier_knows_it_by_its_first_name() -> None:
    schema = schema_of(model("tied-embedding").module)
    assert [t.name for t in schema.tensors] == ["tokens.weight", "mix.weight", "mix.bias", "out.bias"]
    assert schema.classifier == ("tokens.weight", "out.bias")


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min])
def test_a_mask_of_infinities_stays_at_home_too(hidden: float) -> None:
    layer = nn.Linear(4, 3)
    layer.register_buffer("mask", torch.full((4, 4), hidden).triu(1))
    layer.register_buffer("slopes", torch.full((4,), -1e9))
    assert [t.name for t in schema_of(layer).tensors] == ["weight", "bias", "slopes"]


def test_buffers_that_torch_does_not_save_or_that_are_integers_stay_at_home() -> None:
    schema = schema_of(model("several-buffers").module)
    assert [t.name for t in schema.tensors if t.role == "b"] == ["largest", "mean", "scale"]


class PassCounting(nn.Module):
    """Counts its passes in an integer, which no step gives back."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.head = nn.Linear(6, 3)
        self.passes: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.head(x)  # type: ignore[no-any-return]


def test_a_written_integer_buffer_is_refused_by_name() -> None:
    with pytest.raises(ProgramRefused, match="writes passes"):
        compile_small(PassCounting())


class AskingForTheBatch(nn.Module):
    """Normalises only what it can; `when`: whether it asks in training or in inference."""

    def __init__(self, *, when: bool) -> None:
        super().__init__()
        self.norm, self.head, self.when = nn.BatchNorm1d(6), nn.Linear(6, 3), when

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training != self.when or x.shape[0] > 1:
            x = self.norm(x) + 1
        return self.head(x)  # type: ignore[no-any-return]


class Squeezing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x[:, None]).squeeze()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "seed", "told"),
    [
        (lambda: AskingForTheBatch(when=True), 0, "computes a batch of one sample in another way"),
        (lambda: AskingForTheBatch(when=True), 1, "computes a batch of one sample in another way"),
        (lambda: AskingForTheBatch(when=False), 0, "answers one sample alone in another way"),
        (Squeezing, 0, r"gives \(3,\) for one sample, expected \(1, 3\)"),
    ],
    ids=["training", "training, alike on the first sample", "inference", "squeeze"],
)
def test_a_model_that_does_otherwise_with_one_sample_is_refused(
    make: Callable[[], nn.Module], seed: int, told: str
) -> None:
    torch.manual_seed(seed)
    with pytest.raises(ProgramRefused, match=told) as refused:
        compile_small(make())
    assert "batch size" in refused.value.hint


class TakingTwo(nn.Linear):
    """Trains on no batch of one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and x.shape[0] < 2:
            raise ValueError("two samples at least")
        return super().forward(x)


@pytest.mark.parametrize("module", [nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)), TakingTwo(6, 3)])
def test_a_model_that_always_normalises_has_a_program_and_so_has_one_that_refuses_one_sample(module: nn.Module) -> None:
    compile_small(module)


def test_a_model_whose_answers_depend_on_the_company_of_a_sample_is_refused() -> None:
    for seed in range(8):
        torch.manual_seed(seed)
        with pytest.raises(ProgramRefused, match="other company"):
            compile_small(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, track_running_stats=False)))


class Overflowing(nn.Linear):
    """As a mask that adds the least number of its dtype twice."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(super().forward(x) + 2 * torch.finfo(x.dtype).min, -1)


def test_a_model_whose_values_are_not_finite_is_refused_as_that() -> None:
    with pytest.raises(ProgramRefused, match="gives values that are not finite, in float32"):
        compile_small(Overflowing(6, 3))


def test_a_wrong_input_shape_is_refused_with_torchs_reason() -> None:
    with pytest.raises(ProgramRefused, match="does not take samples of shape"):
        compile_small(nn.Linear(6, 3), input=(5,))


class OwnTable(nn.Module):
    """A table of tokens that is no nn.Embedding."""

    def __init__(self, *, indexed: bool) -> None:
        super().__init__()
        self.indexed, self.table, self.head = indexed, nn.Parameter(torch.randn(9, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.long()
        h = self.table[12 * x] if self.indexed else nn.functional.embedding(x, self.table)
        return self.head(h.mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("indexed", [True, False])
def test_tokens_of_a_table_of_ones_own_can_be_given_by_name_as_the_refusal_says(*, indexed: bool) -> None:
    module = OwnTable(indexed=indexed)
    with pytest.raises(ProgramRefused, match=r"does not take samples[\s\S]*hint: samples are drawn[\s\S]*by the name"):
        compile_small(module)
    tokens = np.arange(18).reshape(3, 6) % (1 if indexed else 9)
    made = compile_program(module, {"x": tokens}, classes=3, batch=4, engines=("pt2",))
    assert [part.below for part in made.program.parts] == [1 if indexed else 9]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("module", "told", "hint"),
    [
        (Words(), "scalar types: Long", r"write x\.long\(\) in forward, or give a batch of them by the name"),
        (nn.Sequential(nn.LazyLinear(3)), r"has a lazy layer: 0\.weight", "on a batch once"),
        (nn.Linear(6, 3, device="meta"), "has no numbers: weight is on the device meta", r"to_empty\(device='cpu'\)"),
        (nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)), r"gives \(2,\) for 2 samples", r"is \[batch, 1\]"),
        (nn.Linear(6, 1), "with one class the cross-entropy is always 0", "two outputs"),
        (nn.Conv1d(6, 1, 1), "with one class", "two outputs"),
    ],
    ids=["whole-numbers", "lazy", "meta", "no-axis", "one-logit", "one-class-per-place"],
)
def test_a_usual_mistake_is_refused_with_what_to_write(module: nn.Module, told: str, hint: str) -> None:
    with pytest.raises(ProgramRefused, match=rf"{told}[\s\S]*hint: [\s\S]*{hint}"):
        compile_small(module, input=(6, 6) if isinstance(module, nn.Conv1d) else (6,))


def test_probabilities_in_the_place_of_logits_are_told() -> None:
    with pytest.warns(UserWarning, match="gives probabilities, and cross-entropy takes logits"):
        compile_small(nn.Sequential(nn.Linear(6, 3), nn.Softmax(-1)))


@pytest.mark.parametrize("batch", [0, -1, 1 << 20])
def test_a_batch_size_that_cannot_be_is_refused(batch: int) -> None:
    with pytest.raises(UsageError, match="from 1 to 65536"):
        compile_small(nn.Linear(6, 3), batch=batch, engines=("litert",))


def test_a_wrong_number_of_classes_is_refused_with_both_shapes() -> None:
    with pytest.raises(ProgramRefused, match=r"gives \(2, 3\).*expected \(2, 10\)"):
        compile_small(nn.Linear(6, 3), classes=10)


def test_an_exporters_error_is_told_without_colours_and_the_paths_of_this_machine() -> None:
    text = '  File "/usr/lib/site-packages/a.py", line 3, in f\nsite/packages/b.py:7: \x1b[96merror\x1b[0m: '
    text += "no lowering for aten.sort"
    assert first_sentence(RuntimeError(text)) == "error: no lowering for aten.sort"


def test_float64_for_litert_is_refused() -> None:
    with pytest.raises(ProgramRefused, match="float64"):
        compile_small(nn.Linear(6, 3), dtype="float64", engines=("litert",))


def test_an_unknown_engine_is_named_with_those_that_exist() -> None:
    with pytest.raises(UsageError, match=r"tvm[\s\S]*onnx, litert, pt2"):
        compile_small(nn.Linear(6, 3), engines=("tvm",))


def test_compiling_writes_nothing_to_stdout_or_stderr() -> None:
    code = """
from torch import nn
from export.compiler.program import compile_program
compile_program(nn.Linear(6, 3), name="mine", input=(6,), classes=3)
"""
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("", "")


class OneHeight(nn.Linear):
    """Checks its input by an assertion, as timm's models do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert(x.shape[1] == self.in_features, "another height")  # type: ignore[no-untyped-call]
        return super().forward(x)


def test_an_assertion_of_the_model_about_its_input_is_a_refusal() -> None:
    with pytest.raises(ProgramRefused, match=r"does not take samples of shape .*another height"):
        compile_program(OneHeight(5, 3), (4,), engines=("onnx",))


class AskedByLength(nn.Linear):
    """`len(x)` makes the batch a plain number, so that torch cannot trace any size."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).reshape(len(x), 3)


def test_a_model_that_traces_for_one_batch_size_only_gets_files_of_that_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = AskedByLength(4, 3)
    made = compile_program(module, (4,), engines=("pt2",), batch=6)
    assert made.program.batch == {"pt2": 6}
    assert made.program.golden["pt2"].batch == 6
    assert "take batches of 6 samples only" in caplog.text
    files = {name: tmp_path / file.sha256 for name, file in made.program.files("pt2", ("step", "evaluate")).items()}
    for path in files.values():
        path.write_bytes(made.files[path.name])
    learner = EngineLearner(open_engine("pt2", made.program, files), made.program)
    x = np.random.default_rng(0).standard_normal((10, 4)).astype(np.float32)
    outputs = learner.evaluate([vector_of(module, made.program.schema)], Dataset(x, np.zeros(10, int)), batch=4)[1]
    with torch.no_grad():
        np.testing.assert_allclose(outputs[0], module(torch.from_numpy(x)).numpy(), atol=1e-5)
    material = BundleSource(program=made.program, files=made.files, centers=[np.zeros(15, np.float32)], cards=[{}])
    with pytest.raises(ProgramRefused, match="takes batches of 6 only"):
        write_bundle(tmp_path / "b", material)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_and_the_user_is_told(kind: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(kind)
    with pytest.warns(UserWarning, match=f"4 parameters in {str(kind)[6:]}: they are trained.* as float32"):
        source = make_source(module, input=(4,))
    assert {p.dtype for p in source.module.parameters()} == {torch.float32}
    assert module[0].weight.dtype == kind
    np.testing.assert_array_equal(vector_of(module, source.schema), vector_of(source.module, source.schema))
    module[0].requires_grad_(requires_grad=False)
    with pytest.warns(UserWarning, match='frozen="f16" stores the frozen ones in half the bytes'):
        make_source(module, input=(4,))
