"""What cannot become a training program is refused by name, before anything is sent to a device."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edge_client.errors import ProgramRefused
from export.compiler.decompositions.supported_ops import TORCH_ALONE
from export.compiler.forward_pass import ForwardPasses
from export.compiler.operator_watch import Untraceable
from export.compiler.program import compile_program, make_source
from export.compiler.program_functions import example_inputs
from export.compiler.program_parity import output_differences, torch_outputs
from export.compiler.tracing import export_graph, holds, inference_graph, trace_function
from export.containers.write_pt2 import run_pt2, to_pt2
from tests.export.compiler.test_forward_overrides import step_difference
from tests.support import picking_networks

aten = torch.ops.aten


def refusal(module: nn.Module, *, input: tuple[int, ...] = (1, 8, 8)) -> str:  # noqa: A002 - the manifest's word
    source = make_source(module, input=input)
    with pytest.raises(ProgramRefused) as refused:
        trace_function(ForwardPasses(source), "step", batch=4, dynamic=False)
    return str(refused.value)


def test_dropout_with_probability_zero_is_no_dropout() -> None:
    source = make_source(nn.Sequential(nn.Flatten(), nn.Dropout(0.0), nn.Linear(64, 4)), input=(1, 8, 8))
    trace_function(ForwardPasses(source), "step", batch=4, dynamic=True)


def test_unequal_windows_of_an_adaptive_maximum_are_refused_with_their_layer_and_what_to_do() -> None:
    text = refusal(nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Linear(32, 4)))
    assert "layer 1 (AdaptiveMaxPool2d)" in text
    assert "[6, 6] does not divide into [4, 4] equal windows; choose sizes that do" in text


class Sorting(nn.Module):
    """An operator that no runtime has, behind a branch on values if that is asked for."""

    def __init__(self, *, branches: bool) -> None:
        super().__init__()
        self.head, self.branches = nn.Linear(64, 4), branches

    def forward(self, x: Tensor) -> Tensor:
        h = self.head(x.flatten(1))
        if self.branches and self.head.bias.sum() > 0:
            return h  # type: ignore[no-any-return]
        return torch.special.i0e(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("branches", "code"), [(False, "return torch.special.i0e(h)"), (True, "if self.branches and")])
def test_a_refusal_names_the_line_of_the_models_code(branches: bool, code: str) -> None:  # noqa: FBT001 - a parameter
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = next(i for i, line in enumerate(lines, 1) if line.strip().startswith(code))
    assert f"{Path(__file__).name}:{number}" in refusal(Sorting(branches=branches))


class Routed(nn.Linear):
    """Adds to the samples whose first number is positive, as mixtures of experts route theirs."""

    def forward(self, x: Tensor) -> Tensor:
        (rows,) = torch.where(x[:, 0] > 0)
        return super().forward(x).index_add(0, rows, x[rows, :3])


def test_samples_picked_by_a_mask_are_refused_by_their_line_and_with_what_to_do() -> None:
    text = refusal(Routed(4, 3), input=(4,))
    assert re.search(r"in layer the model itself \(Routed\) at test_tracing.py:[0-9]+: aten.nonzero", text)
    assert "multiply by the mask" in text


class Nearest(nn.Linear):
    """Keeps the nearest of several points, as a search for the farthest point does; other lines pick by number."""

    def forward(self, x: Tensor) -> Tensor:
        far, rows = torch.full_like(x, 1e3), torch.arange(x.shape[0])
        for number in range(2):
            apart = (x - x[rows, number].unsqueeze(1)).abs()
            closer = apart < far
            far[closer] = apart[closer]
        return super().forward(far[rows])


def test_a_refusal_of_masks_names_the_line_with_the_mask_alone() -> None:
    text = refusal(Nearest(4, 3), input=(4,))
    assert "a boolean mask picks another number of values each time" in text
    assert "a mask that stays as the positions that it picks, h[:, [0, 2]]" in text
    assert text.count("test_tracing.py:") == 1


class Experts(nn.Module):
    """Gives each expert the samples that chose it, as Mixtral does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 3), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, nth = torch.where(chosen == number)
            out[rows] += shares[rows, nth, None] * expert(x[rows])
        return out


