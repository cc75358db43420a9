"""fedcenters-edge: join, nearest, enrol, doctor; flash, release. Parses, calls, prints.

stdout carries data, stderr talk. A foreseen error is one message with a hint and its exit code (errors.py); SIGTERM and
Ctrl-C leave cleanly.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from edge_client import __version__
from edge_client.config import load_config
from edge_client.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, NetworkError
from edge_client.malloc import give_back_large_blocks, share_one_heap
from edge_client.printable import PrintableFormatter, put_on_stderr, write_line
from edge_client.run_cli import run_cli
from edge_client.runtime import enrolment
from edge_client.runtime.client import Client
from edge_client.runtime.factory import make_client
from edge_client.runtime.progress import Event, Tell, format_event
from edge_client.runtime.state import lock_state
from edge_client.transport.clock import Clock, SystemClock
from edge_client.update.self_update import TRIAL_PATIENCE_S, SelfUpdater

log = logging.getLogger(__name__)
STOP_TIMEOUT_S = 2.0  # for a task under way, after a signal to stop
TRIAL_RETRY_S = 5.0
INSECURE_HELP = "speak plain mqtt:// to a broker on another machine: everything can be read and changed on the way"
ENROL_EXAMPLE = "example: fedcenters-edge enrol --config /etc/fedcenters/client.toml"
EXAMPLE = "example: fedcenters-edge join --config /etc/fedcenters/client.toml"
DOCTOR_EXAMPLE = "example: fedcenters-edge doctor --config /etc/fedcenters/client.toml"


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = _parser(words[0] if words else "")
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what could come next
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


def _parser(command: str = "") -> argparse.ArgumentParser:
    """Every command; for `join`, what a device runs for months, without the modules of those that it does not need."""
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
    others = [] if command == "join" else [_nearest(commands)]
    enrolling = _command(
        commands, "enrol", "turn a one-time token into a certificate, as `join` does first", ENROL_EXAMPLE
    )
    enrolling.add_argument("--config", type=Path, required=True, help="TOML file of this device")
    enrolling.set_defaults(command=_enrol)
    doctor = _command(commands, "doctor", "check this device, one line per check", DOCTOR_EXAMPLE)
    doctor.add_argument("--config", type=Path, required=True, help="TOML file of this device")
    doctor.add_argument("--json", action="store_true", help="one JSON object on stdout")
    doctor.set_defaults(command=_doctor)
    for talks in (join, *others):
        talks.add_argument("--insecure", action="store_true", help=INSECURE_HELP)
    others += [] if command == "join" else _workstation(commands)
    for each in (join, enrolling, doctor, *others):
        each.add_argument("-v", "--verbose", action="count", default=0, help="tell more; twice for everything")
    return parser


def _command(commands: Any, name: str, words: str, example: str) -> argparse.ArgumentParser:  # noqa: ANN401 - argparse does not name its class
    """A command whose own help begins with what the list of commands says of it."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=words, description=f"{words[0].upper()}{words[1:]}.", epilog=example
    )
    return parser


def _nearest(commands: Any) -> argparse.ArgumentParser:  # noqa: ANN401 - argparse does not name its class
    from edge_client.nearest import cli as nearest_cli

    nearest = _command(
        commands, "nearest", "find the center that suits this device's data and fetch its file", nearest_cli.EXAMPLE
    )
    nearest.formatter_class = argparse.RawDescriptionHelpFormatter
    nearest_cli.add_arguments(nearest)
    return nearest


def _workstation(commands: Any) -> list[argparse.ArgumentParser]:  # noqa: ANN401 - argparse does not name its class
    """`flash` and `release`, which are not put on boards."""
    try:
        from edge_client.board import flash, pack
    except ImportError:
        return []
    flashing = _command(commands, "flash", "make a board a device", flash.EXAMPLE)
    flash.add_arguments(flashing)
    release = _command(commands, "release", "pack this client for boards to fetch", pack.EXAMPLE)
    pack.add_arguments(release)
    return [flashing, release]


def _join(options: argparse.Namespace) -> int:
    give_back_large_blocks()
    share_one_heap()
    tell = log.info if options.quiet else write_line
    configs = [enrolment.load_enrolled(path, tell=tell) for path in options.config]
    how = {"quiet": options.quiet, "as_json": options.json}
    with ExitStack() as locks:
        for config in configs:
            locks.enter_context(lock_state(config.state))
        return start_patiently(
            lambda: run_clients(
                [make_client(c, insecure=options.insecure, tell=reporter(c.device_id, **how)) for c in configs],
                quiet=options.quiet,
            ),
            SelfUpdater.from_environment(os.environ),
            SystemClock(),
        )


def start_patiently(
    start: Callable[[], int], updates: SelfUpdater, clock: Clock, *, wait: Callable[[float], object] = time.sleep
) -> int:
    """Run clients. A release on trial tries again for a while where a broker, a clock or a disk is not there yet.

    It has few starts: a broker that was away for a minute would end the trial of a release that works.
    """
    until_s = clock.now_s() + TRIAL_PATIENCE_S
    while True:
        try:
            return start()
        except (NetworkError, ConfigError) as wrong:
            if clock.now_s() >= until_s or not updates.on_trial:
                raise
            log.warning("%s; this release is on trial and tries again", wrong.message)
        wait(TRIAL_RETRY_S)


def _doctor(options: argparse.Namespace) -> int:
    from edge_client.doctor import run_doctor

    return run_doctor(options)


def _enrol(options: argparse.Namespace) -> int:
    config = load_config(options.config, os.environ)
    if not enrolment.has_token(config):
        raise ConfigError("there is no token to enrol with", hint="it is used up, or `token` does not point at it")
    enrolment.enrol(config, tell=write_line)
    return EXIT_OK


def reporter(device_id: str, *, quiet: bool = False, as_json: bool = False) -> Tell:
    """What prints a device's events: a line of text each on stderr, or with `as_json` an object each on stdout."""

    def tell(event: Event) -> None:
        if as_json:
            print(json.dumps({"device": device_id, **event}), flush=True)
        elif not quiet and (text := format_event(event)):
            put_on_stderr(f"{device_id}: {text}\n")

    return tell


def run_clients(clients: Sequence[Client], *, quiet: bool = False) -> int:
    """Run clients, one thread each, until SIGTERM, Ctrl-C, or the first of them fails; -> the exit code."""
    failures: list[BaseException] = []
    over = threading.Event()
    interrupted = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            interrupted.set()
        over.set()

    def run(client: Client) -> None:
        try:
            client.run()
        except Exception as wrong:  # noqa: BLE001 - raised again in the main thread
            failures.append(wrong)
        finally:
            over.set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        threads = [threading.Thread(target=run, args=(client,), daemon=True) for client in clients]
        for client, thread in zip(clients, threads, strict=True):
            if not quiet:
                where = f"{client.config.federation} at {client.config.broker}"
                write_line(f"{client.config.device_id}: joining {where}")
            thread.start()
        over.wait()
        _stop(clients, threads)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if failures:
        raise failures[0]
    return EXIT_INTERRUPTED if interrupted.is_set() else EXIT_OK


def _stop(clients: Sequence[Client], threads: Sequence[threading.Thread]) -> None:
    """Wait for the tasks under way, at most STOP_TIMEOUT_S; a longer one is killed and loses nothing on disk."""
    for client in clients:
        client.stop()
    until = time.monotonic() + STOP_TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


if __name__ == "__main__":
    sys.exit(main())
