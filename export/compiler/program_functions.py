"""The three functions of a training program, over flat lists of tensors, and the names and shapes of their ports.

    step(w, buffers, velocity, anchor, linear, x, y, q, [noise,] lr, momentum, mu) -> (w', buffers', velocity', loss)
    evaluate(w, buffers, x, y) -> (loss per sample, logits)        batch norm in inference mode
    infer(w, buffers, x) -> logits

Step: g = d/dw [sum q_j loss_j] + linear + mu (w - anchor); velocity' = momentum velocity + g; w' = w - lr velocity'.
noise: uniform numbers for what a training pass draws at random (random_ops.py); a model that draws nothing has none.
Flat: one tensor per parameter or buffer in the schema's order, then the other inputs.

Frozen parameters, integer buffers and buffers that torch does not save are constants: no step changes or sends them.
Each graph takes the constants after its ports, frozen parameters first (adapters/). Tracing makes the others a part of
the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, grad_and_value

from edge_client.protocol.program import IGNORED, Dimension, Function, Loss, Port, class_axis
from edge_client.protocol.samples.input_parts import Parts
from edge_client.protocol.task import Schema
from export.compiler.adapters.frozen import Frozen
from export.compiler.losses.sample_losses import POSITION_LOSSES, LossFunction, own_losses, per_sample_loss
from export.compiler.random_ops import NoiseReader
from export.compiler.sgd_step import SgdStep
from export.compiler.signatures.module_copies import copied
from export.compiler.signatures.packed_inputs import example_rows
from export.data_attribute import DetachedData, same_memory
from export.float64_mode import as_in
from export.own_thread import own_random

FlatTensors = tuple[Tensor, ...]
Graph = Callable[..., FlatTensors]
IGNORED_SHARE = 0.125  # of the example's positions
SCALARS = ("lr", "momentum", "mu")


@dataclass(frozen=True, kw_only=True)
class TraceSource:
    """What a program is compiled from. `module` is a private copy without batch norm's counters (`private_copy`)."""

    name: str
    module: nn.Module
    schema: Schema
    input: tuple[int, ...]
    target: tuple[int, ...]  # one sample's output
    loss: Loss
    dtype: str  # "float32" or "float64"
    noise: int = 0  # random numbers that a training pass draws per sample
    shared_draws: frozenset[int] = frozenset()  # which of its draws are one for the whole batch, counted from 0
    own_loss: LossFunction | None = None  # in place of `loss`, which then only says what y is
    own_targets: tuple[int, ...] | None = None  # one sample's numbers for such a loss, where they are not as the output
    frozen: Frozen | None = None
    parts: Parts = ()  # what a packed sample holds; the module cuts it apart

    @property
    def params(self) -> list[str]:
        return [t.name for t in self.schema.tensors if t.role == "p"]

    @property
    def buffers(self) -> list[str]:
        return [t.name for t in self.schema.tensors if t.role == "b"]

    @property
    def constants(self) -> dict[str, Tensor]:
        """The tensors that are not in the schema, by name, the frozen parameters first; no step changes them."""
        held = tensors_of(self.module)
        return {name: held[name] for name in self.constant_names}

    @property
    def constant_names(self) -> list[str]:
        """The names of `constants`. While torch traces, each tensor that is touched costs it a node."""
        moving, first = {t.name for t in self.schema.tensors}, self.frozen_names
        every = (name for name, _ in (*self.module.named_parameters(), *self.module.named_buffers()))
        return list(dict.fromkeys([*first, *(name for name in every if name not in moving)]))

    @property
    def frozen_names(self) -> list[str]:
        return [] if self.frozen is None else [t.name for t in self.frozen.schema.tensors]

    @property
    def frozen_tensors(self) -> list[Tensor]:
        """What the files of engines take after their ports; each its own object, as exporters merge others."""
        return [value.clone() for value in list(self.constants.values())[: len(self.frozen_names)]]

    @property
    def has_labels(self) -> bool:
        """Whether the port y takes class labels as numbers; else it takes probabilities or numbers to predict."""
        return self.loss in POSITION_LOSSES or (self.own_loss is not None and self.loss == "cross-entropy")

    @property
    def y_shape(self) -> tuple[int, ...]:
        """One sample's part of the port y."""
        if self.has_labels:
            axis = class_axis(self.loss, self.target)
            return self.target[:axis] + self.target[axis + 1 :]
        return self.target if self.own_targets is None else self.own_targets

    def shape(self, name: str) -> tuple[int, ...]:
        """Torch's shape of a parameter or buffer."""
        return next(t.shape for t in self.schema.tensors if t.name == name)