def test_experts_that_get_the_samples_which_chose_them_are_refused_by_their_line_and_with_what_to_do() -> None:
    text = refusal(Experts(), input=(4,))
    assert re.search(r"model itself \(Experts\) at test_tracing.py:[0-9]+: aten.nonzero gives another number", text)
    assert "multiply by the mask" in text


class Branching(nn.Linear):
    """Decides by values, makes a matrix of torch's default dtype, and has a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x * self.scale @ torch.eye(4))
        return out if bool((out > 0).all()) else -out


def test_a_branch_on_values_is_refused_in_float64_too() -> None:
    source = make_source(Branching(), input=(4,), dtype="float64")
    with pytest.raises(ProgramRefused, match=r"cannot be traced at test_tracing.py:[0-9]+"):
        trace_function(ForwardPasses(source), "step", batch=4, dynamic=False)


class TurnedByValue(nn.Linear):
    """Turns its outputs by a number of its own, and holds a number in float32, as Autoformer does."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.roll(super().forward(x) * torch.tensor([1.5]), int(self.bias.argmax()), 1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_shift_that_depends_on_values_is_refused_by_its_line_and_without_a_graph_on_stderr(
    dtype: str, capfd: pytest.CaptureFixture[str]
) -> None:
    source = make_source(TurnedByValue(4, 3), input=(4,), dtype=dtype)
    with pytest.raises(ProgramRefused, match=r"cannot be traced at test_tracing.py:[0-9]+: .*data-dependent"):
        trace_function(ForwardPasses(source), "step", batch=4, dynamic=True)
    assert "def forward" not in capfd.readouterr().err


class AddedInto(nn.Linear):
    """Torch takes no gradient of what is written by out=."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return torch.add(h, 1, out=torch.empty(h.shape))


def test_a_forward_that_torch_itself_cannot_train_is_refused_by_its_line() -> None:
    with pytest.raises(ProgramRefused, match=r"where torch keeps gradients, at test_tracing.py:[0-9]+: add\(\).*out="):
        make_source(AddedInto(4, 3), input=(4,))


@torch.library.custom_op("tests_of_tracing::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """What a library brings in one piece, with its gradient."""
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda _, grad: grad * 2)


class WithAnOperatorOfALibrary(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return doubled(super().forward(x))  # type: ignore[no-any-return]


def test_an_operator_of_a_library_is_refused_by_its_name_and_line() -> None:
    text = refusal(WithAnOperatorOfALibrary(4, 3), input=(4,))
    assert re.search(r"WithAnOperatorOfALibrary\) at test_tracing.py:[0-9]+ uses tests_of_tracing.doubled: no ", text)


class WithWhatHasNoPlace(nn.Linear):
    call: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.call(super().forward(x))


@pytest.mark.parametrize(
    ("call", "told", "hint"),
    [
        (lambda h: h * torch.heaviside(h, torch.ones(1)), "torch has no gradient of aten.heaviside", "x.detach()"),
        (lambda h: h + aten.set_.source_Tensor(torch.zeros(3), torch.ones(3)), "uses aten.set", "make a new tensor"),
        (lambda h: h + torch.zeros(6).resize_(3), "uses aten.resize", "make a new tensor"),
        (lambda h: torch.zeros(3).set_(h), "torch has no gradient of aten.set", "make a new tensor"),
    ],
)
def test_what_torch_cannot_train_and_other_memory_are_refused_by_their_line_and_with_what_to_do(
    call: Callable[[Tensor], Tensor], told: str, hint: str
) -> None:
    module = WithWhatHasNoPlace(4, 3)
    module.call = call
    text = refusal(module, input=(4,))
    assert told in text
    assert hint in text
    assert re.search(r"\(WithWhatHasNoPlace\) at test_tracing.py:[0-9]+", text)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        lengths = x[:, 0, 0].long().clamp(1, 5)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][0][-1])  # type: ignore[no-any-return]


def test_packed_sequences_are_refused_by_their_line_and_with_what_to_do() -> None:
    text = refusal(Packed(), input=(5, 3))
    assert re.search(r"\(Packed\) at test_tracing.py:[0-9]+: it packs sequences", text)
    assert "out[torch.arange(out.shape[0]), lengths - 1]" in text


class Scan(nn.Linear):
    """What a selective scan begins with (Mamba): a product of three tensors."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return torch.einsum("bld,bln,bld->bldn", h, h.tanh(), x).sum(-1)


