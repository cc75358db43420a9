"""A copy of a module answers with its own weights, whatever functions the module keeps that name it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pickle import loads
from threading import Lock
from types import FunctionType, MethodType
from weakref import ref

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's custom

from edge_client.errors import ProgramRefused
from edge_client.protocol.samples.input_parts import InputPart
from export.compiler.program import make_source
from export.compiler.program_functions import private_copy
from export.compiler.signatures.choose_output import choose_output
from export.compiler.signatures.module_copies import copied
from export.compiler.signatures.packed_inputs import pack_module

X = torch.linspace(-1, 1, 15).reshape(3, 5)


class Held(nn.Module):
    """A layer, a scale, and functions in attributes; `kept` is what a hook saw of the last pass."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.scale, self.head = nn.Linear(5, 4), nn.Parameter(torch.rand(4) + 1), nn.Linear(4, 3)
        self.kept = dict[str, Tensor]()
        self.functions = list[Callable[..., Tensor]]()

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        for function in self.functions:
            h = function(h)
        return self.head(h)  # type: ignore[no-any-return]


def in_a_lambda(net: Held) -> None:
    net.functions.append(lambda h: torch.tanh(h) * net.scale)


def in_a_function_of_a_function(net: Held) -> None:
    def scaled(h: Tensor, depth: int = 2) -> Tensor:
        return scaled(h * net.scale, depth - 1) if depth else h

    net.functions.append(torch.no_grad()(scaled))


def in_a_default(net: Held) -> None:
    net.functions.append(lambda h, scale=net.scale: h * scale)


def in_a_partial(net: Held) -> None:
    net.functions.append(partial(lambda layer, h: h * net.scale + layer.bias, net.body))


def in_a_hook(net: Held) -> None:
    net.body.register_forward_hook(lambda _layer, _given, out: net.kept.update(body=out.detach()))
    net.functions.append(lambda h: h + net.kept["body"].mean())
    net(X[:1])


def in_place_of_a_layers_forward(net: Held) -> None:
    net.body.forward = lambda x: F.linear(x, net.body.weight * 2)  # type: ignore[assignment, method-assign]


def in_a_layer_that_is_not_registered(net: Held) -> None:
    beside = nn.Identity()
    beside.forward = lambda h: h * net.scale  # type: ignore[assignment, method-assign]
    net.functions.append(beside)


def in_containers_of_a_function(net: Held) -> None:
    layers, found = [net.body], {"layers": (net.head, net.body.forward)}
    net.functions.append(lambda h: h + layers[0].bias + found["layers"][1](X))
    net.body.register_forward_hook(lambda _layer, _given, out: out * net.scale)


def in_a_partial_of_a_function(net: Held) -> None:
    scaled = partial(torch.mul, net.scale)
    net.functions.append(lambda h: h + scaled(h))


def in_a_method_that_is_put_in_place(net: Held) -> None:
    net.body.forward = MethodType(lambda layer, x: F.linear(x, layer.weight) * net.scale, net.body)  # type: ignore[method-assign]