class BatchNormOfOneDevice(nn.BatchNorm2d):
    """nn.SyncBatchNorm on one device alone; torch's own wants a GPU and batch norm's counter."""

    def _check_input_dim(self, _input: Tensor) -> None: ...


def private_copy(module: nn.Module, dtype: str) -> nn.Module:
    """A copy in `dtype` on the CPU without batch norm's integer counter, which is not trained and breaks tracing.

    Complex tensors, which are constants, stay as they are: `to` would drop their imaginary part.
    """
    mine = copied(module).cpu()
    mine = mine.double() if dtype == "float64" else mine.float()
    first: dict[int, str] = {}
    for name, buffer in module.named_buffers(remove_duplicate=False):
        known = first.setdefault(id(buffer), name)
        if known != name:  # a buffer in two places: to() keeps shared parameters shared, but not shared buffers
            layer, _, own = name.rpartition(".")
            setattr(mine.get_submodule(layer), own, mine.get_buffer(known))
    for layer_ in mine.modules():
        if isinstance(layer_, nn.SyncBatchNorm):
            layer_.__class__ = BatchNormOfOneDevice  # type: ignore[assignment]
        if getattr(layer_, "num_batches_tracked", None) is not None:
            layer_.num_batches_tracked = None  # type: ignore[assignment]
    return mine


def with_complex_attributes(module: nn.Module, dtype: str = "float32") -> nn.Module:
    """The module, changed: its complex buffers and frozen parameters are plain attributes.

    An attribute is a constant, of which ComplexPair reads both parts; a buffer would be a complex input of the graph.
    For a program in float64 it is of that width, as a module's `to(torch.float64)` leaves complex numbers.
    """
    for layer in module.modules():
        for held in (layer._parameters, layer._buffers):  # noqa: SLF001 - no public name takes a parameter out
            for name in [name for name, value in held.items() if value is not None and value.is_complex()]:
                kept = held.pop(name).detach()  # type: ignore[union-attr]
                vars(layer)[name] = kept.to(torch.complex128) if dtype == "float64" else kept
    return module


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name, a shared one once, saved by torch or not; detached, not copied."""
    return {name: value.detach() for name, value in (*module.named_parameters(), *module.named_buffers())}


def tensor_places(module: nn.Module) -> dict[str, str]:
    """Every place that holds a tensor -> the name by which `tensors_of` knows it. A layer used twice has one place."""
    first: dict[int, str] = {}
    out: dict[str, str] = {}
    for prefix, layer in module.named_modules():
        for members in (layer.named_parameters, layer.named_buffers):
            for name, value in members(prefix=prefix, recurse=False, remove_duplicate=False):
                out[name] = first.setdefault(id(value), name)
    return out


def call_module(module: nn.Module, state: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward with these tensors (names of `tensors_of`) -> the output, and what each place holds afterwards.

    The pass may write into a tensor or replace it. torch's own tying of weights is off: where one layer is used in two
    places, it would leave the given tensors in the module.
    """
    held = {place: state[name] for place, name in tensor_places(module).items()}
    out = functional_call(module, held, (x,), tie_weights=False)
    return out, held


def changed_places(source: TraceSource) -> tuple[set[str], set[str], set[str]]:
    """The places that a training pass gives another tensor, those it writes into, those to whose it gives other memory.

    `x.data = new` and `x.set_(new)` do the last.
    """
    state = {name: value.clone() for name, value in tensors_of(source.module).items()}
    before = {name: (value._version, value.detach()) for name, value in state.items()}  # noqa: SLF001 - no other way to see a write
    with own_random(), torch.no_grad(), DetachedData(), as_in(source.dtype):
        _, held = call_module(source.module.train(), state, example_inputs(source, "infer", 2)[-1])
    places = tensor_places(source.module).items()
    replaced = {place for place, name in places if held[place] is not state[name]}
    written = {place for place, name in places if state[name]._version != before[name][0]}  # noqa: SLF001
    return replaced, written, {place for place, name in places if not same_memory(state[name], before[name][1])}


