"""What a copy or a trace of a module would drop in silence is refused or told."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from edge_client.errors import ProgramRefused
from export.compiler.forward_pass import ForwardPasses
from export.compiler.program import compile_program, make_source
from export.compiler.program_functions import example_inputs, function_ports
from export.compiler.tracing import trace_function


class Cooled(nn.Module):
    """Logits over a temperature, a plain number or a buffer, which falls in each training pass."""

    def __init__(self, temperature: float | Tensor) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        if isinstance(temperature, Tensor):
            self.register_buffer("temperature", temperature)
        else:
            self.temperature = temperature

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x) / self.temperature
        if isinstance(self.temperature, Tensor):
            self.temperature = self.temperature * 0.5 if self.training else self.temperature
        elif self.training:
            self.temperature = self.temperature * 0.5
        return out


class PassCounter(nn.Module):
    """Counts its passes, and fills a cache in the first."""

    def __init__(self, *, counting: bool) -> None:
        super().__init__()
        self.head, self.passes, self.cached, self.counting = nn.Linear(4, 3), 0, 0, counting

    def forward(self, x: Tensor) -> Tensor:
        self.cached = 16
        self.passes += self.counting
        out: Tensor = self.head(x)
        return out * (2 if self.passes > 1_000 else 1)


class Turned(nn.Module):
    """Features turned by angles that are trained; complex numbers, or pairs of real ones."""

    def __init__(self, *, pairs: bool) -> None:
        super().__init__()
        turn = torch.polar(torch.ones(4), torch.arange(4.0))
        self.head, self.turn = nn.Linear(8, 3), nn.Parameter(torch.view_as_real(turn) if pairs else turn)

    def forward(self, x: Tensor) -> Tensor:
        turn = self.turn if self.turn.is_complex() else torch.view_as_complex(self.turn)
        turned = torch.view_as_complex(x.reshape(-1, 4, 2)) * turn
        out: Tensor = self.head(torch.view_as_real(turned).flatten(1))
        return out


class Centred(nn.Module):
    """Features without their mean, which training keeps, as in textbooks of batch norm, where no step returns it."""

    def __init__(self, holder: dict[str, Tensor] | None = None, *, buffer: bool = False) -> None:
        super().__init__()
        self.first, self.head, self.holder = nn.Linear(4, 6), nn.Linear(6, 3), holder
        if buffer:
            self.register_buffer("mean", torch.zeros(6))
        else:
            self.mean = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        mean = h.mean(0) if self.training else self.mean if self.holder is None else self.holder["mean"]
        if self.training and self.holder is not None:
            self.holder["mean"] = mean.detach()
        elif self.training:
            self.mean = 0.9 * self.mean + 0.1 * mean.detach()
        out: Tensor = self.head(h - mean)
        return out


class Lucky(nn.Module):
    """Python draws, so that a trace would keep one draw for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x * random.uniform(0.5, 1.5) if self.training else x)  # noqa: S311 - no secret
        return out


class StillNorm(nn.Sequential):
    """Batch norm stays in evaluation mode, by the module's own word."""

    def train(self, mode: bool = True) -> StillNorm:  # noqa: FBT001, FBT002 - torch's
        super().train(mode)
        self[1].eval()
        return self


class CenterLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.zeros(3, 3))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return (out - self.centers[y]).square().mean(1)


def normed(kind: Callable[..., nn.Module] = nn.Sequential, momentum: float | None = 0.1) -> nn.Module:
    return kind(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=momentum), nn.Linear(6, 3))


def hooked(*, after: bool) -> nn.Module:
    net = nn.Linear(4, 3)
    if after:
        net.weight.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
    else:
        net.weight.register_hook(lambda gradient: gradient * 0.1)  # type: ignore[no-untyped-call]
    return net


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises against it
        return torch.jit.script(nn.Linear(4, 3))


