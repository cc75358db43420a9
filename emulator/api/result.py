"""What a run found: curves, assignments and centers, as values of Python and as a run's folder."""

from __future__ import annotations

import base64
import html
import io
import logging
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.rounds.metrics import ari
from coordinator.rounds.round_record import RoundRecord
from coordinator.strategies.base import Strategy
from coordinator.strategies.registry import batch_size, method_name
from edge_client.errors import ConfigError, UsageError
from edge_client.protocol.task import Array, ClientId, Flat
from emulator.api.checks import in_words_of_python
from emulator.api.history import Table, frame, series
from emulator.api.nearest import check_center, choose, predict_samples
from emulator.api.progress import show_work
from emulator.config import GUIDE_FILE, resolved_table
from emulator.data.fleet import is_named_fleet
from emulator.data.fleet_split import FleetData
from emulator.options import SimulateArgs
from emulator.reports.console_tables import summary_rows
from emulator.run.execute import SimulationResult
from emulator.run.folder import open_run_folder
from emulator.run.replaced_files import replaced_files
from emulator.run.run_parts import Marks, run_parts
from emulator.run.summary import Record, result_summary, told_of_record
from emulator.run.write import write_run
from emulator.run_centers import RunCenters
from emulator.simulation.attacks import honest_accuracy
from emulator.simulation.checkpoint import copy_checkpoint, load_models, read_checkpoint, reading_checkpoint
from export.output_paths import check_output_folder, writing_to
from export.plugins import nearest_name_hint

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike
    from torch import Tensor, nn

    from coordinator.models.registry import Model
    from edge_client.nearest.choose_center import Selection
    from edge_client.protocol.nearest.router import Router
    from export.bundle.reader import Bundle

log = logging.getLogger(__name__)
PICTURE_DPI = 80
SCORES = ("accuracy", "f1_of_devices", "f1_pooled", "loss", "metrics")  # of a record


