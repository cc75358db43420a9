"""One output of a module that gives several: a dict, a tuple, or an object with named fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from edge_client.errors import ProgramRefused
from export.compiler.signatures.module_copies import copied


def choose_output(module: nn.Module, output: str | int) -> nn.Module:
    """A copy of the module whose forward gives one of its outputs, by name or number. Its parameters keep their names.

    A call of the copy raises ProgramRefused where there is no such output.
    """
    mine = copied(module)
    mine.register_forward_hook(ChosenOutput(type(module).__name__, output))
    return mine


@dataclass(frozen=True)
class ChosenOutput:
    """A forward hook; torch puts what it returns in place of the module's output."""

    model: str
    output: str | int

    def __call__(self, _module: nn.Module, _given: Any, out: Any) -> Any:  # noqa: ANN401 - torch's
        names = output_names(out)
        try:
            if isinstance(self.output, int):
                return (list(out.values()) if isinstance(out, Mapping) else list(out))[self.output]
            return out[self.output] if isinstance(out, Mapping) else getattr(out, self.output)
        except (KeyError, IndexError, AttributeError, TypeError):
            raise ProgramRefused(
                f"model {self.model!r} has no output {self.output!r}: it gives {_listed(out)}",
                hint=f"use one of {', '.join(map(repr, names))}" if names else "leave `output` out",
            ) from None


def refuse_several_outputs(model: str, out: object) -> None:
    """Raises ProgramRefused, with what to write for one and for several, for outputs that are not one tensor."""
    if names := output_names(out):
        raise ProgramRefused(
            f"model {model!r} gives {_listed(out)}, expected one tensor",
            hint=f"choose one of its outputs: fc.compile(..., output={names[0]!r}), or a module around it: "
            f"def forward(self, x): return self.body(x){_access(out, names[0])}; {_joined(out)}",
        )


def _access(out: object, name: str | int) -> str:
    return f"[{name!r}]" if isinstance(out, Mapping) or isinstance(name, int) else f".{name}"


def _joined(out: object) -> str:
    """How a loss gets two outputs of the module at once."""
    tensors = {name: part for name, part in _parts(out).items() if isinstance(part, Tensor) and part.dim() > 1}
    flat = ", ".join(f"out{_access(out, name)}.flatten(1)" for name in tensors) or "one.flatten(1), two.flatten(1)"
    sizes = [part[0].numel() for part in tensors.values()]
    return (
        f"for a loss of several, return torch.cat([{flat}], 1) there, and in the loss "
        f"outputs.split({sizes or '[..., ...]'}, 1)"
    )


def output_names(out: object) -> list[str] | list[int]:
    """Names or numbers of several outputs, logits and other tensors first; empty for what has no parts, as a tensor."""
    parts = _parts(out)
    return sorted(parts, key=lambda name: (name != "logits", not isinstance(parts[name], Tensor)))


def _parts(out: object) -> dict[Any, Any]:
    """The outputs by name or number, as the module gives them."""
    if isinstance(out, Mapping):
        return dict(out)
    if is_dataclass(out) and not isinstance(out, type):
        return {field.name: getattr(out, field.name) for field in fields(out)}
    if isinstance(out, Sequence) and not isinstance(out, str):
        return dict(zip(getattr(out, "_fields", range(len(out))), out, strict=True))
    return {}


def _listed(out: object) -> str:
    names = output_names(out)
    return f"{type(out).__name__} of {', '.join(map(str, names))}" if names else type(out).__name__
