"""fedcenters-emulator: a fleet without a fleet. Parses, calls, prints; what takes long is imported in the commands.

stdout carries data: a table, or with --json one JSON object. Everything else goes to stderr. Exit codes are those of
edge_client/errors.py.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
except ImportError as missing:  # a device's installation has no typer
    from edge_client.run_cli import report_missing_extra

    raise SystemExit(report_missing_extra(missing)) from None

from edge_client.errors import ConfigError, UsageError
from emulator.command_options import FLAGS, run_option, with_run_options
from emulator.console import ConsoleProgress
from emulator.experiments.cli import experiment
from emulator.options import RUN
from emulator.stop_signals import DeferredSignals
from export.command_line import GroupedCommand, handle_errors, make_app
from export.output_paths import DRAWINGS, check_output_file, check_output_folder

if TYPE_CHECKING:
    from emulator.options import SimulateArgs

app = make_app("fedcenters-emulator", "A fleet without a fleet.\n\nexample: fedcenters-emulator demo")
CHOOSE_K_OPTIONS = (
    "method",
    "data_set",
    "model",
    "partition",
    "devices",
    "groups",
    "rounds",
    "seed",
    "engine",
    "data",
)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def main() -> None:
    """Entry point of the console script."""
    app()


@app.command()
@handle_errors
def demo(
    *,
    as_json: AsJson = False,
    seed: Annotated[int, run_option("seed")] = 0,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Training rounds of each method.")] = 10,
    out: Annotated[Path, run_option("out")] = Path("runs"),
    broker: Annotated[str, typer.Option(help="auto, mosquitto, embedded, or a URL like mqtt://host:1883.")] = "auto",
) -> None:
    """Play the whole chain once: twelve devices, three centers.

    Starts a broker, a coordinator and twelve emulated devices that train with ONNX Runtime, LiteRT and torch. FeSEM
    finds their groups; FedAvg runs for comparison. The centers are exported and handed to three new devices. Leaves
    runs/<name>/ with report.html, and nothing running.

    example: fedcenters-emulator demo --seed 1 --rounds 5
    """
    progress = ConsoleProgress()
    check_output_folder(out)
    progress.say("12 devices, 3 hidden groups, one coordinator, over MQTT on this machine; times since the command")
    from emulator.testbed.demo import DemoSettings, run_demo

    def show(result: dict[str, Any], new_devices: list[dict[str, Any]]) -> None:
        if as_json:
            print(json.dumps(result), flush=True)
            return
        from emulator.reports.console_tables import demo_table

        demo_table(result, new_devices)

    run_demo(DemoSettings(seed=seed, rounds=rounds, out=out, broker=broker), progress, show)


@app.command(cls=GroupedCommand)
@handle_errors
@with_run_options(*FLAGS)
def simulate(
    config: Annotated[Path | None, typer.Argument(help="A TOML file, as `init` writes; options win over it.")] = None,
    *,
    options: Mapping[str, Any],
    clusters: Annotated[
        int | None, typer.Option(min=1, help="How many centers, for methods that have them.", rich_help_panel=RUN)
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "-c", metavar="KEY=VALUE", help="A key of the file: the run's or the method's.", rich_help_panel=RUN
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run's checkpoint; more --rounds than before add rounds.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Simulate a run in this process and in virtual time.

    With --broker the same run goes over MQTT, by real processes in real time. `fedcenters-emulator list` has the names
    of methods, data sets, models and partitions.

    example: fedcenters-emulator simulate --method fesem -c local-steps=40 -c learning-rate=0.05
    """
    progress = ConsoleProgress()
    from emulator.config import make_args, parse_pairs, read_table
    from emulator.reports.repeat import repeat_in_python
    from emulator.run.folder import in_own_folder

    file = {} if config is None else read_table(config)
    asked = {key: value for key, value in {**parse_pairs(setting or []), **options}.items() if value is not None}
    if config is not None and (own := repeat_in_python(file | asked, config.parent)):
        told = f"{config} is of a run in Python, whose {own[0]} no command can find"
        raise ConfigError(told, hint=f"repeat it in Python, where they are: {own[1]}")
    args = make_args(file, parse_pairs(setting or []), {"clusters": clusters}, options)
    if config is not None and resume and not asked.keys() & {"out", "name"}:
        args = in_own_folder(args, config)
    progress.say(f"{args.method} on {args.data_set}, {'over MQTT' if args.broker else 'in virtual time'}")

    def show(result: dict[str, Any]) -> None:
        if as_json:
            print(json.dumps(result), flush=True)
            return
        from emulator.reports.console_tables import simulate_table

        simulate_table(result)

    if args.broker:
        from emulator.testbed.simulate_over_mqtt import simulate_over_mqtt

        simulate_over_mqtt(args, progress, show, resume=resume)
    else:
        show(_in_process(args, progress, resume=resume))


