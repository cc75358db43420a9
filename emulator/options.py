"""The options of a simulated run: one table for the command line, the TOML file, `init`, the checks and Python.

A row of the table is a field of `SimulateArgs`: its name, type and default, and the other columns as its metadata.
Imports nothing that is slow, so that `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from coordinator.strategies.common.setting_checks import plain_number
from edge_client.errors import UsageError

if TYPE_CHECKING:
    from coordinator.strategies.registry import Setting

RUN, PLACE, DEVICES, RESULT = "What is trained", "Where it runs", "Devices and their network", "Tests and results"
MAX_SEED = 2**63 - 1  # that torch takes
Value = TypeVar("Value")
KINDS: dict[str, type] = {"str": str, "int": int, "float": float, "Path": Path}


@dataclass(frozen=True, kw_only=True)
class Option:
    """A row of the table.

    `name` is the field, `key` the key of the TOML file, `kind` one of KINDS; `low` and `high` are inclusive limits of a
    number. `flag`: the command line has it, as --name; else as -c key=value. `fingerprint`: the option decides the
    numbers of a run, so that a checkpoint goes on only with the same value. `panel` is the heading in --help.
    """

    help: str
    low: float | None = None
    high: float | None = None
    metavar: str | None = None
    flag: bool = True
    fingerprint: bool = False
    panel: str | None = None
    key: str = ""  # the name in kebab-case where the table has no other
    name: str = ""  # this and what follows come from the field itself
    kind: type = str
    default: Any = None

    def check(self, value: Any) -> None:  # noqa: ANN401 - of the field's type
        """Raise UsageError for a value of another kind, and for a number that is too low or too high."""
        if value is None and self.default is None:
            return
        wrong_kind = {
            int: isinstance(value, bool) or not isinstance(value, Integral),
            float: isinstance(value, bool) or not isinstance(value, Real),
            str: not isinstance(value, str),
        }
        if wrong_kind.get(self.kind, False):
            kind = {int: "a whole number", float: "a number", str: "a text"}[self.kind]
            raise UsageError(f"{self.key} is {value!r}", hint=f"give {kind}")
        if self.low is not None and not value >= self.low:
            raise UsageError(f"{self.key} is {value}", hint=f"use at least {self.low:g}")
        if self.high is not None and not value <= self.high:
            raise UsageError(f"{self.key} is {value}", hint=f"use at most {self.high:g}")


def _row(default: Value, words: str, **columns: Any) -> Value:  # noqa: ANN401 - see `Option`
    """A field of `SimulateArgs` and its row of the table."""
    return field(default=default, metadata={"row": Option(help=words, **columns)})


@dataclass(frozen=True, kw_only=True)
class SimulateArgs:
    """The options of `fedcenters-emulator simulate`; `settings` are the method's, in kebab-case.

    An empty model or partition, and no number of devices, mean those that suit the data set (data/registry.py).
    """

    method: str = _row("fesem", "A name (`list`), or package.module:Class.", panel=RUN, fingerprint=True)
    data_set: str = _row(
        "digits", "What the devices hold: a data set by name, or package.module:ENTRY.", panel=RUN, fingerprint=True
    )
    model: str = _row(
        "", "A model by name, or package.module:factory. Default: what suits the data set.", panel=RUN, fingerprint=True
    )
    partition: str = _row(
        "",
        "How the devices share the data, as dirichlet:alpha=0.1. Default: what suits the data set.",
        panel=RUN,
        fingerprint=True,
    )
    devices: int | None = _row(
        None, "How many devices. Default: as many as suit the data set.", panel=RUN, low=1, fingerprint=True
    )
    groups: int | None = _row(None, "How many true groups the partition makes.", panel=RUN, low=1, fingerprint=True)
    rounds: int = _row(10, "Training rounds.", panel=RUN, key="num-rounds", low=1)
    seed: int = _row(
        0, "Cuts the data and draws every random number.", panel=RUN, low=0, high=MAX_SEED, fingerprint=True
    )
    data_seed: int | None = _row(
        None,
        "Cuts the data. Default: the seed of the run.",
        panel=RUN,
        low=0,
        high=MAX_SEED,
        flag=False,
        fingerprint=True,
    )
    engine: str = _row(
        "auto",
        "auto: the fastest here; lean (CPU), stacked or graphs (GPU); or onnx, litert, pt2, as devices run it.",
        panel=PLACE,
    )
    settings: Mapping[str, Setting] = field(default_factory=dict)
    data: Path | None = _row(
        None, "The folder of data sets. Default: the folder that FEDCENTERS_DATA names.", panel=PLACE
    )
    workers: int = _row(1, "Processes that share the devices' work.", panel=PLACE, low=1)
    broker: str = _row(
        "",
        "Play it over MQTT, with real processes: auto, mosquitto, embedded, or a URL like mqtt://host:1883.",
        panel=PLACE,
    )
    ray: str = _row("", "A Ray cluster that does the work, as host:port; or auto.", panel=PLACE, metavar="HOST:PORT")
    profiles: Path | None = _row(
        None, "A TOML file of kinds of devices; docs/emulate-a-fleet.md has the keys.", panel=DEVICES, fingerprint=True
    )
    codec: str = _row("f32", "How updates travel: f32, f16, or i8 as over MQTT.", panel=DEVICES, fingerprint=True)
    hostile: str = _row(
        "",
        "What a share of the devices does, as sign-flip:0.2.",
        panel=DEVICES,
        metavar="ATTACK:SHARE",
        fingerprint=True,
    )
    concurrency: int | None = _row(
        None,
        "No device is waited for: so many train at once, each from the newest centers. Default: rounds.",
        panel=DEVICES,
        low=1,
        fingerprint=True,
    )
    buffer: int | None = _row(
        None, "With --concurrency: updates that make new centers. Default: 10.", panel=DEVICES, low=1, fingerprint=True
    )
    max_staleness: int | None = _row(
        None,
        "With --concurrency: versions after which a task is stopped. Default: 20.",
        panel=DEVICES,
        low=0,
        fingerprint=True,
    )
    evaluate_every: int = _row(1, "Rounds from one test to the next; the last has one.", panel=RESULT, low=1)
    fraction_evaluate: float = _row(
        1.0, "Share of the devices in a test; in the last round all.", panel=RESULT, low=0.0, high=1.0
    )
    checkpoint_every: int | None = _row(
        None,
        "Rounds from one checkpoint to the next, for --resume; 0 keeps none. Default: after the first round, then "
        "as often as takes a twentieth of the time.",
        low=0,
        flag=False,
    )
    loggers: str = _row("", "Tools that record each round, as tensorboard,mlflow; see docs/runs.md.", panel=RESULT)
    out: Path = _row(Path("runs"), "The run's own folder is made in here.", panel=RESULT)
    name: str = _row("", "The name of the run's folder. Default: made from the method and the seed.", panel=RESULT)

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, plain_number(getattr(self, f.name)))
        name = PurePath(self.name)
        if name.is_absolute() or ".." in name.parts:
            raise UsageError(f"name is {self.name!r}", hint="name a folder that is made in `out`")

    @property
    def folder(self) -> Path:
        how = "mqtt" if self.broker else "simulate"
        return self.out / (self.name or f"{how}-{self.method.rpartition(':')[2].lower()}-{self.seed}")


def _rows() -> dict[str, Option]:
    rows: dict[str, Option] = {}
    for f in fields(SimulateArgs):
        if row := f.metadata.get("row"):
            key, kind = row.key or f.name.replace("_", "-"), KINDS[str(f.type).removesuffix(" | None")]
            rows[key] = replace(row, name=f.name, key=key, kind=kind, default=f.default)
    return rows


OPTIONS = _rows()  # by the key of the TOML file