def test_a_product_of_three_tensors_is_traced_for_any_batch_size() -> None:
    source = make_source(Scan(4, 4), input=(3, 4), loss="squared-error", dtype="float64")
    graph = trace_function(ForwardPasses(source), "step", batch=4, dynamic=True)
    given = example_inputs(source, "step", 5)
    found = [value.detach().numpy() for value in graph(*given)]
    assert max(output_differences(found, torch_outputs(source, "step", given))) < 1e-10


class HalfInside(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = super().forward(x).tanh()
        return out.float()


def test_autocast_in_a_model_rounds_nothing_in_its_program() -> None:
    source = make_source(HalfInside(4, 3), input=(4,), loss="squared-error")
    graph = trace_function(ForwardPasses(source), "step", batch=4, dynamic=True)
    given = example_inputs(source, "step", 5)
    found = [value.detach().numpy() for value in graph(*given)]
    assert max(output_differences(found, torch_outputs(source, "step", given))) < 1e-6
    told = torch_outputs(source, "step", given, dtype="float32")
    assert max(output_differences(told, torch_outputs(source, "step", given))) < 1e-6


class Remembering(nn.Module):
    """What a hook finds is read in forward; the hook knows the module that it was made in."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.seen = nn.Linear(4, 4), nn.Linear(4, 3), dict[str, Tensor]()
        self.body.register_forward_hook(lambda _layer, _given, out: self.seen.update(body=out))

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        return self.head(self.seen["body"])  # type: ignore[no-any-return]


def test_a_hook_that_writes_into_the_module_it_was_made_in_is_compiled_as_torch_runs_it() -> None:
    assert step_difference(Remembering(), (4,)) < 1e-12


def test_a_module_behind_torch_compile_is_called_as_it_was_written_and_takes_any_batch_size() -> None:
    def backend(*_: object) -> None:
        raise AssertionError

    module: Any = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), backend=backend)
    assert compile_program(module, (4,), engines=("onnx",)).program.batch == {"onnx": "any"}


class OneSize(nn.Module):
    """Its layers are for one batch size."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(4, -1) if len(x) == 4 else x.flatten(1)


def test_a_model_that_torch_cannot_trace_for_any_batch_size_is_traced_for_one() -> None:
    passes = ForwardPasses(make_source(nn.Sequential(OneSize(), nn.Linear(64, 4)), input=(1, 8, 8)))
    with pytest.raises(ProgramRefused, match="not the same for every batch size"):
        trace_function(passes, "infer", batch=4, dynamic=True)
    trace_function(passes, "infer", batch=4, dynamic=False)


def counted_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Torch exports the model for any batch size; `len` makes a number of it afterwards."""
    return (outputs - targets).reshape(len(outputs), -1).square().mean(1)


def test_a_loss_that_makes_a_number_of_the_batch_size_is_traced_for_one() -> None:
    passes = ForwardPasses(
        make_source(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), input=(1, 8, 8), own_loss=counted_error)
    )
    with pytest.raises(Untraceable, match="not the same for every batch size"):
        trace_function(passes, "step", batch=4, dynamic=True)
    trace_function(passes, "step", batch=4, dynamic=False)
    trace_function(passes, "infer", batch=4, dynamic=True)


def test_the_forward_pass_of_a_mode_is_exported_once_for_all_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    exported, export = list[bool](), torch.export.export

    def counted(module: nn.Module, *args: object, **kwargs: object) -> object:
        exported.append(module.training)
        return export(module, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.export, "export", counted)
    passes = ForwardPasses(make_source(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), input=(1, 8, 8)))
    for dynamic in (True, False):
        for function in ("step", "evaluate", "infer"):
            trace_function(passes, function, batch=4, dynamic=dynamic)
    assert exported == [True, False]


class PlainTensors(nn.Module):
    """Two tensors that are neither parameters nor buffers, one of them read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.shift, self.scale = nn.Linear(4, 3), torch.randn(4), torch.randn(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + self.shift).mul(self.scale).tanh() + self.scale  # type: ignore[no-any-return]


@pytest.mark.parametrize("dynamic", [True, False])
def test_the_plain_tensors_of_a_model_are_in_its_archive(dynamic: bool) -> None:  # noqa: FBT001 - a case
    source = make_source(PlainTensors(), input=(4,), loss="squared-error")
    graph = trace_function(ForwardPasses(source), "step", batch=4, dynamic=dynamic)
    file = to_pt2(export_graph(source, "step", graph, batch=4, dynamic=dynamic))
    given = example_inputs(source, "step", 5 if dynamic else 4)
    found = [value.numpy() for value in run_pt2(file, given)]
    assert max(output_differences(found, torch_outputs(source, "step", given))) < 1e-5


@pytest.mark.parametrize("dynamic", [True, False])
def test_inference_is_the_graph_of_evaluation_without_its_loss(dynamic: bool) -> None:  # noqa: FBT001 - a case
    weights = torch.tensor([1.0, 2.0, 4.0])
    source = make_source(
        PlainTensors(), input=(4,), loss="squared-error", own_loss=lambda out, y: ((out - y).square() * weights).mean(1)
    )
    passes = ForwardPasses(source)
    evaluate, traced = (trace_function(passes, f, batch=4, dynamic=dynamic) for f in ("evaluate", "infer"))
    made = inference_graph(source, evaluate)
    assert made.graph.code == traced.graph.code
    assert (evaluate.count, made.count) == (3, 2)
    assert all(torch.equal(a, b) for a, b in zip(made.buffers(), traced.buffers(), strict=True))


@pytest.mark.parametrize("name", ["scattered", "heard", "viewed"])
def test_a_traced_step_is_torchs_in_float64_at_another_batch_size(name: str) -> None:
    entry = picking_networks.ENTRIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        source = make_source(entry.make(), input=entry.input, loss="squared-error", dtype="float64")
    graph = trace_function(ForwardPasses(source), "step", batch=4, dynamic=True)
    given = example_inputs(source, "step", 5)
    found = [value.detach().numpy() for value in graph(*given)]
    assert max(output_differences(found, torch_outputs(source, "step", given))) < 1e-10


def test_a_step_for_torch_keeps_its_own_gradients_and_sums_a_bias_apart() -> None:
    """In torch's float32 the gradient of a bias before a batch norm, which is 0, is above the limit of a check."""
    layers = [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3)]
    passes = ForwardPasses(make_source(nn.Sequential(*layers), input=(1, 8, 8)))
    own = trace_function(passes, "step", batch=4, dynamic=True, for_torch=True)
    targets = [node.target for node in own.graph.graph.nodes if node.op == "call_function"]
    assert {aten.native_batch_norm_backward.default, aten.max_pool2d_with_indices_backward.default} <= set(targets)
    (gradient,) = [node for node in own.graph.graph.nodes if node.target is aten.convolution_backward.default]
    assert gradient.args[-1] == [False, True, False]
    assert not holds(trace_function(passes, "step", batch=4, dynamic=True), TORCH_ALONE)


def test_one_trace_serves_both_where_torch_has_nothing_of_its_own() -> None:
    passes = ForwardPasses(make_source(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), input=(6,)))
    assert not holds(trace_function(passes, "step", batch=4, dynamic=True, for_torch=True), TORCH_ALONE)