def _in_process(args: SimulateArgs, progress: ConsoleProgress, *, resume: bool) -> dict[str, Any]:
    # SIGTERM, as of a scheduler, ends the run as Ctrl-C does
    with DeferredSignals([signal.SIGTERM]), progress.during("reading the data") as busy:
        from emulator.simulate import simulate_json
        from emulator.testbed.monitor import format_milestone

        def tell(record: Mapping[str, Any]) -> None:
            progress.say(format_milestone(record))
            left = record["round"] < record["of"]
            busy(f"round {record['round'] + 1}/{record['of']} is running" if left else "writing the run's folder")

        return simulate_json(args, tell, resume=resume, say=progress.say, busy=busy)


@app.command("list")
@handle_errors
def list_names(*, as_json: AsJson = False) -> None:
    """List methods, data sets, models, partitions, engines.

    Also the tables of `experiment`, and what installed packages have registered.

    example: fedcenters-emulator list
    """
    from emulator.names import known_names

    names = known_names()
    if as_json:
        print(json.dumps(names))
        return
    for kind, known in names.items():
        print(f"{kind}: {', '.join(known)}")


@app.command()
@handle_errors
def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("run.toml"),
    *,
    method: Annotated[str, typer.Option(help="Whose settings the file shall hold.")] = "fesem",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a commented configuration for `simulate`.

    Every key has its default.

    example: fedcenters-emulator init run.toml --method wecfl
    """
    from emulator.config import example_config
    from emulator.reports.output_files import write_output

    if path.exists() and not force:
        raise UsageError(f"{path} is there already", hint="choose another name, or --force")
    try:
        write_output(path, example_config(method).encode())
    except OSError as wrong:
        raise UsageError(f"cannot write {path}: {wrong.strerror}", hint="choose another place") from wrong
    _print_files([path], as_json=as_json)


@app.command()
@handle_errors
def fleet(  # noqa: PLR0913 - a command line
    config: Annotated[Path, typer.Argument(help="The coordinator's TOML file: where to go, and whose key to trust.")],
    *,
    devices: Annotated[int, typer.Option(min=1, help="How many real clients to run.")] = 100,
    workers: Annotated[int, typer.Option(min=1, help="Processes that share the devices; each has one thread.")] = 1,
    data_set: Annotated[
        str, typer.Option(help="What the devices hold; it has to suit the coordinator's model.")
    ] = "digits",
    samples: Annotated[int, typer.Option(min=1, help="Training samples of each device.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Draws the samples.")] = 0,
    data: Annotated[Path | None, run_option("data")] = None,
    state: Annotated[
        Path | None, typer.Option(help="Where devices keep their state; else in memory, and removed.")
    ] = None,
    identities: Annotated[
        Path | None,
        typer.Option(
            help="A folder of devices with certificates, as keys/devices of `fedcenters-coordinator provision`."
        ),
    ] = None,
    until_done: Annotated[
        bool, typer.Option("--until-done", help="Leave when the coordinator's runs are done.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run thousands of real clients on this machine.

    They train over MQTT for a coordinator on this machine. The code is that of fedcenters-edge; one thread takes
    thousands of lives step by step. Stays until stopped.

    example: fedcenters-emulator fleet coordinator.toml --devices 1000 --until-done
    """
    progress = ConsoleProgress()
    from emulator.testbed.large_fleet import FleetArgs, run_fleet

    asked = FleetArgs(
        config=config,
        devices=devices,
        data_set=data_set,
        samples=samples,
        seed=seed,
        state=state,
        data=data,
        identities=identities,
    )
    found = run_fleet(asked, workers=workers, until_done=until_done, say=progress.say)
    text = "{devices} devices: {computed} computed, {acknowledged} acknowledged; {memory_mb} MB"
    print(json.dumps(found) if as_json else f"{text}, {{seconds}} s".format(**found))


app.command()(experiment)


