"""The table of options (options.py) as options of a command line."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from emulator.options import OPTIONS, Option

Command = Callable[..., None]
FLAGS = tuple(row.name for row in OPTIONS.values() if row.flag)


def with_run_options(*names: str, **defaults: object) -> Callable[[Command], Command]:
    """A decorator: give a command these rows of the table as options, after its arguments.

    The command gets them as one mapping `options` by the keys of the TOML file; None where the option is not given and
    `defaults` has no value for it.
    """
    rows = [row for row in OPTIONS.values() if row.name in names]

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters
        arguments = [p for p in own.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        others = [p for p in own.values() if p.kind is p.KEYWORD_ONLY and p.name != "options"]

        @functools.wraps(command)
        def wrapped(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the command's own
            options = {row.key: kwargs.pop(row.name) for row in rows}
            command(*args, options={key: value for key, value in options.items() if value is not None}, **kwargs)

        parameters = [*arguments, *(_parameter(row, defaults.get(row.name)) for row in rows), *others]
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by typer
        return wrapped

    return decorate


def _parameter(row: Option, default: object) -> inspect.Parameter:
    """Without a default of the command's own, the table's default is shown and the option stays None."""
    shown = "" if default is not None or row.default in (None, "") else f" [default: {row.default}]"
    kind = row.kind if default is not None else row.kind | None
    option = run_option(row.key, shown)
    return inspect.Parameter(
        row.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def run_option(key: str, more: str = "") -> Any:  # noqa: ANN401 - typer's
    """A row of the table as one option of a command; `more` is added to its help."""
    row = OPTIONS[key]
    return typer.Option(help=row.help + more, min=row.low, max=row.high, metavar=row.metavar, rich_help_panel=row.panel)