class Calls:
    """An object that is no layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, h: Tensor) -> Tensor:
        return self.function(h)


def in_an_object(net: Held) -> None:
    net.functions.append(Calls(lambda h: h * net.scale))


def by_a_weak_reference(net: Held) -> None:
    weak = ref(net)
    net.functions.append(lambda h: h * weak().scale)  # type: ignore[union-attr]


def beside_a_variable_that_a_hook_sets(net: Held) -> None:
    seen = torch.zeros(())

    def note(_layer: nn.Module, _given: object, out: Tensor) -> None:
        nonlocal seen
        seen = out.mean()

    net.body.register_forward_hook(note)
    net.functions.append(lambda h: h + seen * net.scale)


def in_a_global_variable(net: Held) -> None:
    script = {"net": net, "tanh": torch.tanh, "__builtins__": __builtins__}
    function: FunctionType = eval("lambda h: sum(net.scale * part for part in (tanh(h), h))", script)  # noqa: S307 - a script
    net.functions.append(function)


KINDS = (
    *(in_a_lambda, in_a_function_of_a_function, in_a_default, in_a_partial, in_a_hook),
    *(in_place_of_a_layers_forward, in_a_layer_that_is_not_registered),
    *(in_containers_of_a_function, in_a_partial_of_a_function, in_a_method_that_is_put_in_place, in_an_object),
    *(by_a_weak_reference, beside_a_variable_that_a_hook_sets, in_a_global_variable),
)


def answers(module: nn.Module) -> Tensor:
    with torch.no_grad():
        return module(X)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_with_other_weights_answers_as_the_module_that_has_them(kind: Callable[[Held], None]) -> None:
    one, other = Held(1), Held(2)
    for net in (one, other):
        kind(net)
    before, mine = answers(one), copied(one)
    assert torch.equal(answers(mine), before)
    mine.load_state_dict(other.state_dict())
    assert torch.equal(answers(mine), answers(other))
    assert torch.equal(answers(one), before)


@pytest.mark.parametrize(
    "copy",
    [
        lambda net: private_copy(net, "float32"),
        lambda net: choose_output(net, 0),
        lambda net: pack_module(net, (InputPart(name="x", shape=(5,)),)),
    ],
    ids=["of the compiler", "with one output", "of packed inputs"],
)
def test_each_copy_has_functions_of_its_own(copy: Callable[[nn.Module], nn.Module]) -> None:
    one, other = Held(1), Held(2)
    for net in (one, other):
        in_a_lambda(net)
    mine = copy(one)
    mine.load_state_dict(other.state_dict())
    assert torch.equal(answers(mine), answers(copy(other)))


def test_a_copy_of_a_model_that_names_itself_by_a_global_variable_may_be_sent_to_a_worker() -> None:
    one = Held(1)
    in_a_global_variable(one)
    mine = copied(one)
    mine.load_state_dict(Held(2).state_dict())
    assert torch.equal(answers(loads(cloudpickle.dumps(mine))), answers(mine))  # noqa: S301 - written here


def test_functions_that_name_no_part_of_the_module_stay_what_they_are() -> None:
    net, seen = Held(0), list[Tensor]()

    def noted(h: Tensor) -> Tensor:
        seen.append(h)
        return h

    def even(h: Tensor, depth: int = 2) -> Tensor:
        return odd(h, depth - 1) if depth else h

    def odd(h: Tensor, depth: int) -> Tensor:
        return even(h, depth - 1)

    net.functions += [noted, torch.relu, even]
    assert copied(net).functions == [noted, torch.relu, even]


MODELS = dict[str, nn.Module]()  # of a script that keeps its models by their names


def of_a_list(net: Held) -> Callable[[], Tensor]:
    kept = [net.scale]
    return lambda: kept[0]


def of_a_cached_function(net: Held) -> Callable[[], Tensor]:
    return lru_cache(lambda: net.scale)


def of_a_set(net: Held) -> Callable[[], Tensor]:
    kept = {lambda: net.scale}
    return lambda: next(iter(kept))()  # noqa: PLW0108 - a set is read when it is called


def of_a_global_variable(net: Held) -> Callable[[], Tensor]:
    MODELS["net"] = net
    return lambda: MODELS["net"].scale  # type: ignore[return-value]


def of_no_module(_: Held) -> Callable[[], Tensor]:
    scale = nn.Parameter(torch.ones(4))
    return lambda: scale


def of_views(net: Held) -> Callable[[], Tensor]:
    net.views = net.scale.chunk(1)  # type: ignore[assignment]
    return lambda: net.views[0]  # type: ignore[index]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (of_a_list, "reads scale beside its own place"),
        *((kind, r"shape \(4,\) that is none of its own") for kind in (of_a_cached_function, of_a_set)),
        *((kind, r"shape \(4,\) that is none of its own") for kind in (of_a_global_variable, of_no_module, of_views)),
    ],
)
def test_a_parameter_that_no_step_would_move_is_refused(
    kind: Callable[[Held], Callable[[], Tensor]], said: str
) -> None:
    net = Held(1)
    scale = kind(net)
    net.functions.append(lambda h: h * scale())
    with pytest.raises(ProgramRefused, match=said):
        make_source(net, input=(5,))


def test_a_parameter_that_each_pass_makes_is_a_constant() -> None:
    net = Held(1)
    net.functions.append(lambda h: h * nn.Parameter(torch.ones(4)))
    assert make_source(net, input=(5,)).target == (3,)


def test_a_module_that_keeps_what_a_pass_computed_is_copied_and_one_that_keeps_a_lock_refused() -> None:
    net = Held(1)
    net.functions.append(lambda h: h + 0 * (net.kept.update(h=h * 2) or 1))
    expected = net(X)
    assert torch.equal(copied(net)(X), expected)
    net.lock = Lock()  # type: ignore[assignment]
    with pytest.raises(ProgramRefused, match="cannot be copied") as refused:
        make_source(net, input=(5,))
    assert "locks" in str(refused.value.hint)
