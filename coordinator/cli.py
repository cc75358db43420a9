"""fedcenters-coordinator: serve, status. Parses, calls, prints; what takes long to import waits until it is needed.

stdout carries data, stderr carries talk. Exit codes are those of edge_client/errors.py.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
except ImportError as missing:  # a device's installation has no typer
    from edge_client.errors import missing_extra

    raise SystemExit(missing_extra(missing)) from None

from edge_client.errors import ConfigError, foreseen

if TYPE_CHECKING:
    from coordinator.config import CoordinatorConfig
    from coordinator.server import Server

app = typer.Typer(
    name="fedcenters-coordinator",
    help="Leads a federation: asks devices, groups them, keeps one model per group.\n\n"
    "example: fedcenters-coordinator serve coordinator.toml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Entry point of the console script."""
    app()


@app.command()
@foreseen
def serve(
    config: Annotated[Path, typer.Argument(help="TOML file with the federation, the model and the runs.")],
    *,
    broker: Annotated[str, typer.Option(help="Broker URL instead of the file's, like mqtt://host:1883.")] = "",
) -> None:
    """Train the runs of a configuration, publish the centers, then serve devices that never trained.

    A coordinator that was killed continues where it was when it is started again with the same folder.
    """
    from coordinator.config import read
    from coordinator.server import Server
    from coordinator.store import Store
    from edge_client.protocol.topics import Topics
    from edge_client.transport.base import Transport, Will
    from edge_client.transport.clock import SystemClock
    from edge_client.transport.mqtt import MqttTransport

    settings = read(config, broker=broker) if broker else read(config)
    _keep_config(settings)
    client_id = f"{Topics(settings.federation).federation}.coordinator.0"

    def dial(will: Will | None) -> Transport:
        return MqttTransport(settings.broker, client_id, will=will, ca=settings.ca)

    with closing(Store(settings.folder / "store")) as store:
        server = Server(settings, store, dial=dial, clock=SystemClock(), watch=_tell)
        received = _stop_on_signals(server)
        server.run()
    if signal.SIGINT in received:
        raise KeyboardInterrupt


@app.command()
@foreseen
def status(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """How far a training is; also beside a coordinator that is running."""
    from coordinator.records import status as read_status

    found = read_status(folder)
    if as_json:
        print(json.dumps(found))
        return
    print(f"federation {found['federation']}: {found['devices']} devices, epoch {found['epoch']}")
    for run in found["runs"]:
        reached = "" if run["accuracy"] is None else f", accuracy {run['accuracy']['micro']:.1%}"
        print(f"{run['name']} ({run['method']}): round {run['round']}/{run['of']}{reached}")
    print("done" if found["done"] else found["error"] or "not done yet")


def _stop_on_signals(server: Server) -> list[int]:
    """SIGTERM and SIGINT end the server cleanly, wherever it is; -> the signals that came."""
    from coordinator.server import Stopped

    received: list[int] = []

    def stop(number: int, _frame: object) -> None:
        for other in (signal.SIGTERM, signal.SIGINT):
            signal.signal(other, signal.SIG_IGN)  # once is enough; saying goodbye takes a moment
        received.append(number)
        server.stop()
        raise Stopped

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    return received


def _keep_config(settings: CoordinatorConfig) -> None:
    """`folder`/config.toml says how the run was made, defaults included."""
    import tomli_w

    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
        text = tomli_w.dumps(settings.to_toml())
        (settings.folder / "config.toml").write_text(text, encoding="utf-8")
    except OSError as wrong:
        raise ConfigError(
            f"cannot write to {settings.folder}: {wrong.strerror}", hint="choose another `folder`"
        ) from wrong


def _tell(event: Mapping[str, Any]) -> None:
    """One line on stderr about what happened; an error ends the command, which says it with its hint."""
    if event["event"] != "error":
        print(in_words(event), file=sys.stderr, flush=True)


def in_words(event: Mapping[str, Any]) -> str:
    """An event of metrics.jsonl as a sentence."""
    kind = event["event"]
    if kind == "round":
        micro = event["accuracy"]["micro"]
        reached = "nobody tested it" if micro is None else f"accuracy {micro:.1%}"
        return f"{event['run']} round {event['round']}/{event['of']}: {reached}, {event['seconds']:.1f} s"
    if kind == "program":
        return f"program {event['model']} ready for {', '.join(event['parity'])} ({event['seconds']:.1f} s)"
    if kind == "bundle":
        formats = " and ".join(event["formats"])
        return f"{len(event['centers'])} centers published{f' as {formats}' if formats else ''}"
    words = {
        "start": "leading {federation}, epoch {epoch}",
        "joined": "{device} joined: {engine}, {n} samples",
        "run-done": "{run} is done after {rounds} rounds",
        "served": "{device} runs center {center} as {format}",
        "done": "done in {seconds} s; serving devices that ask for a center",
    }
    return words[kind].format(**event) if kind in words else str(dict(event))


if __name__ == "__main__":
    main()