def sample_losses(source: TraceSource, out: Tensor, y: Tensor) -> Tensor:
    """[batch]: the source's loss of outputs [batch, *target] and the port y."""
    if source.own_loss is not None:
        return own_losses(source.own_loss, out, y, labels=source.has_labels)
    return per_sample_loss(source.loss, out, y)


def step_graph(source: TraceSource) -> Graph:
    """One proximal step of SGD with momentum, as a function of flat tensors; `source.module` is in training mode."""
    params, buffers, fixed, module = source.params, source.buffers, source.constant_names, source.module

    def step(*flat: Tensor) -> FlatTensors:
        rest = iter(flat)
        w, b, velocity, anchor, linear = (_named(names, rest) for names in (params, buffers, params, params, params))
        x, y, q = next(rest), next(rest), next(rest)
        if source.noise:
            next(rest)  # `flat_graph` has it already
        lr, momentum, mu, *constants = rest

        def objective(w: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            state = {**_named(fixed, iter(constants)), **w, **{name: value.clone() for name, value in b.items()}}
            out, after = call_module(module, state, x)
            return (q * sample_losses(source, out, y)).sum(), {name: after[name] for name in buffers}

        g, (loss, written) = grad_and_value(objective, has_aux=True)(w)
        new, v = SgdStep(lr=lr, momentum=momentum, mu=mu).step(w, velocity, g, linear, anchor)
        return (*new.values(), *(written[k] for k in buffers), *v.values(), loss)

    return step


def evaluate_graph(source: TraceSource) -> Graph:
    """Loss per sample [batch] and logits [batch, *target]."""
    infer, after = infer_graph(source), len(source.constant_names)

    def evaluate(*flat: Tensor) -> FlatTensors:
        y = len(flat) - after - 1
        (out,) = infer(*flat[:y], *flat[y + 1 :])
        return sample_losses(source, out, flat[y]), out

    return evaluate


def infer_graph(source: TraceSource) -> Graph:
    """Logits [batch, *target]; `source.module` is in evaluation mode."""
    fixed = source.constant_names

    def infer(*flat: Tensor) -> FlatTensors:
        rest = iter(flat)
        w, b = _named(source.params, rest), _named(source.buffers, rest)
        x, *constants = rest
        state = {**_named(fixed, iter(constants)), **w, **b}
        return (call_module(source.module, state, x)[0],)

    return infer


GRAPHS = {"step": step_graph, "evaluate": evaluate_graph, "infer": infer_graph}


def flat_graph(source: TraceSource, function: str, transform: Callable[[Graph], Graph]) -> Graph:
    """One of GRAPHS, its random operators fed from the port "noise". `transform` (torch.func's) applies inside that."""
    inner = transform(GRAPHS[function](source))
    names = [p.name for p in function_ports(source, function).inputs]
    if "noise" not in names:
        return inner
    at = names.index("noise")

    def fed(*flat: Tensor) -> FlatTensors:
        with NoiseReader(flat[at], source.shared_draws) as draws:
            out = inner(*flat)
        draws.check()
        return out

    return fed


def _named(names: Sequence[str], values: Iterator[Tensor]) -> dict[str, Tensor]:
    return {name: next(values) for name in names}


def function_ports(source: TraceSource, function: str) -> Function:
    """The ordered inputs and outputs of one function; engines use these names."""

    def port(name: str, shape: Sequence[Dimension] = ()) -> Port:
        return Port(name=name, dtype=source.dtype, shape=tuple(shape))

    def group(prefix: str, names: Sequence[str]) -> list[Port]:
        return [port(f"{prefix}/{n}", source.shape(n)) for n in names]

    w, b = group("w", source.params), group("buffers", source.buffers)
    x, logits = port("x", ("batch", *source.input)), port("logits", ("batch", *source.target))
    y = port("y", ("batch", *source.y_shape))
    if function == "infer":
        return Function(inputs=(*w, *b, x), outputs=(logits,))
    if function == "evaluate":
        return Function(inputs=(*w, *b, x, y), outputs=(port("loss", ("batch",)), logits))
    velocity = group("velocity", source.params)
    pulls = [*group("anchor", source.params), *group("linear", source.params)]
    samples = [x, y, port("q", ("batch",))] + ([port("noise", ("batch", source.noise))] if source.noise else [])
    return Function(
        inputs=(*w, *b, *velocity, *pulls, *samples, *(port(name) for name in SCALARS)),
        outputs=(*w, *b, *velocity, port("loss")),
    )


def example_inputs(source: TraceSource, function: str, batch: int, seed: int = 0) -> list[Tensor]:
    """Inputs to trace and to measure with: near the model's own weights, w != anchor, nothing zero, q not constant.

    Every tensor is its own object, as exporters merge a tensor that is passed twice.
    """
    draw = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, source.dtype)
    state, tokens = tensors_of(source.module), vocabulary_size(source.module)

    def samples(shape: Sequence[int]) -> Tensor:
        if source.parts:
            return example_rows(source.parts, batch, draw, dtype)
        return torch.randint(tokens, list(shape), generator=draw).to(dtype) if tokens else normal(shape, 1.0)

    def normal(shape: Sequence[int], scale: float) -> Tensor:
        return torch.randn(list(shape), generator=draw, dtype=dtype) * scale

    def value(port: Port) -> Tensor:
        kind, _, name = port.name.partition("/")
        shape = [batch if d == "batch" else d for d in port.shape]
        draws: dict[str, Callable[[], Tensor]] = {
            "w": lambda: state[name] + normal(shape, 0.05),
            "anchor": lambda: state[name] + normal(shape, 0.05),
            "buffers": lambda: state[name] * (1 + normal(shape, 0.1).abs()) + 0.1,
            "velocity": lambda: normal(shape, 0.05),
            "linear": lambda: normal(shape, 0.05),
            "x": lambda: samples(shape),
            "y": lambda: _example_targets(source, shape, draw),
            "q": lambda: torch.softmax(normal(shape, 1.0), -1),
            "noise": lambda: torch.rand(shape, generator=draw).to(dtype),  # multiples of 2^-24, as devices draw them
            "lr": lambda: torch.tensor(0.1, dtype=dtype),
            "momentum": lambda: torch.tensor(0.5, dtype=dtype),
            "mu": lambda: torch.tensor(0.01, dtype=dtype),
        }
        return draws[kind]()

    return [value(port) for port in function_ports(source, function).inputs]


