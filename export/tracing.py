"""A training program's function becomes one plain graph: forward, backward and update, core operators only.

Refuses, by name, an operator that some device could not run, and says which layer used it. No file, no runtime.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.func import functional_call, functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from edge_client.errors import ProgramRefused
from edge_client.protocol.program import Port
from export.decompositions import table
from export.functions import GRAPHS, Source, example, ports
from export.operators import RANDOM, SUPPORTED, Unsupported

MAX_BATCH = 65_536


def trace(source: Source, function: str, *, batch: int, dynamic: bool) -> nn.Module:
    """One function as a graph over flat tensors; `dynamic`: for any batch size, and `batch` is only the example's."""
    inputs = ports(source, function).inputs
    graph = _graph(source, function, example(source, function, batch), inputs if dynamic else ())
    _refuse_unsupported(source, graph)
    return _Flat(graph).eval()


def exported(source: Source, function: str, graph: nn.Module, *, batch: int) -> ExportedProgram:
    """A dynamic graph of `trace` as torch's exported program, batch size from 1."""
    dims = Dim("batch", min=1, max=MAX_BATCH)
    inputs = ports(source, function).inputs
    shapes = tuple({i: dims for i, d in enumerate(p.shape) if d == "batch"} or None for p in inputs)
    with quiet_warnings():
        made = torch.export.export(
            graph, tuple(example(source, function, batch)), dynamic_shapes=(shapes,), strict=False
        )
    for node in made.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine are nobody's business
        node.meta.pop("nn_module_stack", None)
    made.example_inputs = None
    return made


class _Flat(nn.Module):
    """torch.export wants a module; this one takes the graph's flat inputs."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, *flat: Tensor) -> tuple[Tensor, ...]:
        return cast("tuple[Tensor, ...]", self.graph(*flat))


def _graph(source: Source, function: str, args: Sequence[Tensor], dynamic: Sequence[Port]) -> fx.GraphModule:
    """`dynamic`: the ports whose "batch" dimension stays a symbol; none for a fixed batch."""
    fake = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None, allow_non_fake_inputs=True)
    mine = [_fake(fake, a, dynamic[i].shape if dynamic else ()) for i, a in enumerate(args)]
    _refuse_random(source)
    try:
        with ExitStack() as stack:
            stack.enter_context(quiet_warnings())
            # Without these, attention, LSTM and GRU arrive as one opaque operator each.
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            stack.enter_context(fake)
            stack.enter_context(enable_python_dispatcher())
            traced = make_fx(functionalize(GRAPHS[function](source)), decomposition_table=dict(table()))(*mine)
    except Unsupported as refused:
        raise _refusal(source, refused.operator, refused.reason) from None
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def _fake(mode: FakeTensorMode, value: Tensor, shape: Sequence[Any]) -> Tensor:
    kinds = [DimDynamic.DYNAMIC if d == "batch" else DimDynamic.STATIC for d in shape]
    context: Any = StatelessSymbolicContext(dynamic_sizes=kinds) if "batch" in shape else None
    return mode.from_tensor(value, static_shapes=context is None, symbolic_context=context)


def _refuse_unsupported(source: Source, graph: fx.GraphModule) -> None:
    """Whatever is neither arithmetic on sizes nor a supported operator."""
    for node in graph.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001 - no public name
            continue
        name = _plain(node.target)
        if name in RANDOM:
            raise _refusal(source, name, "a program cannot draw random numbers")
        if name not in SUPPORTED:
            raise _refusal(source, name, "no runtime of ours is known to run it")


def _refuse_random(source: Source) -> None:
    """Dropout and the like, looked for in training mode even when only `infer` is traced."""
    drawn = sorted(RANDOM & set(_operators_by_layer(source)))
    if drawn:
        raise _refusal(source, drawn[0], "a program cannot draw random numbers")


def _refusal(source: Source, operator: str, reason: str) -> ProgramRefused:
    """Names the operator and the layers that used it, or its forward counterpart."""
    used = _operators_by_layer(source)
    stem = operator.removeprefix("aten.").removesuffix("_backward").removesuffix("_with_indices").strip("_")
    where = used.get(operator) or next((layers for name, layers in used.items() if stem in name), [])
    layers = f"layer {', '.join(where)}" if where else f"some layer of {type(source.module).__name__}"
    return ProgramRefused(
        f"model {source.name!r} cannot become a training program: {layers} uses {operator}: {reason}",
        hint="leave the layer out or replace it (dropout: p = 0; pooling: windows that do not overlap)",
    )


def _operators_by_layer(source: Source) -> dict[str, list[str]]:
    """Operator -> "name (Class)" of the layers that call it in one training-mode pass over two samples."""
    watch = _Watch()
    x = torch.zeros(2, *source.input, dtype=getattr(torch, source.dtype))
    state = {k: v.detach().clone() for k, v in source.module.state_dict().items()}
    handles = [h for name, layer in source.module.named_modules() for h in watch.follow(name, layer)]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), watch:
            functional_call(source.module.train(), state, (x,))
    finally:
        for handle in handles:
            handle.remove()
    return {name: list(layers) for name, layers in watch.seen.items()}


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class hook
    """Notes which layer is running when an operator is called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stack: list[str] = []
        self.seen: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def follow(self, name: str, layer: nn.Module) -> list[Any]:
        label = f"{name or 'the model itself'} ({type(layer).__name__})"
        return [
            layer.register_forward_pre_hook(lambda *_: self.stack.append(label)),
            layer.register_forward_hook(lambda *_: self.stack.pop() and None),
        ]

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        if self.stack:
            self.seen[_plain(func)][self.stack[-1]] = None
        return func(*args, **(kwargs or {}))


def _plain(operator: Any) -> str:  # noqa: ANN401 - an OpOverload
    """aten.mul.Tensor -> "aten.mul"."""
    return str(operator.overloadpacket).removeprefix("torch.ops.")


@contextmanager
def quiet_warnings() -> Iterator[None]:
    """Torch warns about its own internals while it traces."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