class TemporaryPlace:
    """A folder that lives as long as the last result that names it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="fedcenters-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Result:
    """A run of a method over a fleet, or its rounds so far. `print` it for a summary.

    `method` is the value that was run, `args` the run's options with every default filled in, `split` the devices'
    samples, `seconds` those of this machine. `folder` is the run's own folder, if it has one. `taught` is the guide
    that the folder of a loaded run had. `marks` tell the run's own loss and model from others.

    >>> import fedcenters as fc
    >>> result = fc.simulate(fc.FeSEM(3, local_steps=5), fleet=fc.fleets.digits(devices=6), rounds=2)
    >>> len(result.history), int(result.assignments["device-03"]), sorted(result.centers[0])[0]
    (2, 0, '1.bias')
    >>> result.predict(result.split.devices["device-00"].test.x, device="device-00").shape
    (40,)
    """

    method: Strategy
    args: SimulateArgs
    run: SimulationResult
    split: FleetData
    start: Flat
    attackers: frozenset[ClientId] = frozenset()
    own_model: Model | None = None
    seconds: float = 0.0
    folder: Path | None = None
    temporary: TemporaryPlace | None = None
    taught: Router | None = None
    marks: Marks = field(default_factory=dict)

    @property
    def accuracy(self) -> float | None:
        """Share of right predictions over all held-out samples in the last round that had a test; None without one."""
        rounds = self.run.records
        found = (rounds[i]["accuracy"]["micro"] for i in reversed(range(len(rounds))))
        return next((value for value in found if value is not None), None)

    @cached_property
    def history(self) -> Any:  # noqa: ANN401 - a DataFrame, or a `Table` without pandas
        """One row per round, as a pandas DataFrame, or as a `Table` without pandas.

        `accuracy` over all held-out samples and `accuracy_devices`, the mean of the devices'; `f1` of devices, weighted
        by samples; `loss` where devices report one; `ari`, the adjusted Rand index against the true groups; `bytes` to
        and from the server; `seconds` of virtual time, `real_seconds` of this machine; errors of targets that are no
        classes, and metrics of your own, means of the devices' weighted by held-out samples.
        """
        return frame(list(self.rows()))

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows of `history` as dicts."""
        for record, real_s in zip(self.run.records, self.run.real_seconds, strict=True):
            known = sorted(record["assignment"].keys() & self.split.groups.keys())
            truth, found = [self.split.groups[c] for c in known], [record["assignment"][c] for c in known]
            ours = {
                "round": record["round"],
                "accuracy": record["accuracy"]["micro"],
                "accuracy_devices": record["accuracy"]["macro"],
                "f1": record["f1_of_devices"]["weighted"],
                "loss": record["loss"]["micro"] if "loss" in record else None,
                "ari": ari(truth, found) if known else None,
                "bytes": record["bytes"]["down"] + record["bytes"]["up"],
                "seconds": record["seconds"],
                "real_seconds": real_s,
            }
            yield ours | {k: v["micro"] for k, v in sorted(record.get("metrics", {}).items()) if k not in ours}

    @property
    def assignments(self) -> Any:  # noqa: ANN401 - a Series, or a dict without pandas
        """Device -> the number of its center, as a pandas Series, or as a dict without pandas."""
        return series(dict(sorted(self.run.state.assignment.items())), "center")

    @property
    def accuracies(self) -> Any:  # noqa: ANN401 - a Series, or a dict without pandas
        """Device -> its share of right predictions on its held-out samples, in the last round that tested it.

        By the model that it is served. A pandas Series, or a dict without pandas.
        """
        return series(self._scores()["accuracy"], "accuracy")

    def per_device(self, of: str) -> Any:  # noqa: ANN401 - a Series, or a dict without pandas
        """Device -> its score on its held-out samples, as `accuracies`: "loss", "squared_error" or a metric of yours.

        Raises UsageError for a score that no device has.
        """
        found = {name: scores for name, scores in self._scores().items() if scores}
        if of not in found:
            raise UsageError(f"no device has a score {of!r}", hint=nearest_name_hint(of, found))
        return series(found[of], of)

    def _scores(self) -> dict[str, dict[ClientId, float]]:
        """Each score -> device -> its value in the last round that tested it."""
        found: dict[str, dict[ClientId, float]] = {"accuracy": {}}
        for record in self.run.records:
            of = {name: value["per_device"] for name, value in record.get("metrics", {}).items()}
            of |= {"accuracy": record["per_device"], "loss": record.get("loss_per_device", {})}
            found |= {name: {**found.get(name, {}), **values} for name, values in of.items()}
        return {name: dict(sorted(values.items())) for name, values in found.items()}

    @cached_property
    def model(self) -> Model:
        """The model with its first weights and its shapes."""
        if self.own_model is not None:
            return self.own_model
        from coordinator.models.registry import build_model

        try:
            return build_model(self.args.model, seed=self.args.seed)
        except UsageError as unknown:
            told = f"the model {self.args.model} cannot be made again: {unknown.message}"
            raise ConfigError(told, hint="give the run's own: fc.load(folder, model=...)") from None

    @property
    def classes(self) -> tuple[str | bool, ...]:
        """The user's values of classes 0, 1, ..., which `predict` returns; empty for labels that are numbers."""
        return tuple(self.split.classes)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the inputs, where the samples came from a table; a data frame for `predict` needs them."""
        return tuple(self.split.columns)

    @cached_property
    def centers(self) -> Sequence[dict[str, Tensor]]:
        """The `state_dict` of each center, for a module like the one that was trained."""
        return [self.module(k).state_dict() for k in range(len(self.run.state.centers))]

    def module(self, center: int) -> nn.Module:
        """A copy of the module with a center's values, in evaluation mode. Raises UsageError for no such center."""
        from emulator.api.models import module_of

        chosen = check_center(center, len(self.run.state.centers))
        return module_of(self.model.module, self.run.schema, self.run.state.centers[chosen])

    def nearest(self, x: ArrayLike | Mapping[str, ArrayLike], y: ArrayLike | None = None) -> Selection:
        """The center for a device that never trained, from its samples [n, ...], with labels [n] or without.

        `center` of the answer is None where none is taken; `fit` is "well", "badly" or "none", or None where it is not
        known. `probabilities` are by center, `reasons` plain lines. The first call lets the run's devices teach the
        rule, which takes seconds.
        Labels are values of `classes`, or their numbers; a data frame is read by the names of `columns`. Samples of a
        model with several inputs are a dict of arrays.
        """
        with show_work("nearest center"):
            return choose(self._source, x, y)

    @property
    def guide(self) -> Router | None:
        """The rule of `nearest`, taught by the run's devices; None for a method whose centers are not of devices."""
        return self._source.router

    def predict(
        self, x: ArrayLike | Mapping[str, ArrayLike], *, device: object = None, center: int | None = None
    ) -> Array:
        """Predicted classes [n] for samples [n, ...], or targets [n, ...] of a model without classes.

        Classes are the values of `classes`, where the run has some. Of a data frame the run's `columns` are taken by
        name, in any order; a frame without one of them is refused.

        By the model that a device of the run is served (its own, where the method lets it keep one), by a center,
        or by the center that is nearest to the samples:
        with a warning where the samples, which have no labels here, fit several. Raises UsageError where none fits.
        `device` is a device's name, or what your data call it.
        """
        with show_work("predicting"):
            return predict_samples(self._source, x, device=device, center=center)

    @cached_property
    def _source(self) -> RunCenters:
        return RunCenters(
            method=self.method,
            state=self.run.state,
            first=self.start,
            data=self.split,
            seed=self.args.seed,
            get_model=lambda: self.model,
            taught=self.taught,
            own=self._own,
            whole=self.run.whole,
        )

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: the fields, without what is made from them and without the temporary folder of this process."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"temporary": None}

    def _own(self, who: ClientId, slot: str) -> Flat | None:
        """The model that a device keeps; the run's checkpoint has it. Raises UsageError where there is none."""
        found = self._checkpoint
        if found is None or not (found / "own").is_dir():
            hint = "use the result that `simulate` returned at its end; over MQTT the devices alone have theirs"
            raise UsageError(f"{who} keeps a model of its own, which this result does not have", hint=hint)
        kept: dict[tuple[ClientId, str], Flat] = {}
        with reading_checkpoint(found):
            load_models(found / "own", {who}, kept)
        return kept.get((who, slot))

    @property
    def _checkpoint(self) -> Path | None:
        """The checkpoint of the last round, where the run has one: a run that goes on may have a later one."""
        place = self.folder or (self.temporary.path if self.temporary else None)
        found = read_checkpoint(place) if place is not None else None
        return found[0] if found is not None and found[1].round == self.run.records[-1]["round"] else None

    @property
    def _last(self) -> RoundRecord:
        """The record of the last round, with the center of each device: of very many a record has some."""
        return {**self.run.records[-1], "assignment": self.run.state.assignment or self.run.records[-1]["assignment"]}

    def summary(self) -> Record:
        """The run in one JSON object, as the command prints it; its scores are those of the last test."""
        last, past = self._last, reversed(self.run.records)
        tested: Record = dict(next((r for r in past if r["accuracy"]["micro"] is not None or "loss" in r), last))
        scored = {**last, **{name: tested[name] for name in SCORES if name in tested}}  # a run may be stopped between
        found = result_summary(self.args, self.split.groups, scored)
        if not self._source.measured(last):
            found["centers_accuracy"] = {"micro": None, "macro": None}
        attacked = {"hostile": sorted(self.attackers), "honest_accuracy": honest_accuracy(tested, self.attackers)}
        return {
            **found,
            "seconds": round(self.seconds, 3),
            "virtual_seconds": round(self.run.virtual_seconds, 3),
            **told_of_record(scored),
            **(attacked if self.attackers else {}),
            "run": None if self.folder is None else str(self.args.out / self.folder.name),
        }

    def export(
        self,
        folder: str | Path,
        *,
        formats: Sequence[str] = ("onnx", "tflite"),
        quantize: Sequence[str] = (),
        stacked: bool = False,
        samples: bool = True,
        progress: bool | None = None,
    ) -> Bundle:
        """Write every center as files that other runtimes load, each compared with torch, and what a newcomer needs.

        `formats`: of "onnx", "tflite" and "pt2"; `quantize`: schemes of `fedcenters-export`, as "int8"; `stacked`: also
        one file of all centers; `samples`: held-out samples lie beside them, to check the files on; `progress`: show
        what is being made, by default in a terminal and in a notebook. A loaded run without its samples compares the
        files on random inputs, and a warning says so. The folder is a bundle, as `fc.read_bundle` reads. Its
        `program/` has the training program for the engines of these formats, and always for torch: the files are made
        from that graph and compared with it, then and by `verify`, and `Bundle.module` is it. Raises UsageError where
        the folder has something else or cannot be written, ProgramRefused for a module that a format cannot express.
        """
        from emulator.bundle_source import source_of_centers
        from export.bundle.bundle_contents import MAX_COMPARED_SAMPLES
        from export.bundle.commands import write_run_bundle
        from export.bundle.reader import check_replaceable, read_bundle
        from export.bundle.writer import BundleOptions, engines_of

        formats, quantize = ((one,) if isinstance(one, str) else tuple(one) for one in (formats, quantize))
        options = BundleOptions(formats=formats, schemes=quantize, stacked=stacked)
        last, name = self._last, self.args.method
        engines, compared = engines_of(formats), MAX_COMPARED_SAMPLES if samples else 0
        check_output_folder(Path(folder))
        with show_work(f"exporting {Path(folder).name}", shown=progress) as busy, writing_to(Path(folder)):
            if there := check_replaceable(Path(folder)):
                log.warning("%s", there)
            busy("reading the centers")
            if "int8-static" in options.schemes:
                next(iter(self.split.devices.values()))  # it is calibrated on samples, which a loaded run may lack
            source = source_of_centers(self._source, last, method=name, batch=self.batch, engines=engines)
            write_run_bundle(source, Path(folder), options, samples=compared)
        return read_bundle(Path(folder))

    @property
    def batch(self) -> int:
        """Samples in a step of training."""
        return batch_size(self.method)

    def plot(self) -> Figure:
        """A matplotlib figure: accuracy by round, and a map of the devices by their first updates."""
        from emulator.api.pictures import draw_result

        return draw_result(self.method, self.run, self.split.groups)

    def save(self, folder: str | Path) -> Path:
        """Write the run's folder, which `report`, `figures`, `bundle` and `--resume` of the commands read.

        A run goes on from `save("runs/mine")` with `fc.simulate(..., out="runs", name="mine", resume=True)`. A result
        of `fc.rounds` without `out` has a checkpoint once its loop is left.

        A run that it replaces, one of the same settings, samples, model and loss, is named on stderr. Raises
        UsageError where the folder has another.
        """
        next(iter(self.split.devices.values()))  # a loaded run may lack the samples; nothing is written then
        path, mine = Path(folder), self.folder
        if path.name in {"", ".."}:  # of `.` and `..`, which are no names of a folder
            path = path.resolve()
        say = log.warning if mine is None or mine.resolve() != path.resolve() else log.debug
        args = replace(self.args, out=path.parent, name=path.name)
        table = resolved_table(args, self.method)
        parts = partial(run_parts, self.split.devices, self.run.schema, self.marks)
        with (
            in_words_of_python(),
            open_run_folder(args, table, resume=False, say=partial(say, "%s"), parts=parts) as place,
            writing_to(place),
            replaced_files(place) as new,
        ):
            self.write(new)
            before = self.folder or (self.temporary.path if self.temporary else place)
            copied = before.resolve() != place.resolve() and copy_checkpoint(before, new)
            if self.temporary and not copied and self.args.checkpoint_every != 0:
                log.warning("%s has no checkpoint to go on from: save when the loop is left, or give out=", path)
        return path

    def write(self, place: Path) -> None:
        """Write the files of the run's folder, apart from config.toml and the checkpoint."""
        state = self.run.whole and self._checkpoint is None
        parts = (self.run, self.split, self.marks)
        (place / GUIDE_FILE).unlink(missing_ok=True)  # it is of the centers that go; a new one is the last file
        write_run(place, method_name(self.method), *parts, state=state, seconds=self.seconds)
        named = is_named_fleet(self.args.data_set, self.args.partition)
        if self.own_model is None and named:
            return  # the parts are found by their names, and torch is not needed to write them
        from emulator.api.kept_model import keep_parts

        keep_parts(place, guide=lambda: self.guide, named=named, model=self.own_model, schema=self.run.schema)

    def __repr__(self) -> str:
        rows = summary_rows(self.summary()) if len(self.run.records) else [("method", f"{self.method!r}, no round yet")]
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:{width}}  {text}" for label, text in rows)

    def _repr_html_(self) -> str:
        rows = [{"": label, " ": text} for label, text in summary_rows(self.summary())]
        picture = io.BytesIO()
        self.plot().savefig(picture, format="png", dpi=PICTURE_DPI)
        shown = base64.b64encode(picture.getvalue()).decode()
        alt = html.escape(repr(self.method))
        return (
            f'{Table(rows)._repr_html_()}<img alt="{alt}" style="max-width: 100%" src="data:image/png;base64,{shown}">'
        )
