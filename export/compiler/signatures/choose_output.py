"""One output of a module that gives several: a dict, a tuple, or an object with named fields."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from edge_client.errors import ProgramRefused


def choose_output(module: nn.Module, output: str | int) -> nn.Module:
    """A copy of the module whose forward gives one of its outputs, by name or number. Its parameters keep their names.

    A call of the copy raises ProgramRefused where there is no such output.
    """
    mine = copy.deepcopy(module)
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
    """Raises ProgramRefused, with the names to choose from, for outputs that are not one tensor."""
    if names := output_names(out):
        raise ProgramRefused(
            f"model {model!r} gives {_listed(out)}, expected one tensor",
            hint=f"choose one of its outputs: output={names[0]!r}; to train several, join them by torch.cat in forward",
        )


def output_names(out: object) -> list[str] | list[int]:
    """Names or numbers of several outputs, logits and other tensors first; empty for what has no parts, as a tensor."""
    if isinstance(out, Tensor):
        return []
    parts: dict[Any, Any] = {}
    if isinstance(out, Mapping):
        parts = dict(out)
    elif isinstance(out, Sequence) and not isinstance(out, str):
        parts = dict(zip(getattr(out, "_fields", range(len(out))), out, strict=True))
    return sorted(parts, key=lambda name: (name != "logits", not isinstance(parts[name], Tensor)))


def _listed(out: object) -> str:
    names = output_names(out)
    return f"{type(out).__name__} of {', '.join(map(str, names))}" if names else type(out).__name__