def _example_targets(source: TraceSource, shape: Sequence[int], draw: torch.Generator) -> Tensor:
    """Labels, of which a loss per position sees some that are ignored; numbers from 0 to 1; or probabilities."""
    dtype = getattr(torch, source.dtype)
    if source.has_labels:
        y = torch.randint(source.target[class_axis(source.loss, source.target)], list(shape), generator=draw)
        if source.own_loss is None:
            y = torch.where(torch.rand(list(shape), generator=draw) < IGNORED_SHARE, IGNORED, y)
        return y.to(dtype)
    if source.own_loss is not None:
        return torch.rand(list(shape), generator=draw).to(dtype)
    return torch.softmax(torch.randn(list(shape), generator=draw, dtype=dtype), -1)


def whole_numbers(source: TraceSource) -> int:
    """Samples drawn as whole numbers below this suit the model; 0: as real numbers."""
    if source.parts:
        return min((part.below for part in source.parts if part.below), default=0)
    return vocabulary_size(source.module)


def vocabulary_size(module: nn.Module) -> int:
    """How many tokens every embedding of the module has; 0 without embeddings. Samples are drawn from these.

    Of a traced module, as a run's folder keeps it, the graph tells its embeddings.
    """
    layers = [*module.modules()]
    tables = [layer.num_embeddings for layer in layers if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    for traced in (layer for layer in layers if isinstance(layer, fx.GraphModule)):
        nodes = [node.args[0] for node in traced.graph.nodes if node.target is torch.ops.aten.embedding.default]
        names = [str(node.target) for node in nodes if isinstance(node, fx.Node) and node.op == "get_attr"]
        tables += [len(attrgetter(name)(traced)) for name in names]
    return min(tables, default=0)
