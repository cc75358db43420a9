"""Load a user's own torch module by import path: `package.module:Class`, called with arguments from JSON.

An exception of the user's code becomes one error message that names this code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from edge_client.errors import FedcentersError, ProgramRefused, UsageError
from export.compiler.operator_watch import line_of
from export.own_thread import own_random
from export.plugins import describe_error, import_path

Arguments = Mapping[str, Any] | Sequence[Any]  # by name, or in order


def load_model(path: str, arguments: Arguments, *, seed: int, recorded: bool = False) -> nn.Module:
    """Import, call, check. The same seed gives the same weights; torch's global generator keeps its state.

    `path` may also name a module that exists already, which then takes no arguments. `recorded`: path and arguments
    come from a file and not from the command line, so only a class of torch modules is called: a folder must not be
    able to run a function like os:system. Raises UsageError.
    """
    made = import_path(path)
    if recorded and not isinstance(made, nn.Module) and not (isinstance(made, type) and issubclass(made, nn.Module)):
        raise UsageError(
            f"program.json names {path}, which is no class of torch modules and could do anything when it is called",
            hint=f"if you trust this folder, name it yourself: --model {path}",
        )
    if isinstance(made, nn.Module) and not arguments:
        return made
    if isinstance(made, nn.Module) or not callable(made):
        raise UsageError(f"{path} cannot be called", hint="name a class, or a function that returns a torch module")
    args, kwargs = ((), dict(arguments)) if isinstance(arguments, Mapping) else (tuple(arguments), {})
    try:
        with own_random(seed):
            made = made(*args, **kwargs)
    except Exception as wrong:
        raise UsageError(
            f"calling {path} failed: {describe_error(wrong)}",
            hint="pass what it needs with --model-args: a JSON object by name, or a JSON list in order",
        ) from wrong
    if not isinstance(made, nn.Module):
        raise UsageError(
            f"{path} gives {type(made).__name__}, which is no torch.nn.Module",
            hint="name the class of the network itself, or a function that returns one",
        )
    return made


@contextmanager
def refusing_errors_of(name: str) -> Iterator[None]:
    """Within it any other exception of the user's forward, as under the tracer, becomes ProgramRefused."""
    try:
        yield
    except (FedcentersError, ImportError):
        raise
    except Exception as wrong:
        line = line_of(wrong)
        raise ProgramRefused(
            f"model {name!r} cannot become a training program{f' at {line}' if line else ''}: {describe_error(wrong)}",
            hint="forward must take any batch of such samples, and must not decide by the values of a tensor",
        ) from wrong
