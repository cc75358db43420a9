"""How many centers does a fleet need? Short runs on a sample of it, one for each K (FeSEM, section 5.2).

A sample of up to 100 devices trains for three rounds with each K. Accuracy is measured on a fifth of every device's
training samples, which is held out; test samples are not used. The distances between clusters are those of the devices'
first models, which are trained from one start that is the same for every K. The distance within clusters falls with
every K, so that its elbow is taken; the silhouette is given beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from coordinator.clustering.gram import gram_matrix, squared_distances
from coordinator.clustering.kmeans import objective
from coordinator.clustering.silhouette import silhouette
from coordinator.models.members import check_model_name
from coordinator.rounds.label_counting import check_label_totals, count_labels
from coordinator.strategies.base import Fleet, Replies, Round, ServedModels, ServingOptions, State, Strategy, relay
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.momentum import with_momentum
from coordinator.strategies.common.representation import represent
from coordinator.strategies.common.setting_checks import check_choice, check_kind
from coordinator.strategies.registry import batch_size, make_method, method_settings
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import UsageError
from edge_client.protocol.task import ClientId, Flat, Schema
from emulator.data.fleet import Fleet as DeviceFleet
from emulator.engines.base import check_engine
from emulator.options import SimulateArgs
from emulator.run.execute import run_simulation, with_emulated_key
from emulator.run.load import check_samples, make_fleet, open_devices
from emulator.run.settings import RunSettings
from emulator.run.summary import refusal_reasons
from emulator.simulation.emulated_devices import EmulatedDevices

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from coordinator.models.registry import Model

TITLES = {
    "accuracy": "Accuracy on held-out training samples",
    "silhouette": "Silhouette of the first models",
    "distance": "Mean squared distance within clusters",
}
CRITERIA = tuple(TITLES)
HELD_OUT_SHARE = 0.2  # of a device's training samples
MIN_SAMPLES = 2  # training samples: one to train, one held out


@dataclass(frozen=True, kw_only=True)
class ClusterCountTrial:
    """The result with K centers: held-out accuracy of each device, and the distances of the devices' first models.

    `distance` is the mean squared distance to the own cluster's mean, `used` the number of centers with devices, and
    `devices` the number of those that trained. `per_device` is empty for targets that are no classes.
    """

    devices: int
    clusters: int
    used: int
    per_device: Mapping[ClientId, float]
    distance: float
    silhouette: float

    @property
    def accuracy(self) -> float | None:
        return float(np.mean(list(self.per_device.values()))) if self.per_device else None


def choose_k(  # noqa: PLR0913 - the parts of a trial
    args: SimulateArgs,
    ks: Sequence[int],
    *,
    sample: int = 100,
    by: str = CRITERIA[0],
    progress: Callable[[ClusterCountTrial], None] = lambda _: None,
    busy: Callable[[str], None] = lambda _: None,
    methods: Sequence[Strategy] = (),
    fleet: DeviceFleet | None = None,
    model: Model | None = None,
) -> list[ClusterCountTrial]:
    """One trial for each K on the same devices, the same held-out samples and the same first model.

    Raises UsageError where K is asked for `by` "accuracy" and the targets are no classes. `methods` (one for each K),
    `fleet` and `model` replace those that the options name. `progress` is told of each trial, `busy` what is prepared
    and which round runs.
    """
    check_kind("sample", sample, "int")
    if not ks or min(ks) < 1 or sample < 1:
        told = f"clusters {', '.join(map(str, ks)) or '(none)'} on a sample of {sample} devices"
        raise UsageError(told, hint="use at least one of each")
    if not methods and "clusters" in args.settings:
        raise UsageError("clusters is what the trials choose", hint="leave it out; the largest number to try is --most")
    check_engine(args.engine)
    if model is None:
        check_model_name(args.model)
    methods = methods or [make_method(args.method, **{**args.settings, "clusters": k}) for k in ks]
    busy("reading the data")
    args, split = make_fleet(args if model is None else replace(args, model=model.name), fleet)
    local = validation_fleet(split.devices, sample=sample, seed=args.seed)
    busy(f"preparing the model for {len(local)} devices")
    batch = batch_size(methods[0])
    with open_devices(
        model or args.model, replace(split, devices=local), seed=args.seed, batch=batch, engine=args.engine
    ) as (devices, start):
        check_samples(devices.program, split)
        check_label_totals(methods[-1], devices.program)
        if by == "accuracy" and not devices.program.has_classes:
            told = f"the targets of {args.data_set} are no classes, and have no accuracy"
            raise UsageError(told, hint='take by="silhouette" or by="distance" (--by on the command line)')
        settings = RunSettings(rounds=args.rounds, seed=args.seed, batch=batch)
        return run_trials(methods, start, devices, settings, progress=progress, busy=busy)


def run_trials(
    methods: Sequence[Strategy],
    start: Flat,
    devices: EmulatedDevices,
    settings: RunSettings,
    *,
    progress: Callable[[ClusterCountTrial], None] = lambda _: None,
    busy: Callable[[str], None] = lambda _: None,
) -> list[ClusterCountTrial]:
    """A run of each method from `start` [schema.size], on devices without state of an earlier run."""
    trials: list[ClusterCountTrial] = []
    for number, method in enumerate(methods, 1):
        heard = RecordingStrategy(_unsealed(method, devices.program.schema, settings.seed))
        fresh = replace(devices, own={}, posterior={})
        running = partial(_tell_round, busy, f"trial {number}/{len(methods)}", settings.rounds)
        running({"round": 0})
        result = run_simulation(heard, start, fresh, settings, progress=running)
        if not heard.models and (reasons := refusal_reasons(result.records)):
            hint = "lower learning-rate, or bring the samples to a usual scale"
            raise UsageError(f"no device's training counted: {', '.join(reasons)}", hint=hint)
        if not heard.models.keys() & result.state.assignment.keys():
            told = f"{method!r} has given no device a center by round {settings.rounds}"
            raise UsageError(told, hint="use more --rounds")
        trials.append(_trial(heard, result.state, result.schema, result.records[-1]["per_device"]))
        progress(trials[-1])
    return trials


def _tell_round(busy: Callable[[str], None], trial: str, rounds: int, done: Mapping[str, Any]) -> None:
    if done["round"] < rounds:
        busy(f"{trial}: round {done['round'] + 1}/{rounds} is running")


def recommend_k(trials: Iterable[ClusterCountTrial], by: str) -> int:
    """The K to take.

    By "accuracy": the least K that is not clearly worse than the best one, which is when the mean difference over the
    devices is at most its own standard error. By "silhouette": the greatest, of equals the least K. By "distance": the
    elbow of the curve, the point farthest below the line from its first to its last (Satopaa 2011), or the least K
    where nothing bends.
    """
    in_order = sorted(trials, key=lambda trial: trial.clusters)
    if by == "silhouette":
        return max(in_order, key=lambda trial: trial.silhouette).clusters
    if by == "distance":
        ks, within = [[float(getattr(trial, name)) for trial in in_order] for name in ("clusters", "distance")]
        line = np.interp(ks, [ks[0], ks[-1]], [within[0], within[-1]])
        return in_order[int(np.argmax(np.round(line - within, 12)))].clusters
    best = max(in_order, key=lambda trial: trial.accuracy or 0.0)
    return next(trial.clusters for trial in in_order if not _worse(trial, best))


def choose_k_json(  # noqa: PLR0913 - those of `choose_k`
    args: SimulateArgs,
    ks: Sequence[int],
    by: str,
    *,
    sample: int,
    progress: Callable[[ClusterCountTrial], None] = lambda _: None,
    busy: Callable[[str], None] = lambda _: None,
    methods: Sequence[Strategy] = (),
    fleet: DeviceFleet | None = None,
    model: Model | None = None,
) -> dict[str, Any]:
    """Every trial and the K to take by each criterion: the JSON object that the command prints."""
    check_choice("by", by, CRITERIA)
    trials = choose_k(
        args, ks, sample=sample, by=by, progress=progress, busy=busy, methods=methods, fleet=fleet, model=model
    )
    shown = ("clusters", "used", "accuracy", "distance", "silhouette")
    known = [criterion for criterion in CRITERIA if criterion != "accuracy" or trials[0].per_device]
    choices = {criterion: recommend_k(trials, criterion) for criterion in known}
    return {
        "method": args.method,
        "data_set": args.data_set if fleet is None else fleet.options["data_set"],
        "rounds": args.rounds,
        "devices": trials[0].devices,
        "trials": [{name: getattr(trial, name) for name in shown} for trial in trials],
        "recommended": choices,
        "by": by,
        "clusters": choices[by],
    }


def format_trial(trial: ClusterCountTrial) -> str:
    """One line about a trial."""
    accuracy = "" if trial.accuracy is None else f"accuracy {trial.accuracy:.1%}, "
    return f"{trial.clusters} centers: {accuracy}silhouette {trial.silhouette:.3f}"


def draw_trials(result: Mapping[str, Any]) -> Figure:
    """Accuracy, distance and silhouette over K, the recommended K marked."""
    from matplotlib.ticker import PercentFormatter

    from emulator.reports import plots

    rows, chosen = sorted(result["trials"], key=lambda row: row["clusters"]), result["recommended"]
    ks = [row["clusters"] for row in rows]

    def panel(key: str, title: str, mark: int) -> Callable[[Any], None]:
        def draw(axes: Any) -> None:  # noqa: ANN401 - matplotlib's Axes
            values = [row[key] for row in rows]
            axes.plot(ks, values, color=plots.COLOURS[0], marker="o", lw=2)
            at = (mark, values[ks.index(mark)])
            axes.plot(*at, marker="o", ms=13, mfc="none", mec=plots.COLOURS[4], mew=2)
            axes.annotate(f"{mark}", at, xytext=(0, -20), textcoords="offset points", ha="center", fontweight="bold")
            axes.set(title=title, xlabel="centers", xticks=ks)
            if key == "accuracy":
                axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            axes.margins(x=0.08, y=0.25)
            axes.grid(axis="y", color="#e5e7eb", lw=0.8)

        return draw

    return plots.make_figure(12, 3.6, *(panel(key, TITLES[key], mark) for key, mark in chosen.items()))


def validation_fleet(devices: Mapping[ClientId, DeviceData], *, sample: int, seed: int) -> dict[ClientId, DeviceData]:
    """Up to `sample` devices, whose training samples are dealt into four fifths to train and one fifth to test."""
    rng = np.random.Generator(np.random.PCG64(seed))
    able = sorted(c for c, local in devices.items() if len(local.train) >= MIN_SAMPLES)
    if not able:
        raise UsageError(f"no device has {MIN_SAMPLES} training samples", hint="use fewer devices")
    chosen = sorted(rng.permutation(len(able))[:sample].tolist())
    return {able[i]: _dealt(devices[able[i]].train, rng) for i in chosen}


def _dealt(data: Dataset, rng: np.random.Generator) -> DeviceData:
    order = rng.permutation(len(data))
    kept, held = np.split(order, [len(data) - max(1, round(HELD_OUT_SHARE * len(data)))])
    return DeviceData(train=Dataset(data.x[kept], data.y[kept]), test=Dataset(data.x[held], data.y[held]))


@dataclass(frozen=True)
class RecordingStrategy:
    """A method that records the first model of each device."""

    method: Strategy
    models: dict[ClientId, Flat] = field(default_factory=dict)

    def begin(self, model: Flat, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> State:
        return self.method.begin(model, schema, fleet, rng)

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        exchanges = with_momentum(self.method, state, schema, self.method.round(state, schema, fleet, rng))
        exchanges = count_labels(self.method, state, exchanges)
        return relay(exchanges, see=self._record)

    def _record(self, replies: Replies) -> None:
        for c, reply in sorted(replies.items()):
            if reply.update is not None:
                self.models.setdefault(c, reply.update)

    @property
    def serving(self) -> ServingOptions:
        return self.method.serving

    def predictor(self, state: State, who: ClientId | None) -> ServedModels:
        return self.method.predictor(state, who)


def _unsealed(method: Strategy, schema: Schema, seed: int) -> Strategy:
    """The method with single updates, of which noise takes its key, as the trials look at them."""
    if isinstance(method, LocalSgd):
        method = cast("Strategy", replace(method, server=replace(method.server, secure="off")))
    return with_emulated_key(method, schema, seed)


def _trial(
    heard: RecordingStrategy, state: State, schema: Schema, per_device: Mapping[ClientId, float]
) -> ClusterCountTrial:
    who = [c for c in sorted(heard.models) if c in state.assignment]
    labels = np.array([state.assignment[c] for c in who], dtype=np.int64)
    kind = str(method_settings(heard.method).get("representation", "all"))
    vectors = np.stack([heard.models[c] for c in who])
    matrix, every = gram_matrix(represent(vectors, schema, kind, pivot=state.extra.get("start"))), np.arange(len(who))
    apart = np.sqrt(squared_distances(matrix, every, every))
    np.fill_diagonal(apart, 0.0)
    return ClusterCountTrial(
        devices=len(who),
        clusters=len(state.centers),
        used=len(np.unique(labels)),
        per_device=per_device,
        distance=objective(matrix, labels, len(state.centers), np.ones(len(who))) / len(who),
        silhouette=silhouette(apart, labels),
    )


def _worse(trial: ClusterCountTrial, best: ClusterCountTrial) -> bool:
    both = sorted(best.per_device.keys() & trial.per_device.keys())
    lost = np.array([best.per_device[c] - trial.per_device[c] for c in both])
    error = float(lost.std(ddof=1)) / np.sqrt(len(lost)) if len(lost) > 1 else 0.0
    return bool(lost.mean() > error)
