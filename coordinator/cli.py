"""The commands of fedcenters-coordinator: serve, status, phone, web-files, attack-drill, provision, enrol.

Each command imports its implementation when it runs, so that --help is fast. stdout carries data, stderr carries
messages. The exit codes are those of edge_client/errors.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
except ImportError as missing:  # a device's installation has no typer
    from edge_client.run_cli import report_missing_extra

    raise SystemExit(report_missing_extra(missing)) from None

from coordinator.identity import cli as provision_cli
from edge_client.errors import BeyondLimits
from edge_client.printable import counted, first_of
from export.command_line import GroupedCommand, handle_errors, make_app
from export.silence import write_stderr

app = make_app(
    "fedcenters-coordinator",
    "Leads a federation: asks devices, groups them, keeps one model per group.\n\n"
    "example: fedcenters-coordinator serve coordinator.toml",
)


app.command(cls=GroupedCommand)(provision_cli.provision)
app.command()(provision_cli.enrol)


def main() -> None:
    """Entry point of the console script."""
    app()


@app.command()
@handle_errors
def serve(
    configs: Annotated[list[Path], typer.Argument(help="TOML files, one for each federation.")],
    *,
    broker: Annotated[
        str, typer.Option(help="Instead of the files': embedded, mosquitto, or a URL like mqtts://host:8883.")
    ] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="Speak plain mqtt:// to a broker elsewhere.")] = False,
    dashboard: Annotated[
        str, typer.Option(metavar="[HOST:]PORT", help="Show the run in a browser and steer it there; port 0: any.")
    ] = "",
) -> None:
    """Lead a federation: train, publish, serve newcomers.

    Trains the runs of a configuration, publishes the centers, then serves devices that never trained.

    A coordinator that was killed continues where it was when it is started again with the same folder. SIGTERM and
    Ctrl-C end it in good order, with exit codes 0 and 130; a second signal ends it at once (128 + its number).

    example: fedcenters-coordinator serve coordinator.toml --dashboard 8080
    """
    from coordinator.service import run_service as serve_all

    serve_all(configs, broker=broker, insecure=insecure, dashboard=dashboard, tell=_tell)


@app.command("web-files")
@handle_errors
def web_files(
    *,
    out: Annotated[Path | None, typer.Option(help="The folder; by default one in your cache.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Fetch the third-party files of the phone's page.

    ONNX Runtime Web and MQTT.js, pinned, from npm's registry.

    example: fedcenters-coordinator web-files
    """
    from coordinator.phone import vendored_files as third

    folder = out or third.default_folder()
    made = third.fetch_all(folder)
    if as_json:
        print(
            json.dumps(
                {"folder": str(folder), "made": [path.name for path in made], "files": list(third.VENDORED_FILES)}
            )
        )
    else:
        print(f"{folder}: {len(made)} files fetched" if made else f"{folder}: everything is there")


@app.command()
@handle_errors
def phone(
    config: Annotated[Path, typer.Argument(help="A coordinator's TOML file.")],
    *,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the page is served.")] = "127.0.0.1:8090",
    url: Annotated[str, typer.Option(help="How a phone reaches it, where that is another address.")] = "",
    certificate: Annotated[Path | None, typer.Option(help="For https, with --key.")] = None,
    key: Annotated[Path | None, typer.Option(help="The certificate's key.")] = None,
) -> None:
    """Serve the page that makes a phone a device.

    The page alone; prints its link as a QR code.

    example: fedcenters-coordinator phone coordinator.toml
    """
    from coordinator.phone.server import run_phone_server as serve_page

    serve_page(config, listen, url=url, certificate=certificate, key=key)


@app.command()
@handle_errors
def status(
    config: Annotated[Path, typer.Argument(help="A coordinator's TOML file, or the folder of a run.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON objects, one a line.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Again whenever something changes, until it has ended.")
    ] = False,
) -> None:
    """Tell how far a training is and what went wrong.

    Beside a coordinator that runs, or long after.

    example: fedcenters-coordinator status coordinator.toml --watch
    """
    from coordinator import status_in_words as words
    from coordinator.storage import status as told

    folder = told.run_folder_of(config)
    if watch and not config.is_dir():  # a configuration says where the run will be
        told.await_run(folder, write_stderr)
    founds = told.follow_status(folder) if watch else iter([told.read_status(folder)])
    if as_json or not sys.stdout.isatty():
        for found in founds:
            print(json.dumps(found) if as_json else "\n".join(words.status_lines(found)), flush=True)
        return
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        for found in founds:
            live.update(words.render_status(found), refresh=True)


