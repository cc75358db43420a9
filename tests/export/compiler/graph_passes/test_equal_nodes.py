"""A traced graph computes once what the forward pass and the gradients both need, and gives every output of its own."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from export.compiler.forward_pass import ForwardPasses
from export.compiler.graph_passes.equal_nodes import merge_equal_nodes
from export.compiler.program import make_source
from export.compiler.tracing import trace_function


def merged(function: object, *args: Tensor) -> tuple[fx.GraphModule, Counter[str]]:
    traced = make_fx(function)(*args)  # type: ignore[arg-type]  # any function of tensors
    merge_equal_nodes(traced.graph)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced, operators(traced.graph)


def operators(graph: fx.Graph) -> Counter[str]:
    return Counter(n.target.overloadpacket.__name__ for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload))


def step_of(module: nn.Module) -> Counter[str]:
    source = make_source(module, input=(1, 8, 8))
    return operators(trace_function(ForwardPasses(source), "step", batch=4, dynamic=True).graph.graph)


def test_equal_nodes_become_one_and_numbers_of_another_type_do_not() -> None:
    traced, found = merged(lambda x: (x - 1) * (x - 1) + (x - 1.0) * (x - 2), torch.ones(3))
    assert found["sub"] == 3
    assert torch.equal(traced(torch.full((3,), 4.0)), torch.full((3,), 15.0))


def test_equal_outputs_stay_nodes_of_their_own() -> None:
    traced, _ = merged(lambda x: (x + 1, x + 1), torch.ones(3))
    first, second = next(n for n in traced.graph.nodes if n.op == "output").args[0]
    assert first is not second


def test_a_reshape_back_is_what_it_began_with_and_one_to_another_shape_is_not() -> None:
    def back(x: Tensor) -> Tensor:
        return x.reshape(-1).reshape(2, 3) + x.reshape(-1).reshape(3, 2).sum() + x.exp().reshape(-1).reshape(2, 3)

    x = torch.arange(6.0).reshape(2, 3)
    traced, found = merged(back, x)
    assert found["view"] == 2
    assert torch.equal(traced(x), back(x))


def test_a_permutation_back_is_what_it_began_with_and_another_is_not() -> None:
    def back(x: Tensor) -> Tensor:
        y, z = x.permute(1, 2, 0), x.permute(0, 2, 1)
        return y.permute(2, 0, 1) + y.permute(1, 0, 2).sum() + z.permute(0, 2, 1)

    x = torch.arange(24.0).reshape(2, 3, 4)
    traced, found = merged(back, x)
    assert found["permute"] == 2
    assert torch.equal(traced(x), back(x))


def test_batch_norm_centres_its_input_once_in_a_step() -> None:
    def centred(module: nn.Module) -> int:
        return step_of(module)["sub"]

    head = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))
    normed = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3))
    assert centred(normed) - centred(head) == 2  # the input less its mean, the gradient less its share


def test_a_max_pool_is_searched_once_in_a_step() -> None:
    head = [nn.Flatten(), nn.Linear(18, 3)]
    assert "max_pool2d_with_indices" not in step_of(nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), *head))


def test_a_max_pool_without_a_gradient_stays_the_runtimes_own() -> None:
    assert step_of(nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)))["max_pool2d_with_indices"] == 1
