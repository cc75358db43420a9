"""What the command lines of the three server rooms share: one app with --version, and --help in groups of options."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from edge_client import __version__
from edge_client.errors import EXIT_OK
from edge_client.run_cli import run_cli
from edge_client.toml_files import warn_of_mistyped
from export import plugins
from export.diagnostics import name_written_file
from export.silence import show_warnings

VARIABLES = ("FEDCENTERS_CACHE", "FEDCENTERS_DATA", "FEDCENTERS_WEB_FILES")  # that replace no key of a file
Command = TypeVar("Command", bound=Callable[..., Any])


class GroupedCommand(TyperCommand):
    """A command whose --help has a heading for each `rich_help_panel` of its options, in plain text.

    Typer draws panels only with rich's markup, whose boxes and colours are noise in a pipe or a narrow terminal.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - since 0.29 typer has a click of its own
        sections, others = dict[str, list[tuple[str, str]]](), "Options"
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                usual = "Arguments" if parameter.param_type_name == "argument" else others
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for title, rows in sorted(sections.items(), key=lambda section: section[0] == others):  # those come last
            with formatter.section(title):
                formatter.write_dl(rows)


def finite(value: float | None) -> float | None:
    """The callback of an option that must be a finite number: the range of an option lets nan through."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number")
    return value


def difference_in_words(difference: float) -> str:
    """A largest difference in a table: "equal" where no value differs."""
    return "equal" if difference == 0 else f"{difference:.1e}"


def handle_errors(command: Command) -> Command:
    """A decorator: `run_cli` around a command of a command line library, which keeps the command's parameters."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the command's own
        def run() -> None:
            try:
                command(*args, **kwargs)
            except OSError as wrong:
                name_written_file(wrong)
                raise

        code = run_cli(run, interrupted="interrupted")
        if code != EXIT_OK:
            raise SystemExit(code)

    return wrapped  # type: ignore[return-value]  # same parameters, read through functools.wraps


def make_app(name: str, words: str) -> typer.Typer:
    """The app of a command line; `words` explain it in --help. A user's modules are found in the working folder."""
    app = typer.Typer(
        name=name, help=words, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    app.callback()(_prepare)
    return app


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - typer's way
    if wanted:
        typer.echo(f"fedcenters {__version__}")
        raise typer.Exit


def _prepare(
    *,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    show_warnings()
    warn_of_mistyped(os.environ, VARIABLES)
    plugins.add_working_folder()