@app.command("attack-drill")
@handle_errors
def attack_drill(
    config: Annotated[
        Path | None, typer.Argument(help="A coordinator's TOML file, for its model, method and limits.")
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON objects, one for each attack.")] = False,
) -> None:
    """Attack a local copy of an installation.

    Reports which bounds held and what was seen. One hostile device with a valid certificate attacks what `provision`
    writes (certificates and mosquitto's access list in a temporary folder, on a free port of 127.0.0.1), a dashboard
    and the listener of `enrol`, and a coordinator that leads rounds there. With a configuration the copy has its model,
    the method of its served run and its limits; otherwise a tiny model and FedAvg. No federation of yours is touched.

    example: fedcenters-coordinator attack-drill coordinator.toml
    """
    import logging

    from coordinator.attack_drill.drill import run_drill
    from coordinator.attack_drill.findings import Finding
    from coordinator.config import read_config

    def say(finding: Finding) -> None:
        print(json.dumps(finding.as_json()) if as_json else finding.in_words(), flush=True)

    logging.getLogger().addHandler(logging.NullHandler())  # what both sides log of an attack is no part of the report
    found = run_drill(say, None if config is None else read_config(config), tell=write_stderr)
    tried = [finding for finding in found if finding.seen.held is not None]
    broken = sum(not finding.seen.held for finding in tried)
    if not as_json:
        untried = len(found) - len(tried)
        more = f", {untried} attacks had no aim" if untried else ""
        print(f"{len(tried) - broken} of {len(tried)} bounds held{more}")
    if broken:
        raise BeyondLimits(
            f"{broken} bounds did not hold",
            hint="compare the versions of fedcenters and mosquitto with docs/security.md",
        )


def _tell(event: Mapping[str, Any]) -> None:
    """Print one line for an event on stderr; an error is printed by the command that it ends."""
    if event["event"] != "error":
        name = f"{event['among']}: " if "among" in event else ""  # of several federations
        write_stderr(f"{name}{format_run_event(event)}")


MOST_NAMES = 5  # of devices, in a line
OFFERS = "; offering client {release} to boards that run an older one"
TAKES_PART = {
    "next-round": "; it takes part from the next round",
    "next-run": "; it takes part from the next run, because this one's method keeps its fleet",
    "no": "; training is over, and it can ask for a center",
}


def _waited_for(event: Mapping[str, Any]) -> str:
    away = set(event["away"])
    return first_of([f"{cid} (not connected)" if cid in away else cid for cid in event["devices"]], MOST_NAMES)


def format_run_event(event: Mapping[str, Any]) -> str:
    """An event of metrics.jsonl as one line of text."""
    kind = event["event"]
    if kind == "round":
        from coordinator.rounds.round_record import (
            left_out_in_words,
            no_sums_in_words,
            place_in_words,
            reached_in_words,
            tested_in_words,
        )

        scores = reached_in_words(event)
        reached = scores + tested_in_words(event) if scores else "not evaluated"
        secure = event.get("secure", {})
        reached += no_sums_in_words(event)
        if secure and event["round"] == 1:
            reached += f"; the coordinator sees {secure['sees']}"
        where, took = place_in_words(event), f"{event['seconds']:.1f} s{left_out_in_words(event)}"
        return f"{event['run']} {where}{';' if 'asynchronous' in event else ':'} {reached}, {took}"
    if kind == "program":
        return f"program {event['model']} ready for {', '.join(event['parity'])} ({event['seconds']:.1f} s)"
    if kind == "bundle":
        formats = " and ".join(event["formats"])
        return f"{counted(len(event['centers']), 'center')} published{f' as {formats}' if formats else ''}"
    then = "ending (exit-when-done)" if event.get("ends") else "serving devices that ask for a center"
    words = {
        "start": "leading {federation}, epoch {epoch}" + OFFERS * ("release" in event),
        "waiting": "waiting: {here} of {needed} devices",
        "waits-for": "{run} round {round}: {answered} of {wanted} answers, {left_s:.0f} s left; waiting for {who}",
        "compiling": "compiling the training program: {part}",
        "joined": "{device} joined: {engine}, {n} samples",
        "offers": "{device} offers {n} samples for training",
        "done": f"done in {event.get('seconds', 0):.1f} s; {then}",
        "serving": f"all runs were done before; {then}",
        "let-in": "{device} takes part from round {round} of {run}",
        "left-out": "{device} is left out: {why}",
        "revoked": "{device} was revoked, and takes part no more",
        "run-done": f"{{run}} is done after {counted(event.get('rounds', 0), 'round')}",
        "served": "{device} runs center {center} as {format}",
    }
    if kind not in words:
        return str(dict(event))
    if kind == "joined" and not event["n"]:
        return f"{event['device']} is connected: {event['engine']}; it is not in the training"
    who = {"who": _waited_for(event)} if kind == "waits-for" else {}
    return words[kind].format(**event, **who) + TAKES_PART.get(event.get("takes_part", ""), "")


if __name__ == "__main__":
    main()