class Softened(nn.Linear):
    """Halves the gradient of what it gives, by a hook on the tensor."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
        return out


def test_a_hook_that_changes_a_gradient_is_named_where_the_step_differs() -> None:
    layer = nn.Linear(4, 4)
    layer.register_full_backward_pre_hook(lambda _layer, of: (of[0] * 0.1,))  # type: ignore[index]
    for module, told in (
        (nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 3)), "layer 1"),
        (nn.Sequential(nn.Linear(4, 4), Softened(4, 3)), "a tensor in forward"),
    ):
        with pytest.raises(ProgramRefused, match="differs from torch") as refused:
            compile_program(module, (4,), engines=("onnx",))
        assert f"no program calls the hook on the gradient of {told}" in refused.value.hint


@pytest.mark.parametrize(
    ("module", "size", "told"),
    [
        (nn.DataParallel(nn.Linear(4, 3)), 4, "spread over devices by DataParallel"),
        (nn.Sequential(scripted()), 4, "layer 0 .* is TorchScript"),
        (normed(momentum=None), 4, "momentum=None"),
        (hooked(after=False), 4, "hook on the gradient of weight"),
        (hooked(after=True), 4, "hook on the gradient of weight"),
        (Turned(pairs=False), 8, "complex parameter turn"),
        (Cooled(4.0), 4, "differently the next time .it changes temperature"),
        (Lucky(), 4, "differently the next time"),
        (Centred(), 4, "otherwise in inference mode after a training pass"),
        (Centred({"mean": torch.zeros(6)}), 4, "otherwise in inference mode after a training pass"),
    ],
    ids=[
        "parallel",
        "script",
        "cumulative batch norm",
        "hook",
        "hook after",
        "complex",
        "temperature",
        "python's random",
        "a mean",
        "a mean in a dict",
    ],
)
def test_what_would_be_dropped_is_refused(module: nn.Module, size: int, told: str) -> None:
    with pytest.raises(ProgramRefused, match=told):
        make_source(module, input=(size,))


def test_what_the_refusals_advise_is_taken() -> None:
    make_source(Turned(pairs=True), input=(8,))
    make_source(Cooled(torch.tensor(4.0)), input=(4,))
    make_source(Centred(buffer=True), input=(4,))


def test_a_loss_with_parameters_is_refused_and_one_without_is_taken() -> None:
    with pytest.raises(ProgramRefused, match=r"CenterLoss has parameters of its own .centers"):
        make_source(nn.Linear(4, 3), input=(4,), own_loss=CenterLoss(), loss="cross-entropy")
    still = CenterLoss()
    still.centers.requires_grad = False
    make_source(nn.Linear(4, 3), input=(4,), own_loss=still, loss="cross-entropy")


def test_a_count_of_passes_is_told_and_a_cache_is_not() -> None:
    with pytest.warns(UserWarning, match="counts its training passes .it changes passes"):
        make_source(PassCounter(counting=True), input=(4,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_source(PassCounter(counting=False), input=(4,))


def test_layers_that_the_user_put_into_evaluation_mode_are_told() -> None:
    module = normed()
    module.get_submodule("1").eval()
    with pytest.warns(UserWarning, match=r"layers in evaluation mode .1."):
        make_source(module, input=(4,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_source(normed().eval(), input=(4,))  # as a loaded model comes
        make_source(normed(StillNorm).train(), input=(4,))


class Renormed(nn.Linear):
    """A constraint on the weights, as EEGNet has it."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 1.0)
        return super().forward(x)


class Clamped(nn.Linear):
    """No weight below zero."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(min=0)
        return super().forward(x)


class Constrained(nn.Linear):
    """The same constraint as the hint has it."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, torch.renorm(self.weight, 2, 0, 1.0), self.bias)


