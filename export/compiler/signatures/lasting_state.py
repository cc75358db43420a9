"""What a module keeps beside its tensors, which no training program can hold: a copy or a trace drops it in silence.

The comparison with torch cannot see any of it, as it runs copies of the module, each for one step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import FunctionType, SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from edge_client.errors import ProgramRefused
from edge_client.printable import first_of
from export.compiler.signatures.module_copies import cell_contents
from export.own_thread import own_random, replaced_here

PASSES = 4  # a number that still moves after the second one counts the passes; a cache is filled by then
NAMED = 3  # of many layers
MODAL = (_BatchNorm, nn.modules.dropout._DropoutNd)  # noqa: SLF001 - what training mode changes
PLACES = ("_parameters", "_buffers", "_modules")
HOOK_HINT = "change the gradient in forward: a torch.autograd.Function with a backward of its own compiles"
BESIDE_HINT = "read it by its name in forward, as for w in (self.a, self.b), or keep parameters in an nn.ParameterList"
Numbers = Mapping[str, float]


def refuse_unheld(name: str, module: nn.Module) -> None:
    """Raise ProgramRefused for hooks on gradients, parameters that no step can hold, and batch norm that counts."""
    _refuse_tensors(name, module)
    _refuse_twofold(name, module)
    for place, layer in module.named_modules():
        kind = type(layer).__name__
        if isinstance(layer, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ProgramRefused(f"model {name!r} is spread over devices by {kind}", hint="give its `.module`")
        if isinstance(layer, torch.jit.ScriptModule):
            raise ProgramRefused(
                f"{f'layer {place}' if place else 'the model itself'} of {name!r} is TorchScript ({kind}), which "
                "torch.export does not read",
                hint="give the torch.nn.Module that was scripted or traced",
            )
        if isinstance(layer, _BatchNorm) and layer.momentum is None and layer.track_running_stats:
            raise ProgramRefused(
                f"layer {place or 'the model itself'} of {name!r} averages its statistics over all batches "
                "(momentum=None), and no program counts them",
                hint="give batch norm a momentum, as 0.1",
            )


def check_tensors(name: str, module: nn.Module) -> None:
    """Refuse parameters that are not finite, and those that inference mode changes. `module` is a private copy."""
    held = {place: p.detach().clone() for place, p in module.named_parameters()}
    lost = [n for n, p in module.named_parameters() if bool((p.isnan() | (p.isinf() & p.requires_grad)).any())]
    if lost:  # a mask of infinities may be a frozen parameter
        raise ProgramRefused(
            f"model {name!r} has parameters that are not finite: {first_of(lost, NAMED)}",
            hint="give the weights of a training that did not diverge",
        )
    module.eval()
    moved = [place for place, p in module.named_parameters() if not torch.equal(p, held[place])]
    module.train()
    if moved:
        raise ProgramRefused(
            f"model {name!r} changes {first_of(moved, NAMED)} when it goes into inference mode, and no program does",
            hint="merge nothing there: give layers of loralib merge_weights=False",
        )


def _refuse_tensors(name: str, module: nn.Module) -> None:
    for place, value in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(value):
            raise ProgramRefused(
                f"model {name!r} has a lazy layer: {place} has no size yet", hint="call the model on a batch once"
            )
        if value.is_meta:
            raise ProgramRefused(
                f"model {name!r} has no numbers: {place} is on the device meta",
                hint="call model.to_empty(device='cpu') and load its weights, or make it on the CPU",
            )
        if value.is_complex() and value.requires_grad:
            raise ProgramRefused(
                f"model {name!r} has a complex parameter {place}, which no runtime of ours trains",
                hint="make it nn.Parameter(torch.view_as_real(...)), and call torch.view_as_complex in forward",
            )
    for place, value in module.named_parameters():
        if value.requires_grad and (value._backward_hooks or value._post_accumulate_grad_hooks):  # noqa: SLF001 - no public name
            raise ProgramRefused(
                f"model {name!r} has a hook on the gradient of {place}, which no program can call",
                hint=HOOK_HINT,
            )


def _refuse_twofold(name: str, module: nn.Module) -> None:
    """Raise ProgramRefused for two parameters in one memory, as `b.weight.data = a.weight.data` makes them."""
    first = dict[int, str]()
    for place, value in module.named_parameters():
        known = first.setdefault(value.data_ptr(), place)
        if known != place and value.numel() and value.requires_grad:
            raise ProgramRefused(
                f"model {name!r} has two parameters in one memory, {known} and {place}: a program trains them apart",
                hint="use one of them in both places: self.b.weight = self.a.weight, or F.linear(h, self.a.weight.t())",
            )


def hooks_on_gradients(module: nn.Module, x: Tensor) -> str:
    """Whose backward hooks a program does not call: of layers, and of tensors in a training pass on x; "" for none."""
    calls = list[object]()

    def noted(_: Tensor, hook: object) -> SimpleNamespace:
        calls.append(hook)
        return SimpleNamespace(remove=lambda: None)

    with own_random(), replaced_here(Tensor, "register_hook", noted):
        module.train()(x)
    layers = [place for place, layer in module.named_modules() if layer._backward_hooks or layer._backward_pre_hooks]  # noqa: SLF001 - no public name
    told = [f"layer {first_of(layers, NAMED)}"] if layers else []
    return " and ".join(told + (["a tensor in forward (register_hook)"] if calls else []))


def refuse_unmoved(name: str, module: nn.Module, out: Tensor, again: Callable[[], Tensor]) -> None:
    """Raise ProgramRefused where `out`, of a pass that was given other tensors, has a gradient for a parameter.

    Such a one was reached by another way than its name: of a list or a function, of the module that this is a copy of,
    or of none. A step moves what it is given alone. `again` is the same pass: a parameter of one pass alone was made in
    forward.
    """
    own, left = {id(p): place for place, p in module.named_parameters()}, _parameters_behind(out)
    if left:
        kept_on = {id(p) for p in _parameters_behind(again())}
        left = [p for p in left if id(p) in kept_on]
    if beside := [own[id(p)] for p in left if id(p) in own]:
        kept = kept_twice(module)
        raise ProgramRefused(
            f"model {name!r} reads {first_of(beside, NAMED)} beside {'its' if len(beside) == 1 else 'their'} own place"
            f"{f', in {kept}' if kept else ''}, where no step moves it",
            hint=BESIDE_HINT,
        )
    if left:
        raise ProgramRefused(
            f"model {name!r} computes with a parameter of shape {tuple(left[0].shape)} that is none of its own, so no "
            "step moves it",
            hint="keep layers in attributes, an nn.ModuleList or an nn.ParameterList; reach them by forward's self, "
            "not by a global variable, a set or a cached function; compute in forward what comes from parameters, also "
            "a view; give what stays as it is requires_grad_(False)",
        )


def _parameters_behind(out: Tensor) -> list[nn.Parameter]:
    """Those that the output has a gradient for."""
    todo, seen, found = [out.grad_fn], set[object](), list[nn.Parameter]()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
            held = getattr(node, "variable", None) if node.name() == "torch::autograd::AccumulateGrad" else None
            found += [held] if isinstance(held, nn.Parameter) else []
    return found


def kept_hint(module: nn.Module) -> str:
    """What to do about a buffer that an attribute holds beside its own place; "" for none."""
    kept = kept_twice(module)
    return f"{kept} holds a buffer beside its own place, where no step moves it: {BESIDE_HINT}" if kept else ""


def kept_twice(module: nn.Module) -> str:
    """An attribute that holds a tensor of the module beside its own place, as `self.ws = [self.a, self.b]`; or "".

    Where a pass gets other tensors, it does not find them there. torch's recurrent layers keep such a list, and are
    replaced as a whole.
    """
    own = {id(value) for value in (*module.parameters(), *module.buffers())}
    for place, layer in module.named_modules():
        for name, value in vars(layer).items():
            plain = name not in PLACES and not isinstance(layer, nn.RNNBase)
            if plain and any(id(held) in own for held in _values(value)):
                return f"{place}.{name}" if place else name
    return ""


def _values(value: object) -> list[object]:
    """What an attribute holds, of containers each value, of functions what they name."""
    held = tree_leaves(value)
    cells = [cell for leaf in held if isinstance(leaf, FunctionType) for cell in leaf.__closure__ or ()]
    return [*held, *(content for cell in cells for content in cell_contents(cell))]


def warn_of_evaluation_mode(name: str, module: nn.Module, trained: nn.Module) -> None:
    """Tell of layers that the user has put into evaluation mode; `trained` is a copy in the mode of a step."""
    if not module.training:  # as loaded models come: no single layer was chosen
        return
    now = dict(trained.named_modules())
    moved = [
        place
        for place, layer in module.named_modules()
        if isinstance(layer, MODAL) and not layer.training and now[place].training
    ]
    if moved:
        warnings.warn(
            f"model {name!r} has layers in evaluation mode ({first_of(moved, NAMED)}): a step puts all layers into "
            "training mode; where they must stay, give the model a method `train` that says so",
            stacklevel=4,
        )


def check_repeats(name: str, module: nn.Module, forward: Callable[[bool], Tensor]) -> None:
    """Refuse a module that answers the same call otherwise the next time, and tell of one that counts its calls.

    `forward` is one pass of the module, in training mode or not, from the same tensors and the same random numbers.
    """
    answers, counts = list[Tensor](), list[Numbers]()
    before = forward(False)  # noqa: FBT003 - torch's `train`
    for _ in range(PASSES):
        answers.append(forward(True))  # noqa: FBT003
        counts.append(_numbers(module))
    if any(not isinstance(answer, Tensor) for answer in answers):  # refused elsewhere, by the names of its outputs
        return
    if any(_differ(answer, answers[0]) for answer in answers):
        raise ProgramRefused(
            f"model {name!r} answers the same training batch differently the next time{_told(counts)}",
            hint="draw random numbers with torch, and keep what changes from step to step in a float buffer",
        )
    if _differ(forward(False), before):  # noqa: FBT003
        raise ProgramRefused(
            f"model {name!r} answers otherwise in inference mode after a training pass{_told(counts)}, though no "
            "parameter or buffer has changed",
            hint="keep what training collects for inference, as means of features, in a float buffer: "
            "self.register_buffer('mean', torch.zeros(n))",
        )
    if told := _told(counts):
        warnings.warn(f"model {name!r} counts its training passes{told}: no program does", stacklevel=4)


def _differ(one: Tensor, other: Tensor) -> bool:
    size = float(other.nan_to_num(0, 0, 0).abs().max()) if other.numel() else 0.0
    return one.shape != other.shape or not torch.allclose(one, other, 1e-4, 1e-5 * size, equal_nan=True)


def _numbers(module: nn.Module) -> Numbers:
    """The plain numbers that the layers hold as attributes."""
    return {
        f"{place}.{name}" if place else name: value
        for place, layer in module.named_modules()
        for name, value in vars(layer).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _told(counts: list[Numbers]) -> str:
    """Which numbers still move from pass to pass; "" for none."""
    moved = [name for name, value in counts[-1].items() if counts[1].get(name) != value]
    return f" (it changes {', '.join(moved[:NAMED])})" if moved else ""