@app.command()
@handle_errors
def figures(
    run: Annotated[Path, typer.Argument(help="A folder that `simulate` wrote.")],
    *,
    out: Annotated[Path | None, typer.Option(help="Where the pictures go. Default: RUN/figures.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw a run as .png files, as the papers show it.

    Labels, curves, assignments, centers, devices, weights, images.

    example: fedcenters-emulator figures runs/simulate-fesem-0
    """
    progress = ConsoleProgress()
    if run.is_dir():  # what is no run is told first
        check_output_folder(out or run / "figures")
    with progress.during(f"reading {run}") as busy:
        from emulator.reports.run_figures import draw_run
        from emulator.run.replaced_files import finish_replaced_run

        finish_replaced_run(run)
        written = draw_run(run, out or run / "figures", say=progress.say, busy=busy)
    _print_files(written, as_json=as_json)


@app.command("choose-k", cls=GroupedCommand)
@handle_errors
@with_run_options(*CHOOSE_K_OPTIONS, rounds=3)
def choose_k(  # noqa: PLR0913 - a command line
    *,
    options: Mapping[str, Any],
    most: Annotated[int, typer.Option(min=1, help="The largest number of centers to try; 1 is the least.")] = 6,
    by: Annotated[str, typer.Option(help="accuracy, silhouette, or distance: its elbow.")] = "accuracy",
    sample: Annotated[int, typer.Option(min=1, help="How many devices to try it on, at most.")] = 100,
    picture: Annotated[Path | None, typer.Option(help="Also draw the trials, as .png or .svg.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("-c", metavar="KEY=VALUE", help="A setting of the method.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Try how many centers suit a fleet.

    Three rounds for each number on a sample of the fleet; testing samples are not looked at. For methods with a
    setting `clusters`.

    example: fedcenters-emulator choose-k --devices 12 --most 5 --picture choice.png
    """
    if picture is not None:
        check_output_file(picture, endings=DRAWINGS)
    progress = ConsoleProgress()
    from emulator import choose_k as choice
    from emulator.config import make_args, parse_pairs

    asked = make_args(parse_pairs(setting or []), options)
    progress.say(f"{asked.method} on {asked.data_set} with 1 to {most} centers, in virtual time")
    with progress.during("reading the data") as busy:

        def tell(trial: choice.ClusterCountTrial) -> None:
            progress.say(choice.format_trial(trial))

        result = choice.choose_k_json(asked, range(1, most + 1), by, sample=sample, progress=tell, busy=busy)
        if picture is not None:
            from emulator.reports.output_files import save_figure

            busy(f"drawing {picture}")
            save_figure(choice.draw_trials(result), picture, dpi=110)
    if as_json:
        print(json.dumps(result))
        return
    from emulator.reports.console_tables import choice_table

    choice_table(result)


@app.command()
@handle_errors
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders that simulate, serve or demo wrote.")],
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page. Default: report.html in the run's folder, or of several beside the first one's folder."
        ),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Of one demo: also its pictures side by side, as .png or .svg.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one page about a run, or several side by side.

    example: fedcenters-emulator report runs/simulate-fesem-0 runs/simulate-fedavg-0
    """
    page = out or (runs[0] if len(runs) == 1 else runs[0].parent) / "report.html"
    progress = ConsoleProgress()
    if out is not None or runs[0].is_dir():  # what is no run is told first
        check_output_file(page)
    if picture is not None:
        check_output_file(picture, endings=DRAWINGS)
    before = [place for place in (page, picture) if place is not None and place.exists()]
    with progress.during(f"reading {', '.join(map(str, runs))}") as busy:
        from emulator.reports import comparison
        from emulator.reports.demo_page import check_demo, write_report
        from emulator.reports.demo_page import draw_demo_pictures as draw
        from emulator.run.replaced_files import finish_replaced_run

        for run in runs:
            finish_replaced_run(run)
        if picture is not None:
            check_demo(runs)
        if len(runs) == 1 and out is None and (runs[0] / "summary.json").is_file():
            busy(f"drawing {page}")
            written = [write_report(runs[0])]
        else:
            written = [comparison.write_comparison(runs, page, busy=busy)]
        if picture is not None:
            busy(f"drawing {picture}")
            draw(runs[0], picture)
            written.append(picture)
        for place in before:
            progress.say(f"{place} was there before, and is replaced")
    _print_files(written, as_json=as_json)


def _print_files(written: list[Path], *, as_json: bool) -> None:
    """A line for each, or one JSON object."""
    print(json.dumps({"files": [str(path) for path in written]}) if as_json else "\n".join(map(str, written)))


if __name__ == "__main__":
    main()
