"""A list of operators stands for a function at every value of its tensors, and making it leaves no trace."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from emulator.engines.cpu.operator_log import DependsOnValuesError, log_operators
from emulator.engines.cpu.recording import compile_graph, record_operators
from export.data_attribute import DataReplacedError

BATCH = torch.linspace(-1.0, 2.0, 12).reshape(3, 4)
OTHER = torch.linspace(3.0, -2.0, 12).reshape(3, 4)


def overwritten_constant(x: Tensor) -> Tensor:
    total = torch.tensor([0.0, 1.0, 2.0, 3.0])
    total += x.sum(0)
    return total * x


def gradient(x: Tensor) -> Tensor:
    w = x.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad((torch.relu(w @ w.t()) ** 2).sum(), w)
    return found


@pytest.mark.parametrize(
    "function",
    [
        gradient,
        overwritten_constant,
        lambda x: x[:, torch.tensor([0, 2])] + torch.arange(2),
        lambda x: sum(x.split(2, dim=1), torch.zeros(3, 2)),
        torch.vmap(lambda row: row.max() * row),
        lambda x: x.masked_fill(x > 0, 1.5).clone().add_(x),
        lambda x: torch.where(x > 0, x, OTHER),
    ],
)
def test_a_record_computes_what_the_function_does_for_other_values_and_again(
    function: Callable[[Tensor], Tensor],
) -> None:
    play = compile_graph(record_operators(function, [BATCH]))
    for x in (OTHER, BATCH, OTHER):
        torch.testing.assert_close(play(x), function(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.sum().item(),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: x * torch.equal(x, x),
        lambda x: x * float(x.numpy().max()),
        lambda x: x * max(x[0].tolist()),
        lambda x: x + x.untyped_storage().nbytes(),
    ],
)
def test_a_function_that_looks_at_values_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(DependsOnValuesError, match="values of a batch"):
        log_operators(function, [BATCH])


def test_a_function_that_gives_a_tensor_other_memory_is_refused_and_one_that_writes_into_it_is_not() -> None:
    def replaces(x: Tensor) -> Tensor:
        x = x * 1
        x.data = x.data * 2
        return x

    def writes(x: Tensor) -> Tensor:
        x = x * 1
        x.data *= 2
        return x

    with pytest.raises(DataReplacedError, match=r"another `\.data`"):
        log_operators(replaces, [BATCH])
    graph = log_operators(writes, [BATCH])
    torch.testing.assert_close(compile_graph(graph)(OTHER), 2 * OTHER)


def test_what_the_function_overwrites_and_draws_is_as_before() -> None:
    def forgetful(x: Tensor) -> Tensor:
        x.mul_(0)
        return x + torch.rand(3, 4)

    given, before = BATCH.clone(), torch.get_rng_state()
    graph = log_operators(forgetful, [given])
    assert torch.equal(given, BATCH)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(*(compile_graph(graph)(given.clone()) for _ in range(2)))  # each play draws anew


def test_a_model_that_asks_a_tensor_with_values_is_recorded_without() -> None:
    def asks(x: Tensor) -> Any:  # noqa: ANN401
        if type(x) is Tensor and not bool((x > 0).all()):
            return x.clamp(min=0)
        return torch.relu(x)

    graph = record_operators(asks, [BATCH])
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.ops.aten.relu.default]


def test_a_simulated_run_loads_neither_torchs_compiler_nor_sympy() -> None:
    """They take longer to import than such a run takes."""
    code = """if True:
        import sys
        import fedcenters as fc
        fc.simulate(fc.FeSEM(clusters=2), fleet=fc.fleets.digits(devices=4), rounds=2)
        print(sorted({"torch", "torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split("\n")[-2] == "['torch']"
