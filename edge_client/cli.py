"""fedcenters-edge: join, nearest. Parses, calls, prints.

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
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import numpy as np

from edge_client import enrol
from edge_client.client import Client, dialer, make_client
from edge_client.config import ClientConfig
from edge_client.config import load as load_config
from edge_client.dataset import load as load_data
from edge_client.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, run_cli
from edge_client.inference import FORMAT_OF, FORMATS
from edge_client.nearest import Answer, Visitor
from edge_client.transport.clock import SystemClock

LEAVE_S = 10.0  # a task under way is given this long when we are told to stop
INSECURE_HELP = "speak plain mqtt:// to a broker on another machine: whoever is on the way reads and changes everything"
EXAMPLE = "example: fedcenters-edge join --config /etc/fedcenters/client.toml"


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return EXIT_OK
    level = logging.DEBUG if options.verbose > 1 else logging.INFO if options.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    return run_cli(lambda: options.command(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedcenters-edge", description="A device of a federation.", epilog=EXAMPLE)
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    join = commands.add_parser("join", help="train with the federation until stopped", epilog=EXAMPLE)
    join.add_argument(
        "--config", type=Path, action="append", required=True, help="TOML file; several for several devices"
    )
    join.set_defaults(command=_join)
    nearest = commands.add_parser("nearest", help="find the center that suits this device's data and fetch its file")
    nearest.add_argument("--config", type=Path, required=True, help="TOML file of this device")
    nearest.add_argument("--format", choices=FORMATS, help="file to fetch (default: what the configured engine runs)")
    nearest.add_argument("--json", action="store_true", help="one JSON object on stdout")
    nearest.set_defaults(command=_nearest)
    enrolling = commands.add_parser("enrol", help="turn a one-time token into a certificate, as `join` does first")
    enrolling.add_argument("--config", type=Path, required=True, help="TOML file of this device")
    enrolling.set_defaults(command=_enrol)
    for command in (join, nearest):
        command.add_argument("--insecure", action="store_true", help=INSECURE_HELP)
    for command in (join, nearest, enrolling):
        command.add_argument("-v", "--verbose", action="count", default=0, help="tell more; twice for everything")
    return parser


def _join(options: argparse.Namespace) -> int:
    configs = [_enrolled(path) for path in options.config]
    clients = [make_client(config, insecure=options.insecure) for config in configs]
    return live(clients)


def _enrol(options: argparse.Namespace) -> int:
    config = load_config(options.config, os.environ)
    if not enrol.wanted(config):
        raise ConfigError("there is no token to enrol with", hint="it is used up, or `token` does not point at it")
    enrol.enrol(config)
    print(f"{config.device_id}: the certificate is in {config.certificate}", file=sys.stderr)
    return EXIT_OK


def live(clients: Sequence[Client]) -> int:
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
            print(
                f"{client.config.device_id}: joining {client.config.federation} at {client.config.broker}",
                file=sys.stderr,
            )
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
    """What is under way may end; what takes longer is killed with us and loses nothing that was on disk."""
    for client in clients:
        client.stop()
    until = time.monotonic() + LEAVE_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def _enrolled(path: Path) -> ClientConfig:
    """A device's configuration; its one-time token, if there is one, is a certificate now."""
    config = load_config(path, os.environ)
    if enrol.wanted(config):
        enrol.enrol(config)
    return config


def _nearest(options: argparse.Namespace) -> int:
    config = _enrolled(options.config)
    file_format = options.format or FORMAT_OF[config.engine]
    rng = np.random.default_rng(time.time_ns())
    signal.signal(signal.SIGTERM, _terminate)
    visitor = Visitor(
        config=config,
        dial=dialer(config, insecure=options.insecure),
        local=load_data(config.data),
        clock=SystemClock(),
        rng=rng,
        file_format=file_format,
    )
    answer = visitor.run()
    print(json.dumps(answer.to_json()) if options.json else _in_words(answer))
    return EXIT_OK


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(EXIT_OK)


def _in_words(answer: Answer) -> str:
    losses = ", ".join(f"center {ident}: {loss:.3f}" for ident, loss in sorted(answer.losses.items()))
    if answer.center is None:
        return f"no center fits this device's data (mean losses: {losses})"
    told = "" if answer.accuracy is None else f"accuracy {answer.accuracy:.1%} on {answer.n} samples\n"
    return f"center {answer.center} is nearest (mean losses: {losses})\n{told}file {answer.file} ({answer.format})"


if __name__ == "__main__":
    sys.exit(main())
