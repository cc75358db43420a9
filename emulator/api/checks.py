"""What users confuse, said before anything is trained, and hints of the command line in Python's words."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from inspect import signature

from coordinator.strategies.registry import METHOD_PARTS
from edge_client.errors import ConfigError, FedcentersError, UsageError
from emulator.data.fleet import Fleet
from emulator.options import OPTIONS

COLUMNS = frozenset({"round", "ari", "bytes", "seconds", "real_seconds"})  # of a history, which are no scores
SCORE_COLUMNS = frozenset({"accuracy", "accuracy_devices", "f1", "loss"})  # of every history
COMPARED = frozenset({"method", "seed", "seeds", "deviation", "better_by", "more_by", "interval"})  # of a comparison


def check_method(method: object) -> None:
    """Raises UsageError for what is no value of a method."""
    if isinstance(method, type):
        raise UsageError(f"{method.__name__} is a class", hint=f"write {method.__name__}()")
    if not is_dataclass(method) or not all(callable(getattr(method, part, None)) for part in METHOD_PARTS):
        hint = "give one of ours, as fc.FeSEM(3), or extend one: class Mine(fc.LocalSgd) with `round`"
        raise UsageError(f"{method!r} is no method", hint=hint)


def check_fleet(fleet: object) -> None:
    """Raises ConfigError for what is no fleet."""
    if not isinstance(fleet, Fleet):
        hint = "make one: fc.fleets.digits(devices=12), or fc.fleet(data, by=...)"
        raise ConfigError(f"fleet is {type(fleet).__name__}", hint=hint)


def check_own(*, loss: object = None, metrics: object = None, out: object = None) -> None:
    """Raises UsageError for a loss, metrics or a folder of another kind, and within `torch.autocast`."""
    torch = sys.modules.get("torch")
    if torch is not None and (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        told = "torch.autocast is on, and no runtime of a device trains in half precision"
        raise UsageError(told, hint="call this outside of `with torch.autocast(...)`")
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        shown = loss.__name__ if isinstance(loss, type) else repr(loss)
        hint = "give a function of outputs and labels, as torch.nn.CrossEntropyLoss(); leave it out for cross-entropy"
        if isinstance(loss, str):
            hint = "leave it out: the labels say whether they are classes, of samples, tokens or pixels, or targets "
            hint += "of a squared error; for another loss give a function of outputs and labels"
        raise UsageError(f"loss is {shown}", hint=hint)
    if metrics is not None and not (isinstance(metrics, Mapping) and all(map(callable, metrics.values()))):
        hint = "name functions of y and outputs: metrics={'mine': lambda y, outputs: ...}"
        raise UsageError(f"metrics is {type(metrics).__name__}", hint=hint)
    for name, metric in metrics.items() if isinstance(metrics, Mapping) else ():
        _check_takes_two(f"metric {name}", metric)
    if metrics is not None and (taken := sorted({*map(str, metrics)} & (COLUMNS | SCORE_COLUMNS | COMPARED))):
        told = f"a metric is called {taken[0]!r}, as a column of every `history`, or of the table of a comparison"
        raise UsageError(told, hint="give it another name")
    if out is not None and not isinstance(out, (str, os.PathLike)):
        raise UsageError(f"out is {out!r}", hint='give a folder, as out="runs"')


def _check_takes_two(told: str, metric: Callable[..., object]) -> None:
    """Raises UsageError for a function that cannot be called with y and outputs, before a round is trained for it."""
    try:
        found = signature(metric)
    except ValueError:  # of one that is not written in Python
        return
    try:
        found.bind("y", "outputs")
    except TypeError as wrong:
        hint = "it is called with y [n] and outputs [n, ...] of each device: lambda y, outputs: ..."
        raise UsageError(f"{told}: {wrong}", hint=hint) from None


def check_callback(on_round: Callable[..., object] | None) -> None:
    """Raises UsageError for what cannot be called."""
    if on_round is not None and not callable(on_round):
        raise UsageError(
            f"on_round is {on_round!r}", hint="give a function of the result so far: on_round=lambda r: ..."
        )


def shall_stop(answer: object) -> bool:
    """What `on_round` returned, as a yes or no. Raises UsageError for an array, a column or NA, which is neither."""
    try:
        return bool(answer)
    except (ValueError, TypeError, RuntimeError):  # of numpy and pandas, of NA, of torch
        hint = "return one truth value: True ends the run, as in on_round=lambda r: r.accuracy > 0.9"
        raise UsageError(f"on_round returned {type(answer).__name__}", hint=hint) from None


@contextmanager
def in_words_of_python() -> Iterator[None]:
    """An error that names options as the command line writes them, `--resume`, names arguments, `resume`."""
    try:
        yield
    except FedcentersError as wrong:
        wrong.message, wrong.hint = _arguments(wrong.message), _arguments(wrong.hint)
        wrong.args = tuple(_arguments(str(text)) for text in wrong.args)
        raise


def _arguments(text: str) -> str:
    named = re.sub(r"(?<!\S)--([a-z][a-z-]*)", lambda found: f"`{found[1].replace('-', '_')}`", text)
    key = named.partition(" is ")[0]
    return OPTIONS[key].name + named[len(key) :] if key in OPTIONS else named
