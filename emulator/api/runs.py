"""Run a method over a fleet in this process and in virtual time: all at once, or one round at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from coordinator.strategies.base import Strategy
from coordinator.strategies.registry import method_path, method_settings, summed_members
from edge_client.errors import UsageError
from emulator.api.checks import check_callback, check_fleet, check_method, check_own, in_words_of_python, shall_stop
from emulator.api.play import Start, check_begins, play, prepare_start
from emulator.api.progress import RunProgress, in_bar_place
from emulator.api.result import Result
from emulator.data.fleet import Fleet
from emulator.options import OPTIONS, SimulateArgs
from emulator.run.folder import NothingToResume
from emulator.run.own_metrics import Metric
from emulator.run.resolve import ResolvedRun, resolve_run
from export.own_thread import outside_inference_mode
from export.plugins import nearest_name_hint

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

    from coordinator.models.registry import Model
    from export.compiler.losses.sample_losses import LossFunction

OnRound = Callable[[Result], object]


class RunOptions(TypedDict, total=False):
    """The less common options of a run, as on the command line; emulator/options.py says what each means."""

    engine: str
    ray: str
    profiles: Path | None
    codec: str
    hostile: str
    concurrency: int | None
    buffer: int | None
    max_staleness: int | None
    evaluate_every: int
    fraction_evaluate: float
    checkpoint_every: int | None
    loggers: str


class SharedOptions(RunOptions, total=False):
    """The arguments that `simulate` has for every method and seed alike."""

    model: nn.Module | Callable[[], nn.Module] | str | None
    rounds: int
    loss: LossFunction | None
    metrics: Mapping[str, Metric] | None
    workers: int
    out: str | Path | None
    resume: bool
    progress: bool | None


def simulate(  # noqa: PLR0913 - the parts of a run
    method: Strategy,
    *,
    fleet: Fleet,
    model: nn.Module | Callable[[], nn.Module] | str | None = None,
    rounds: int = 10,
    seed: int = 0,
    loss: LossFunction | None = None,
    metrics: Mapping[str, Metric] | None = None,
    on_round: OnRound | None = None,
    workers: int = 1,
    out: str | Path | None = None,
    name: str = "",
    resume: bool = False,
    progress: bool | None = None,
    **options: Unpack[RunOptions],
) -> Result:
    """Train a method's centers on a fleet of devices, in virtual time.

    Args:
        method: a method of this package or your own, as `fc.FeSEM(3)`.
        fleet: the devices and their samples, from `fc.fleets` or `fc.fleet`.
        model: a torch module, which is copied and not changed; a function that makes one, whose weights `seed` then
            draws, and which waits for no other thread that simulates; or the name of one of ours. Default: what suits
            the fleet; for your own samples a perceptron with 64 hidden units.
        rounds: training rounds.
        seed: draws every random number, and cuts a fleet that has no seed of its own.
        loss: a function of outputs [batch, ...] and labels [batch] or targets, as `torch.nn.CrossEntropyLoss()`.
            Default: cross-entropy for classes, squared error for other targets.
        metrics: name -> function of y [n] and outputs [n, ...] as arrays -> a number, measured on each device's
            held-out samples in every round with an evaluation, of the devices that it asks. A number that is not
            finite leaves its device out of the means. It replaces `squared_error`, `absolute_error`, `r2` or
            `perplexity` of that name; those of other columns are refused.
        on_round: called with the result so far after each round; the run ends when it returns something true.
        workers: processes that share the devices' work; the numbers stay the same.
        out: a folder in which the run's own folder is made, for `report`, `bundle` and `resume`. Default: none;
            `Result.save("runs/mine")` writes one later, which is that of `out="runs", name="mine"`.
        name: the name of that folder. Default: made from the method and the seed.
        resume: go on from that folder's checkpoint, also of a run that was stopped and then saved; more `rounds` than
            before add rounds.
        progress: show a bar in a terminal and in a notebook; elsewhere a line on stderr every ten seconds. False:
            nothing.
        **options: the command line's other options, with underscores: `engine`, `ray`, `profiles`, `codec`, `hostile`,
            `concurrency`, `buffer`, `max_staleness`, `evaluate_every`, `fraction_evaluate`, `checkpoint_every`,
            `loggers`.

    Raises:
        UsageError, ConfigError: an option, a model or samples that cannot work; the message says what to write instead.

    >>> import fedcenters as fc
    >>> result = fc.simulate(fc.FeSEM(3, local_steps=5), fleet=fc.fleets.digits(devices=6), rounds=2)
    >>> len(result.history), int(result.assignments["device-00"])
    (2, 0)
    """
    check_callback(on_round)
    given = {"out": out, "name": name, "resume": resume, "workers": workers, **options}
    with in_words_of_python(), RunProgress(repr(method), rounds, shown=progress) as bar:
        return to_the_end(_rounds(method, fleet, model, rounds, seed, loss, metrics, bar, given), bar, on_round)


def check_several(methods: Iterable[Strategy], *, fleet: Fleet, seed: int, **options: Unpack[SharedOptions]) -> None:
    """Raise UsageError, ConfigError for what one of the methods refuses, before a run of any of the others begins."""
    given: dict[str, Any] = {"rounds": 10, "out": None, **options}
    rounds, model, loss, metrics = (given.pop(name, None) for name in ("rounds", "model", "loss", "metrics"))
    check_fleet(fleet)
    check_own(loss=loss, metrics=metrics, out=given["out"])
    starts: dict[int, Start] = {}  # by how many models a method trains as a sum
    with in_words_of_python():
        runs = [
            _resolved(method, rounds, seed, metrics, {k: v for k, v in given.items() if k != "progress"})
            for method in methods
        ]
        for run in runs:
            members = summed_members(run.args.method)
            if members not in starts:
                prepared = _prepared(fleet, model, loss, seed, members)
                starts[members] = outside_inference_mode(prepare_start)(run, fleet=fleet, model=prepared)
            outside_inference_mode(check_begins)(run, starts[members])


def run_one_of_several(
    title: str, method: Strategy, *, fleet: Fleet, seed: int, **options: Unpack[SharedOptions]
) -> Result:
    """`simulate` with `title` at the front of its progress, which also tells when it begins and ends.

    `resume`: go on where a round of the run is kept, else begin it.
    """
    given: dict[str, Any] = {"rounds": 10, "out": None, "resume": False, **options}
    shown = given.pop("progress", None)
    rounds, model, loss, metrics = (given.pop(name, None) for name in ("rounds", "model", "loss", "metrics"))
    with in_words_of_python(), RunProgress(title, rounds, shown=shown) as bar:
        bar.begin()
        run = partial(_rounds, method, fleet, model, rounds, seed, loss, metrics, bar)
        result = None
        with suppress(NothingToResume):  # several runs were interrupted before this one
            result = to_the_end(run(given), bar, None)
        if result is None:
            result = to_the_end(run({**given, "resume": False}), bar, None)
        bar.end(result.run)
        return result


def to_the_end(run: Generator[Result, bool | None, Result], bar: RunProgress, on_round: OnRound | None) -> Result:
    """The result of a run that `play` began; it ends early when `on_round` returns something true."""
    stop: bool | None = None
    with closing(run):  # after an error of `on_round`, too: what keeps the error would keep the run and its folder
        while True:
            try:
                so_far = run.send(stop)
            except StopIteration as done:
                result: Result = done.value
                bar.show(result.run)  # the line had what came after the last round
                return result
            bar.show(so_far.run)
            stop = shall_stop(on_round(so_far)) if on_round is not None else False


def rounds(  # noqa: PLR0913 - the parts of a run
    method: Strategy,
    *,
    fleet: Fleet,
    model: nn.Module | Callable[[], nn.Module] | str | None = None,
    rounds: int = 10,
    seed: int = 0,
    loss: LossFunction | None = None,
    metrics: Mapping[str, Metric] | None = None,
    workers: int = 1,
    out: str | Path | None = None,
    name: str = "",
    resume: bool = False,
    progress: bool | None = None,
    **options: Unpack[RunOptions],
) -> Iterator[Result]:
    """The same run as `simulate`, one round at a time: the result so far after each round.

    Leave the loop to stop early; a run with `out` then writes its folder, from which it can go on. Without `out`, save
    the last result after the loop: `r.save("runs/mine")`, then `out="runs", name="mine", resume=True`. Arguments are
    those of `simulate`; by default there is no `progress` where neither a terminal nor a notebook shows it.

    >>> import fedcenters as fc
    >>> for r in fc.rounds(fc.FedAvg(local_steps=5), fleet=fc.fleets.digits(devices=3), rounds=5):
    ...     if r.accuracy > 0.1:
    ...         break
    >>> len(r.history) < 5
    True
    """
    given = {"out": out, "name": name, "resume": resume, "workers": workers, **options}
    shown = in_bar_place() if progress is None else progress  # the loop itself sees each round
    with in_words_of_python(), RunProgress(repr(method), rounds, shown=shown) as bar:
        for so_far in _rounds(method, fleet, model, rounds, seed, loss, metrics, bar, given):
            bar.show(so_far.run)
            yield so_far


def _check_options(method: Strategy, given: Mapping[str, Any]) -> None:
    """Raises UsageError for what is no option of a run here; those of its fleet would be left without effect."""
    known = {*SharedOptions.__annotations__, "name", "seed"}
    if not (wrong := sorted(given.keys() - known)):
        return
    hint = nearest_name_hint(wrong[0], known)
    if wrong[0] == "broker":
        hint = "fc.federation(broker, fleet=...) plays runs over MQTT"
    elif wrong[0] in {row.name for row in OPTIONS.values()}:
        hint = "it belongs to the fleet: fc.fleets.digits(...), fc.fleet(...)"
    elif wrong[0].replace("_", "-") in method_settings(method):
        hint = f"it belongs to the method: {type(method).__name__}({wrong[0]}=...)"
    raise UsageError(f"a run has no option {wrong[0]!r}", hint=hint)


def _resolved(
    method: Strategy, rounds: int, seed: int, metrics: Mapping[str, Metric] | None, given: Mapping[str, Any]
) -> ResolvedRun:
    """The method and the options of a run, checked without its samples and its model."""
    values: dict[str, Any] = {key: value for key, value in given.items() if key not in ("out", "resume")}
    values |= {key: Path(given[key]) for key in ("out", "profiles") if given.get(key) is not None}
    settings = method_settings(method)
    args = SimulateArgs(method=method_path(method), settings=settings, rounds=rounds, seed=seed, **values)
    return resolve_run(args, strategy=method, metrics=metrics or {})


def _rounds(  # noqa: PLR0913, PLR0917 - the parts of a run
    method: Strategy,
    fleet: Fleet,
    model: nn.Module | Callable[[], nn.Module] | str | None,
    rounds: int,
    seed: int,
    loss: LossFunction | None,
    metrics: Mapping[str, Metric] | None,
    bar: RunProgress,
    given: Mapping[str, Any],
) -> Generator[Result, bool | None, Result]:
    """Names for what has one, for the record of the run; the values themselves for the run."""
    check_method(method)
    check_fleet(fleet)
    check_own(loss=loss, metrics=metrics, out=given["out"])
    _check_options(method, given)
    if given.get("name") and given["out"] is None:
        told = f"name is {given['name']!r}, and there is no folder that has it"
        raise UsageError(told, hint='give the folder in which it is made: out="runs"')
    run = _resolved(method, rounds, seed, metrics, given)
    prepared = _prepared(fleet, model, loss, seed, summed_members(run.args.method))
    return outside_inference_mode(play)(
        run,
        fleet=fleet,
        model=prepared,
        resume=given["resume"],
        say=bar.say,
        busy=bar.busy,
        keep=given["out"] is not None,
    )


def _prepared(
    fleet: Fleet,
    model: nn.Module | Callable[[], nn.Module] | str | None,
    loss: LossFunction | None,
    seed: int,
    members: int,
) -> Model | str | None:
    """The user's model, or ours with the user's loss; else the name that was given, None where the fleet has one."""
    wanted = (fleet.model or None) if model is None else model
    if loss is None and isinstance(wanted, str):
        return model if isinstance(model, str) else None
    from emulator.api.models import own_model

    return outside_inference_mode(own_model)(wanted, fleet.cut(seed), loss=loss, seed=seed, members=members)
