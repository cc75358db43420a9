"""A function of the model's own (torch.autograd.Function) keeps its own gradient, and wrong uses are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from edge_client.errors import ProgramRefused
from export.compiler.forward_pass import ForwardPasses
from export.compiler.program import make_source
from export.compiler.program_functions import TraceSource, example_inputs
from export.compiler.program_parity import output_differences, torch_outputs
from export.compiler.tracing import trace_function
from tests.support.own_gradient_networks import OwnGradients


def source_of(module: nn.Module, shape: tuple[int, ...] = (5,)) -> TraceSource:
    return make_source(module, input=shape, loss="squared-error", dtype="float64")


def difference(source: TraceSource, function: str = "step") -> float:
    graph = trace_function(ForwardPasses(source), function, batch=4, dynamic=True)
    given = example_inputs(source, function, 5)
    found = [value.detach().numpy() for value in graph(*given)]
    return max(output_differences(found, torch_outputs(source, function, given)))


@pytest.mark.parametrize("function", ["step", "infer"])
def test_values_and_gradients_are_the_functions_own_at_another_batch_size(function: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert difference(source_of(OwnGradients()), function) < 1e-10


class SmoothGradient(Function):
    """A gradient that is smoothed by Fourier transforms, and that goes to the largest value alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ANN401
        largest = nn.functional.one_hot(ctx.saved_tensors[0].argmax(1), 5)
        return largest * torch.fft.irfft(torch.fft.rfft(grad)[..., :2], n=5)  # type: ignore[no-any-return]


class WithSmoothGradient(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return SmoothGradient.apply(super().forward(x))  # type: ignore[no-untyped-call,no-any-return]


def test_a_backward_may_call_what_is_replaced_in_a_forward() -> None:
    assert difference(source_of(WithSmoothGradient(5, 5))) < 1e-10


class Halved(Function):
    """Calls another function in its backward; only one of its two tensors has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(weight)
        return x * weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # noqa: ANN401
        assert ctx.needs_input_grad == (True, True)
        return doubled(grad) * ctx.saved_tensors[0] / 4, None


class Doubled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ANN401
        return 2 * grad


doubled: Any = Doubled.apply


class WritesItsInput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ANN401
        return 2 * grad


class Between(nn.Module):
    """A function between two layers; `weighted`: it takes a parameter, too."""

    def __init__(self, function: Any, *, weighted: bool = False) -> None:  # noqa: ANN401 - a class of Function
        super().__init__()
        self.function, self.body, self.head = function, nn.Linear(5, 4), nn.Linear(4, 3)
        self.weight = nn.Parameter(torch.rand(4) + 0.5) if weighted else None

    def forward(self, x: Tensor) -> Tensor:
        rest = () if self.weight is None else (self.weight,)
        return self.head(self.function.apply(self.body(x) + 0, *rest))  # type: ignore[no-any-return]


def test_a_function_may_call_another_one_and_leave_a_gradient_out() -> None:
    assert difference(source_of(Between(Halved, weighted=True))) < 1e-10


def test_a_function_that_writes_into_its_input_is_refused() -> None:
    source = source_of(Between(WritesItsInput))
    with pytest.raises(ProgramRefused, match=r"an autograd\.Function that writes into its inputs is not covered"):
        trace_function(ForwardPasses(source), "step", batch=4, dynamic=True)


def test_autograd_is_torchs_own_again_afterwards() -> None:
    difference(source_of(Between(Doubled)))
    x = torch.ones(2, requires_grad=True)
    doubled(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4)), nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(5, 4)), nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 4)), nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.Linear(5, 4), nn.SyncBatchNorm(4), nn.Linear(4, 3)),
    ],
    ids=["spectral norm", "spectral norm by a hook", "weight norm by a hook", "batch norm of several devices"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_weights_that_are_computed_and_norms_that_are_synchronised_train_as_in_torch(make: Any) -> None:  # noqa: ANN401
    assert difference(source_of(make())) < 1e-10
