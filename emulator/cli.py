"""fedcenters-emulator: a fleet without a fleet. Parses, calls, prints; what takes long is imported in the commands.

stdout carries data: a table, or with --json one JSON object. Everything else goes to stderr. Exit codes are those of
edge_client/errors.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

try:
    import typer
except ImportError as missing:  # a device's installation has no typer
    from edge_client.errors import missing_extra

    raise SystemExit(missing_extra(missing)) from None

from edge_client.errors import UsageError, foreseen
from emulator.talk import Talk

app = typer.Typer(
    name="fedcenters-emulator",
    help="A fleet without a fleet.\n\nexample: fedcenters-emulator demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
ENGINE_HELP = "auto: the fastest here; lean (CPU), stacked or graphs (GPU); or onnx, litert, pt2, as devices run it."
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def main() -> None:
    """Entry point of the console script."""
    app()


@app.command()
@foreseen
def demo(
    *,
    as_json: AsJson = False,
    seed: Annotated[int, typer.Option(min=0, help="Cuts the data and draws every random number.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Training rounds of each method.")] = 10,
    out: Annotated[Path, typer.Option(help="The run's own folder is made in here.")] = Path("runs"),
    broker: Annotated[str, typer.Option(help="auto, mosquitto, embedded, or a URL like mqtt://host:1883.")] = "auto",
) -> None:
    """Twelve devices over MQTT, three centers, exported files, three new devices; half a minute.

    Starts a broker, a coordinator and twelve emulated devices that train with ONNX Runtime, LiteRT and torch. FeSEM
    finds their groups; FedAvg runs for comparison. Leaves runs/<name>/ with report.html, and nothing running.
    """
    talk = Talk()
    talk.say("12 devices, 3 hidden groups, one coordinator, over MQTT on this machine")
    from emulator.demo import DemoSettings, run

    result, new_devices = run(DemoSettings(seed=seed, rounds=rounds, out=out, broker=broker), talk)
    if as_json:
        print(json.dumps(result))
        return
    from emulator.tables import demo_table

    demo_table(result, new_devices)


@app.command()
@foreseen
def simulate(  # noqa: PLR0913 - a command line
    *,
    method: Annotated[str, typer.Option(help="fesem, fedavg, or another method by name.")] = "fesem",
    data_set: Annotated[str, typer.Option(help="What the devices hold.")] = "digits",
    partition: Annotated[str, typer.Option(help="How they share it, as dirichlet:alpha=0.1; the data set's own.")] = "",
    devices: Annotated[int | None, typer.Option(min=1, help="How many devices; as many as suit the data set.")] = None,
    groups: Annotated[int | None, typer.Option(min=1, help="How many true groups the partition makes.")] = None,
    clusters: Annotated[int | None, typer.Option(min=1, help="How many centers, for methods that have them.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Training rounds.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Cuts the data and draws every random number.")] = 0,
    engine: Annotated[str, typer.Option(help=ENGINE_HELP)] = "auto",
    model: Annotated[str, typer.Option(help="A model by name, or package.module:Factory; the data set's own.")] = "",
    data: Annotated[Path | None, typer.Option(help="The folder of data sets; else FEDCENTERS_DATA.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that share the devices' work.")] = 1,
    ray: Annotated[str, typer.Option(metavar="HOST:PORT", help="A Ray cluster that does the work; or auto.")] = "",
    profiles: Annotated[
        Path | None, typer.Option(help="A TOML file of kinds of devices; see emulator/profiles.py.")
    ] = None,
    codec: Annotated[str, typer.Option(help="How updates travel: f32, f16, or i8 as over MQTT.")] = "f32",
    hostile: Annotated[
        str, typer.Option(metavar="ATTACK:SHARE", help="What a share of the devices does, as sign-flip:0.2.")
    ] = "",
    evaluate_every: Annotated[int, typer.Option(min=1, help="Rounds from one test to the next; the last has one.")] = 1,
    fraction_evaluate: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the devices in a test; in the last round all.")
    ] = 1.0,
    out: Annotated[Path, typer.Option(help="The run's own folder is made in here.")] = Path("runs"),
    setting: Annotated[
        list[str] | None, typer.Option("-c", metavar="KEY=VALUE", help="A setting of the method.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """A whole run in this process, in virtual time: the same methods and rounds as over MQTT, without a network.

    example: fedcenters-emulator simulate --method fesem -c local-steps=40 -c learning-rate=0.05
    """
    talk = Talk()
    settings = settings_from(setting or [])
    if clusters is not None:
        settings["clusters"] = clusters
    talk.say(f"{method} on {data_set}, in virtual time")
    from emulator.simulation import SimulateArgs, simulate_json
    from emulator.watch import in_words

    asked = SimulateArgs(
        method=method,
        data_set=data_set,
        model=model,
        partition=partition,
        devices=devices,
        groups=groups,
        rounds=rounds,
        seed=seed,
        engine=engine,
        settings=settings,
        data=data,
        workers=workers,
        ray=ray,
        profiles=profiles,
        codec=codec,
        hostile=hostile,
        evaluate_every=evaluate_every,
        fraction_evaluate=fraction_evaluate,
        out=out,
    )
    result = simulate_json(asked, lambda record: talk.say(in_words(record)))
    if as_json:
        print(json.dumps(result))
        return
    from emulator.tables import simulate_table

    simulate_table(result)


@app.command()
@foreseen
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
    data: Annotated[Path | None, typer.Option(help="The folder of data sets; else FEDCENTERS_DATA.")] = None,
    state: Annotated[
        Path | None, typer.Option(help="Where devices keep their state; else in memory, and removed.")
    ] = None,
    until_done: Annotated[
        bool, typer.Option("--until-done", help="Leave when the coordinator's runs are done.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Thousands of real clients on this machine, over MQTT, for a coordinator on this machine.

    The code is that of fedcenters-edge; one thread takes thousands of lives step by step. Stays until stopped.

    example: fedcenters-emulator fleet coordinator.toml --devices 1000 --until-done
    """
    talk = Talk()
    from emulator.many import FleetArgs
    from emulator.many import fleet as run_fleet

    asked = FleetArgs(
        config=config, devices=devices, data_set=data_set, samples=samples, seed=seed, state=state, data=data
    )
    found = run_fleet(asked, workers=workers, until_done=until_done, say=talk.say)
    text = "{devices} devices: {connected} connected, {computed} computed, {acknowledged} acknowledged; {memory_mb} MB"
    print(json.dumps(found) if as_json else f"{text}, {{seconds}} s".format(**found))