class ClampedData(nn.Linear):
    """The same by `.data`, which torch does not count as a write."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(min=0)
        return super().forward(x)


@pytest.mark.parametrize("layer", [Renormed(4, 3), Clamped(4, 3), ClampedData(4, 3)])
def test_a_forward_that_writes_its_parameters_is_refused_with_what_to_write(layer: nn.Module) -> None:
    with pytest.raises(ProgramRefused, match=r"take what a constraint gives in its place, as F\.conv2d"):
        compile_program(layer, (4,), engines=("pt2",))
    compile_program(Constrained(4, 3), (4,), engines=("pt2",))


class Averaging(nn.Module):
    """Subtracts a mean of what it saw, which it keeps by `.data`, or in the memory of another tensor."""

    def __init__(
        self, mean: Tensor, *, saved: bool = True, assigns: Callable[[Tensor, Tensor], object] | None = None
    ) -> None:
        super().__init__()
        self.head, self.assigns = nn.Linear(4, 3), assigns
        if isinstance(mean, nn.Parameter):
            self.mean = mean
        else:
            self.register_buffer("mean", mean, persistent=saved)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.assigns is not None:
            self.assigns(self.mean, self.mean.detach() * 0.9 + x.detach().mean(0) * 0.1)
        elif self.training:
            self.mean.data += (10 * x.data.mean(0)).to(self.mean.dtype)
        return self.head(x - self.mean)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "module",
    [
        Averaging(torch.zeros(4, dtype=torch.int64)),
        Averaging(torch.zeros(4), saved=False),
        Averaging(nn.Parameter(torch.zeros(4), requires_grad=False)),
        Averaging(torch.zeros(4), assigns=lambda mean, new: setattr(mean, "data", new)),
        Averaging(
            torch.zeros(4), assigns=lambda mean, new: mean.set_(new.untyped_storage(), 0, new.shape, new.stride())
        ),
        Averaging(torch.zeros(4), assigns=torch.utils.swap_tensors),
    ],
    ids=["whole numbers", "not saved", "frozen", "assigned", "set_", "swapped"],
)
def test_what_training_keeps_by_data_in_no_place_of_a_step_is_refused(module: nn.Module) -> None:
    with pytest.raises(ProgramRefused, match=r"(?s)writes mean when it trains, .* write into it, as self\.mean\.copy_"):
        make_source(module, input=(4,))


def test_a_step_moves_a_buffer_that_forward_keeps_by_data() -> None:
    module = Averaging(torch.zeros(4))
    source = make_source(module, input=(4,), loss="squared-error")
    graph = trace_function(ForwardPasses(source), "step", batch=4, dynamic=True)
    given = example_inputs(source, "step", 5)
    names = [p.name for p in function_ports(source, "step").inputs]
    moved = dict(zip((p.name for p in function_ports(source, "step").outputs), graph(*given), strict=True))
    before, x = given[names.index("buffers/mean")], given[names.index("x")]
    torch.testing.assert_close(moved["buffers/mean"], before + 10 * x.mean(0))


class OutputReplaced(nn.Linear):
    """Gives its own output another `.data`."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        out.data = out.data * 2
        return out


def test_a_tensor_of_forward_that_gets_another_data_is_refused_with_what_to_write() -> None:
    with pytest.raises(ProgramRefused, match=r"(?s)lasting_state\.py:\d+: a tensor gets another .* x\.data\.copy_"):
        compile_program(OutputReplaced(4, 3), (4,), engines=("pt2",))


class Merging(nn.Linear):
    """Adds an adapter to its weight in inference mode, as loralib's layers do."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.adapter, self.merged = nn.Parameter(torch.ones(3, 4)), False

    def train(self, mode: bool = True) -> Merging:  # noqa: FBT001, FBT002 - torch's
        if mode == self.merged:
            self.weight.data += self.adapter.data * (-1 if mode else 1)
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (0 if self.merged else nn.functional.linear(x, self.adapter))


class Untrained(nn.Linear):
    """Gives no gradient."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def diverged() -> nn.Module:
    layer = nn.Linear(4, 3)
    layer.weight.data[0, 0] = torch.nan
    return layer


def tied_by_data() -> nn.Module:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers[1].weight.data = layers[0].weight.data.t()  # type: ignore[operator]
    return layers


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Merging, "changes weight when it goes into inference mode.*merge_weights=False"),
        (lambda: Untrained(4, 3), "no trained parameter has a gradient of.*no_grad"),
        (diverged, "parameters that are not finite: weight"),
        (tied_by_data, "two parameters in one memory, 0.weight and 1.weight"),
    ],
    ids=["merged", "no gradient", "diverged", "tied by data"],
)
def test_what_no_step_can_train_is_refused_by_name_before_it_is_traced(
    make: Callable[[], nn.Module], told: str
) -> None:
    with pytest.raises(ProgramRefused, match=f"(?s){told}"):
        make_source(make(), input=(4,))


class Cached(nn.Linear):
    """Empty tensors, as a cache begins with one."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.unused = nn.Parameter(torch.empty(0))
        self.register_buffer("cache", torch.empty(0, 4))


def test_empty_tensors_are_no_part_of_what_is_trained() -> None:
    made = compile_program(Cached(), (4,), engines=("pt2",))
    assert [t.name for t in made.program.schema.tensors] == ["weight", "bias"]
