"""Which inputs can judge a program: those at which torch agrees with itself. There, one wrong answer is enough."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedcenters as fc
from edge_client.errors import ProgramRefused
from edge_client.protocol.program import FUNCTIONS
from export import float64_mode
from export.compiler import program_parity
from export.compiler.check_program import check_folder
from export.compiler.program import compile_program, make_source
from export.compiler.program_functions import TraceSource, example_inputs, function_ports
from export.float64_mode import Float64Mode


class Kinked(nn.Sequential):
    """A ReLU behind the difference of two numbers; `bent`: the same tensors, another function. Fixed weights."""

    def __init__(self, bent: float = 1.0) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            super().__init__(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 2))
        self.bent = bent

    def forward(self, x: Tensor) -> Tensor:
        return self.bent * super().forward(x)  # type: ignore[no-any-return, no-untyped-call]


@cache
def step_of(bent: float) -> bytes:
    """A real container of a program's step."""
    made = compile_program(Kinked(bent), (2,), loss="squared-error", engines=("pt2",))
    return made.files[made.program.containers["pt2"]["step"].sha256]


def judge(bent: float, beside_the_kink: Callable[[int], bool], *, scale: float = 1.0) -> tuple[float, int]:
    """-> what is found out about a container, and at how many inputs it was looked at.

    Beside the kink: weights 0.7 and -0.7 of two equal numbers, where a rounding decides whether a gradient flows.
    `scale` multiplies weights and divides samples, which leaves what the kink sees as it is.
    """
    seen: list[int] = []

    def inputs(source: TraceSource, function: str, batch: int, seed: int) -> list[Tensor]:
        args = example_inputs(source, function, batch, seed)
        at = {p.name: i for i, p in enumerate(function_ports(source, function).inputs)}
        other = -0.7 if beside_the_kink(len(seen)) else 0.7
        args[at["x"]], args[at["w/0.weight"]] = torch.ones(batch, 2) / scale, torch.tensor([[0.7, other]]) * scale
        seen.append(seed)
        return args

    source = make_source(Kinked(), input=(2,), loss="squared-error")
    found = program_parity.max_difference(
        source,
        "pt2",
        "step",
        step_of(bent),
        batch=3,
        seed=0,
        limit=program_parity.MAX_RELATIVE_DIFFERENCE,
        draws=[inputs] * program_parity.MAX_INPUT_DRAWS,
    )
    return found, len(seen)


def test_the_program_of_the_model_itself_passes_at_once() -> None:
    found, looks = judge(1.0, lambda _: False)
    assert found < 1e-6
    assert looks == 1


def test_one_wrong_answer_is_enough_where_torch_agrees_with_itself() -> None:
    found, looks = judge(1.01, lambda _: False)
    assert found > program_parity.MAX_RELATIVE_DIFFERENCE
    assert looks == 1


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_small_weights_and_small_samples_move_by_roundings_of_their_own_size(scale: float) -> None:
    found, looks = judge(1.01, lambda _: False, scale=scale)
    assert found > program_parity.MAX_RELATIVE_DIFFERENCE
    assert looks == 1


def test_inputs_beside_a_kink_are_replaced_by_others() -> None:
    found, looks = judge(1.01, lambda draw: draw < 2)
    assert found > program_parity.MAX_RELATIVE_DIFFERENCE
    assert looks == 3


def test_a_wrong_program_is_not_accepted_because_no_inputs_can_judge_it() -> None:
    found, looks = judge(1.01, lambda _: True)
    assert found > program_parity.MAX_RELATIVE_DIFFERENCE
    assert looks == program_parity.MAX_INPUT_DRAWS


class UnitVectors(nn.Linear):
    """Has no answer for a sample of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.norm(dim=1, keepdim=True))


def test_a_file_that_is_not_finite_where_torch_is_is_refused_though_random_samples_would_not_show_it() -> None:
    """Behind black pixels the root's gradient is infinite; torch's ReLU takes it away, a product with a mask not."""
    module = nn.Sequential(nn.Conv1d(1, 2, 1, bias=False), nn.LPPool1d(2, 2), nn.Flatten(), nn.Linear(6, 2))
    with pytest.raises(ProgramRefused, match=r"differs from torch by inf[\s\S]*aten.pow in layer 1 \(LPPool1d\)"):
        compile_program(module, (1, 6), engines=("pt2",))


def test_a_written_program_is_not_asked_for_samples_that_torch_itself_has_no_answer_for(tmp_path: Path) -> None:
    folder = fc.compile(UnitVectors(6, 3), (6,), engines="pt2").save(tmp_path / "program")
    with torch.no_grad():
        assert all(row["ok"] for row in check_folder(folder, UnitVectors(6, 3)))


def hardly_told() -> tuple[nn.Module, tuple[int, ...]]:
    """A model with a gradient that float32 cannot tell, and the shape of its samples.

    Each channel is its own group, so that the bias before the norm changes nothing: its gradient is cancelled sums.
    """
    torch.manual_seed(0)  # 6e-4 off; seeds 1 and 2 stay below the limit as they are
    return nn.Sequential(nn.Conv2d(1, 2, 1), nn.GroupNorm(2, 2), nn.Flatten(), nn.Linear(512, 4)), (1, 16, 16)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The dtype of each computation by torch in a comparison; in float64 it takes seconds for millions of weights."""
    dtypes: list[str] = []
    torchs = program_parity.torch_outputs

    def noted(*given: Any, dtype: str = "float64") -> Any:  # noqa: ANN401 - the function's own
        dtypes.append(dtype)
        return torchs(*given, dtype=dtype)

    monkeypatch.setattr(program_parity, "torch_outputs", noted)
    return dtypes