@app.command()
@foreseen
def experiment(  # noqa: PLR0913 - a command line
    name: Annotated[str, typer.Argument(help="A paper's table, as wecfl-table2.")],
    *,
    data: Annotated[Path | None, typer.Option(help="The folder of data sets; else FEDCENTERS_DATA.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each cell; the experiment's own number.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of each run; the paper's.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Methods, columns or numbers of centers, as fedavg,wecfl and K=10; else all."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Finished cells are kept here, and not run again.")] = Path(
        "runs/experiments"
    ),
    workers: Annotated[int, typer.Option(min=1, help="Processes that share the devices' work.")] = 1,
    write: Annotated[Path | None, typer.Option(help="A Markdown file in which to put the table.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a paper's table, cell by cell, and print it beside the paper's figures. Goes on where it was stopped.

    Devices train with the engine that is the fastest here.

    example: fedcenters-emulator experiment wecfl-table2 --data DIR --seeds 1 --only fedavg,wecfl
    """
    talk = Talk()
    talk.say(f"reading {name}")
    from emulator.experiments.command import Asked
    from emulator.experiments.command import experiment as carry_out

    found = carry_out(
        Asked(name=name, data=data, seeds=seeds, rounds=rounds, only=only or (), out=out, workers=workers, write=write),
        talk.say,
    )
    for what, why in found["reasons"].items():
        talk.say(f"{what} was not run: {why}")
    print(json.dumps(found) if as_json else found["table"])


@app.command()
@foreseen
def figures(
    run: Annotated[Path, typer.Argument(help="A folder that `simulate` wrote.")],
    *,
    out: Annotated[Path | None, typer.Option(help="Where the pictures go; run/figures.")] = None,
) -> None:
    """Draw what the papers show of a run, as .png: labels, curves, assignments, centers, devices, weights, images."""
    from emulator.gallery import draw

    for path in draw(run, out or run / "figures", Talk().say):
        print(path)


@app.command("choose-k")
@foreseen
def choose_k(  # noqa: PLR0913 - a command line
    *,
    method: Annotated[str, typer.Option(help="A method with a setting `clusters`.")] = "fesem",
    most: Annotated[int, typer.Option(min=1, help="The largest number of centers to try; 1 is the least.")] = 6,
    by: Annotated[str, typer.Option(help="accuracy or silhouette.")] = "accuracy",
    data_set: Annotated[str, typer.Option(help="What the devices hold.")] = "digits",
    partition: Annotated[str, typer.Option(help="How they share it; the data set's own.")] = "",
    devices: Annotated[int | None, typer.Option(min=1, help="How many devices there are.")] = None,
    sample: Annotated[int, typer.Option(min=1, help="How many of them to try it on, at most.")] = 100,
    groups: Annotated[int | None, typer.Option(min=1, help="How many true groups the partition makes.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Training rounds of each trial.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Cuts the data and draws every random number.")] = 0,
    engine: Annotated[str, typer.Option(help=ENGINE_HELP)] = "auto",
    model: Annotated[str, typer.Option(help="A model by name, or package.module:Factory; the data set's own.")] = "",
    data: Annotated[Path | None, typer.Option(help="The folder of data sets; else FEDCENTERS_DATA.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw the trials, as .png or .svg.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("-c", metavar="KEY=VALUE", help="A setting of the method.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """How many centers? Three rounds for each number on a sample of the fleet; testing samples are not looked at.

    example: fedcenters-emulator choose-k --devices 12 --most 5 --picture choice.png
    """
    talk = Talk()
    talk.say(f"{method} on {data_set} with 1 to {most} centers, in virtual time")
    from emulator import choose_k as choice
    from emulator.simulation import SimulateArgs

    asked = SimulateArgs(
        method=method,
        data_set=data_set,
        model=model,
        partition=partition,
        devices=devices,
        groups=groups,
        rounds=rounds,
        seed=seed,
        engine=engine,
        settings=settings_from(setting or []),
        data=data,
    )
    result = choice.choose_k_json(
        asked, range(1, most + 1), by, sample=sample, progress=lambda trial: talk.say(choice.in_words(trial))
    )
    if picture is not None:
        choice.picture(result, picture)
    if as_json:
        print(json.dumps(result))
        return
    from emulator.tables import choice_table

    choice_table(result)


@app.command()
@foreseen
def report(
    run: Annotated[Path, typer.Argument(help="A folder that `demo` wrote.")],
    *,
    picture: Annotated[Path | None, typer.Option(help="Also write the pictures side by side, as .png or .svg.")] = None,
) -> None:
    """Write report.html of a finished demo again."""
    from emulator.report import picture as draw
    from emulator.report import write_report

    print(write_report(run))
    if picture is not None:
        draw(run, picture)
        print(picture)


def settings_from(pairs: list[str]) -> dict[str, int | float | str]:
    """["lam=0.1"] -> {"lam": "0.1"}; the method reads each value in its own type."""
    settings: dict[str, int | float | str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise UsageError(f"-c {pair!r} is no setting", hint="write it as -c local-steps=20")
        settings[key] = value
    return settings


if __name__ == "__main__":
    main()
