"""fedcenters-edge: join, nearest, enrol, doctor; flash, release. Parses and calls; a command's modules load with it.

stdout carries data, stderr talk. A foreseen error is one message with a hint and its exit code (errors.py); SIGTERM and
Ctrl-C leave cleanly.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edge_client import __version__
from edge_client.errors import EXIT_OK, ConfigError
from edge_client.printable import PrintableFormatter, write_line
from edge_client.run_cli import run_cli

INSECURE_HELP = "speak plain mqtt:// to a broker on another machine: everything can be read and changed on the way"
ENROL_EXAMPLE = "example: fedcenters-edge enrol --config /etc/fedcenters/client.toml"
EXAMPLE = "example: fedcenters-edge join --config /etc/fedcenters/client.toml"
DOCTOR_EXAMPLE = "example: fedcenters-edge doctor --config /etc/fedcenters/client.toml"
_MODULES = {  # of commands whose options are many
    "nearest": "edge_client.nearest.cli",
    "flash": "edge_client.board.flash",
    "release": "edge_client.board.pack",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script."""
    words = sys.argv[1:] if arguments is None else arguments
    completes = "_ARGCOMPLETE" in os.environ  # a shell asks what could come next
    parser = _parser() if completes else _parser(words[:1])
    if completes:
        import argcomplete

        argcomplete.autocomplete(parser)
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return EXIT_OK
    level = logging.DEBUG if options.verbose > 1 else logging.INFO if options.verbose else logging.WARNING
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(asctime)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    return run_cli(lambda: options.command(options))


def _parser(named: Sequence[str] = tuple(_MODULES)) -> argparse.ArgumentParser:
    """Every command; the options of `nearest`, `flash` and `release`, which their modules know, where it is `named`."""
    parser = argparse.ArgumentParser(prog="fedcenters-edge", description="A device of a federation.", epilog=EXAMPLE)
    parser.add_argument("--version", action="version", version=f"fedcenters {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    join = _command(commands, "join", "train with the federation until stopped", EXAMPLE)
    join.add_argument(
        "--config",
        type=Path,
        action="append",
        required=True,
        help="TOML file of a device; repeat it for several devices",
    )
    join.add_argument("--json", action="store_true", help="one JSON object on stdout for each event")
    join.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")
    join.set_defaults(command=_join)
    nearest = _command(commands, "nearest", "find the center that suits this device's data and fetch its file")
    nearest.formatter_class = argparse.RawDescriptionHelpFormatter
    enrolling = _command(
        commands, "enrol", "turn a one-time token into a certificate, as `join` does first", ENROL_EXAMPLE
    )
    enrolling.add_argument("--config", type=Path, required=True, help="TOML file of this device")
    enrolling.set_defaults(command=_enrol)
    doctor = _command(commands, "doctor", "check this device, one line per check", DOCTOR_EXAMPLE)
    doctor.add_argument("--config", type=Path, required=True, help="TOML file of this device")
    doctor.add_argument("--json", action="store_true", help="one JSON object on stdout")
    doctor.set_defaults(command=_doctor)
    all_commands = {"join": join, "nearest": nearest, "enrol": enrolling, "doctor": doctor}
    if find_spec("edge_client.board"):  # not on boards
        all_commands["flash"] = _command(commands, "flash", "make a board a device")
        all_commands["release"] = _command(commands, "release", "pack this client for boards to fetch")
    for name in all_commands.keys() & _MODULES.keys() & set(named):
        module = importlib.import_module(_MODULES[name])
        module.add_arguments(all_commands[name])
        all_commands[name].epilog = module.EXAMPLE
    for talks in (join, nearest):
        talks.add_argument("--insecure", action="store_true", help=INSECURE_HELP)
    for each in all_commands.values():
        each.add_argument("-v", "--verbose", action="count", default=0, help="tell more; twice for everything")
    return parser


def _command(commands: Any, name: str, words: str, example: str = "") -> argparse.ArgumentParser:  # noqa: ANN401 - argparse does not name its class
    """A command whose own help begins with what the list of commands says of it."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=words, description=f"{words[0].upper()}{words[1:]}.", epilog=example
    )
    return parser


def _join(options: argparse.Namespace) -> int:
    from edge_client.join import join

    return join(options)


def _doctor(options: argparse.Namespace) -> int:
    from edge_client.doctor import run_doctor

    return run_doctor(options)


def _enrol(options: argparse.Namespace) -> int:
    from edge_client.config import load_config
    from edge_client.runtime import enrolment

    config = load_config(options.config, os.environ)
    if not enrolment.has_token(config):
        raise ConfigError("there is no token to enrol with", hint="it is used up, or `token` does not point at it")
    enrolment.enrol(config, tell=write_line)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