def test_inputs_that_cannot_judge_are_left_at_the_first_that_moved(asked: list[str]) -> None:
    step_of(1.01)
    asked.clear()
    judge(1.01, lambda _: True)
    assert asked.count("float64") == 2 * program_parity.MAX_INPUT_DRAWS


def test_a_refusal_computes_each_of_the_moved_inputs_once_in_float64(asked: list[str]) -> None:
    step_of(1.01)
    asked.clear()
    judge(1.01, lambda _: False)
    assert asked.count("float64") == 1 + 2 * program_parity.PERTURBED_PAIRS


def test_gradients_that_float32_cannot_tell_are_no_reason_to_refuse_and_need_no_moved_inputs(asked: list[str]) -> None:
    compile_program(*hardly_told(), engines=("pt2",))
    assert asked.count("float32") <= 1  # none where a machine's own rounding stays below the limit
    assert asked.count("float64") == len(FUNCTIONS) + program_parity.LONE_SAMPLES


@pytest.mark.slow  # a model of six million weights
def test_femnists_cnn_is_judged_where_it_can_be() -> None:
    from coordinator.models.registry import build_model

    known = build_model("femnist-cnn", seed=0)
    source = make_source(known.module, input=known.input)
    args = example_inputs(source, "step", 32, 1)  # one window of the first max-pool is decided by rounding
    told = (
        program_parity.torch_outputs(source, "step", args, dtype="float32"),
        program_parity.torch_outputs(source, "step", args),
    )
    assert max(program_parity.output_differences(*told)) > 10 * program_parity.MAX_RELATIVE_DIFFERENCE
    made = compile_program(known.module, known.input, engines=("onnx",))
    assert made.program.parity["onnx"] < 1e-5


class FromZero(nn.Module):
    """A recurrent layer that begins at zeros of torch's usual width."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.recurrent(x, torch.zeros(1, x.shape[0], 4))
        return self.head(out[:, -1])  # type: ignore[no-any-return]


class Narrowed(nn.Module):
    """Names float32 itself, holds a tensor that is no buffer, and writes into one that it made."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.linspace(-1, 1, 6).reshape(2, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.zeros(x.shape[0], 6)
        seen[:, :3] = x.to(torch.float32) @ self.table
        seen[:, 3:] += (x > 0).float() @ self.table
        return self.head(seen)  # type: ignore[no-any-return]


RARE_COUNT_MORE = torch.tensor([1.0, 5.0])


def weighted(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels, weight=RARE_COUNT_MORE, reduction="none")


@pytest.mark.parametrize(
    ("module", "shape", "loss"),
    [
        (FromZero(), (2, 3), "cross-entropy"),
        (Narrowed(), (2,), "cross-entropy"),
        (nn.Linear(2, 2), (2,), weighted),
        (nn.Linear(2, 2), (2,), nn.CrossEntropyLoss(weight=RARE_COUNT_MORE, reduction="none")),
    ],
    ids=["zeros", "narrowed", "weights", "loss-module"],
)
def test_what_is_float32_of_its_own_accord_is_compared_in_float64_too(module: nn.Module, shape: Any, loss: Any) -> None:  # noqa: ANN401
    labels = torch.zeros(2, dtype=torch.int64) if callable(loss) else None
    found = compile_program(module, shape, loss=loss, targets=labels, engines=("pt2",)).program.parity
    assert found["pt2"] < 1e-5


def test_in_float64_torch_rounds_nothing_to_float32() -> None:
    x = torch.linspace(0, 1, 7, dtype=torch.float64)
    with Float64Mode():
        for kept in (x.float(), x.to(torch.float32), x.to(dtype=torch.float32), x.type(torch.float32)):
            assert torch.equal(kept, x)
        made = torch.zeros(7)
        made += x
    assert torch.equal(made, x)


def test_in_float64_a_size_stays_a_size() -> None:
    """As `torch.distributions.Laplace` and `Exponential` draw: `x.new(size)`; a tuple there is two numbers."""
    x = torch.ones(2)
    with Float64Mode():
        assert x.new(torch.Size([3, 4])).shape == (3, 4)
        assert type(x.size()) is torch.Size


def test_in_float64_a_copy_of_many_layers_looks_at_each_tensor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At all that was copied before, for each tensor, 160 batch norms took half a minute."""
    looked = list[object]()
    own = float64_mode._widened

    def noted(value: object) -> object:
        looked.append(value)
        return own(value)

    monkeypatch.setattr(float64_mode, "_widened", noted)
    layers = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(20))).double()
    with Float64Mode():
        copied = copy.deepcopy(layers)
    assert all(torch.equal(copied.state_dict()[name], value) for name, value in layers.state_dict().items())
    assert len(looked) < 100 * len(layers)
