"""Several methods on the same devices with the same seeds: means, and differences with Student's 95 % interval."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

from coordinator.rounds.metrics import last_rounds
from coordinator.strategies.base import Strategy
from edge_client.errors import UsageError
from emulator.api.checks import COLUMNS, check_method
from emulator.api.history import Table, frame
from emulator.api.result import Result
from emulator.api.runs import SharedOptions, check_several, run_one_of_several
from emulator.data.fleet import Fleet
from emulator.experiments.table import mean_and_deviation, paired_difference
from emulator.options import OPTIONS
from export.plugins import nearest_name_hint

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from typing_extensions import Unpack

    from coordinator.strategies.common.method_value import MethodValue


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """`results` has each method's result for each seed; print it for the table.

    >>> import fedcenters as fc
    >>> found = fc.compare([fc.FedAvg(local_steps=2)], fleet=fc.fleets.digits(devices=3), seeds=[7], rounds=1)
    >>> found.results["FedAvg(local_steps=2)"][7].accuracy == float(found.table()["accuracy"][0])
    True
    """

    results: Mapping[str, Mapping[int, Result]] = field(default_factory=dict)

    def table(self, of: str | None = None) -> Any:  # noqa: ANN401 - a DataFrame, or a `Table` without pandas
        """One row per method, as a pandas DataFrame, or as a `Table` without pandas.

        `accuracy` is a run's mean over its last three tests, `deviation` its standard deviation between seeds;
        `better_by` the mean over the seeds of the method's accuracy less that of the first method with the same seed,
        and `interval` half of Student's 95 % interval of this mean: a difference that is smaller may be chance. `ari`
        is the adjusted Rand index against the true groups, `bytes` all traffic of a run, `seconds` of this machine.
        Targets that are no classes have no accuracy: then `squared_error` is in its place, or `loss` with a loss of
        your own, and less of it is better. `of` names another score of `history`, as `f1` or a metric of your own: it
        takes the place of accuracy, and `more_by`, the score less that of the first method, that of `better_by`.
        Raises UsageError for a score that no run has.
        Printing the comparison itself shows every column; pandas leaves out some of a wide frame.
        """
        return frame(self._rows(of))

    @property
    def history(self) -> Any:  # noqa: ANN401 - a DataFrame, or a `Table` without pandas
        """One row per method, seed and round: these three, and the columns of `Result.history`."""
        return frame(
            [
                {"method": str(name), "seed": seed, **row}
                for name, runs in self.results.items()
                for seed, run in runs.items()
                for row in run.rows()
            ]
        )

    def plot(self, of: str | None = None) -> Figure:
        """A matplotlib figure: accuracy by round, a line for each method, its mean over the seeds; bands have all.

        The squared error or the loss, where there is no accuracy; or the score `of`, as in `table`.
        """
        from emulator.api.pictures import draw_comparison

        measure = self._score(of)
        found = {
            name: [[row.get(measure) for row in run.rows()] for run in runs.values()]
            for name, runs in self.results.items()
        }
        return draw_comparison(found, measure)

    @property
    def _measure(self) -> str:
        """The column of `history` by which methods are compared."""
        runs = [run for each in self.results.values() for run in each.values()]
        if any(run.accuracy is not None for run in runs):
            return "accuracy"
        own_loss = any(run.own_model is not None and run.own_model.own_loss is not None for run in runs)
        known = any("squared_error" in row for run in runs for row in run.rows())
        return "squared_error" if known and not own_loss else "loss"

    def _score(self, of: str | None) -> str:
        """The column of `history` that is asked for; None: that by which methods are compared."""
        if of is None:
            return self._measure
        known = {key for runs in self.results.values() for run in runs.values() for row in run.rows() for key in row}
        if of not in known - COLUMNS:
            hint = nearest_name_hint(of, known - COLUMNS)
            raise UsageError(f"no run has a score {of!r}", hint=f"{hint}; metrics={{...}} of fc.compare adds yours")
        return of

    def _rows(self, of: str | None = None) -> list[dict[str, Any]]:
        rows, first, measure = [], None, self._score(of)
        less_is_better = of is None and measure != "accuracy"
        for name, runs in self.results.items():
            found = {seed: value for seed, run in runs.items() if (value := _last(run, measure)) is not None}
            first = found if first is None else first
            mean, deviation = mean_and_deviation(list(found.values())) if found else (None, None)
            pair = (first, found) if less_is_better else (found, first)
            better, half, pairs = paired_difference(*pair) if found is not first else (None, None, 0)
            scores = [score for run in runs.values() if (score := run.summary()["ari"]) is not None]
            rows.append(
                {
                    "method": str(name),  # of a dict it may be a number, as a learning rate
                    "seeds": len(runs),
                    measure: mean,
                    "deviation": deviation,
                    "better_by" if of is None else "more_by": better if pairs else None,
                    "interval": half,
                    "ari": mean_and_deviation(scores)[0] if scores else None,
                    "bytes": round(
                        _mean(
                            [
                                sum(r["bytes"]["down"] + r["bytes"]["up"] for r in run.run.records)
                                for run in runs.values()
                            ]
                        )
                    ),
                    "seconds": _mean([run.seconds for run in runs.values()]),
                }
            )
        return rows

    def _shown(self) -> Table:
        """The table as it is read: shares in per cent, differences in points, bytes in megabytes."""
        rows, found, measure = [], self._rows(), self._measure
        scale, points, form = (100, ", points", "{:.1%}") if measure == "accuracy" else (1, "", "{:.4g}")
        spread = " ± deviation" if any(row["deviation"] is not None for row in found) else ""
        half = " ± 95 % interval" if any(row["interval"] is not None for row in found) else ""
        for row in found:
            value, better = row[measure], row["better_by"]
            shown = {
                "method": row["method"],
                "seeds": row["seeds"],
                f"{measure}{spread}": "" if value is None else form.format(value) + _spread(row["deviation"], scale),
                f"better by{half}{points}": "" if better is None else _signed(better, row["interval"], scale),
                "ARI": "" if row["ari"] is None else f"{row['ari']:.3f}",
                "MB": f"{row['bytes'] / 1e6:.1f}",
                "seconds": f"{row['seconds']:.1f}",
            }
            rows.append(shown)
        empty = {key for key in rows[0] if all(row[key] == "" for row in rows)} if rows else set()
        return Table([{key: value for key, value in row.items() if key not in empty} for row in rows])

    def _note(self) -> str:
        """What the printed columns mean."""
        told = f"{self._measure.replace('_', ' ')}: the mean of a run's last three tests"
        if len(self.results) < 2:  # noqa: PLR2004 - one is compared with the other
            return told
        may = "; a difference below its interval may be chance" if min(map(len, self.results.values())) > 1 else ""
        return f"{told}; better by: than {next(iter(self.results))!r}, with the same seeds{may}"

    def __repr__(self) -> str:
        return f"{self._shown()!r}\n{self._note()}" if self.results else repr(self._shown())

    def _repr_html_(self) -> str:
        note = f"<p>{html.escape(self._note())}</p>" if self.results else ""
        return f"{self._shown()._repr_html_()}{note}"


def compare(
    methods: Sequence[Strategy | MethodValue] | Mapping[str, Strategy | MethodValue],
    *,
    fleet: Fleet,
    seeds: int | Iterable[int] = 3,
    **options: Unpack[SharedOptions],
) -> Comparison:
    """Run every method with every seed; a seed draws the same devices, samples and first model for all of them.

    `methods`: several, or a dict that names each for tables and pictures. `seeds`: how many, from 0 on, or which. Other
    arguments are those of `simulate`, but for `name` and `on_round`. With `out` each run has a folder of its own there,
    from which `resume=True` goes on; it begins those that were not begun. A fleet with a seed of its own is cut once
    for all seeds. Raises UsageError for methods that cannot be told apart.

    >>> import fedcenters as fc
    >>> methods = {"one": fc.FedAvg(local_steps=5), "three": fc.FeSEM(3, local_steps=5)}
    >>> found = fc.compare(methods, fleet=fc.fleets.digits(devices=6), seeds=2, rounds=2)
    >>> list(found.results), bool(found.table()["better_by"][1] > 0), len(found.history)
    (['one', 'three'], True, 8)
    """
    if not isinstance(methods, (Mapping, Sequence)) or isinstance(methods, str):
        raise UsageError(f"methods is {methods!r}", hint="give several: fc.compare([fc.FedAvg(), fc.FeSEM(3)], ...)")
    valid = {*SharedOptions.__annotations__}
    if wrong := sorted(options.keys() - valid):
        raise UsageError(
            f"a comparison has no option {wrong[0]!r}", hint=nearest_name_hint(wrong[0], {"fleet", "seeds", *valid})
        )
    named = list(methods.items()) if isinstance(methods, Mapping) else [(repr(method), method) for method in methods]
    for _, method in named:
        check_method(method)
    if not named or len({name for name, _ in named}) < len(named):
        told = f"methods {', '.join(name for name, _ in named) or '(none)'}"
        raise UsageError(told, hint="give methods with different settings, or a dict that names each")
    chosen = _chosen(seeds)
    check_several([cast("Strategy", method) for _, method in named], fleet=fleet, seed=chosen[0], **options)
    found: dict[str, dict[int, Result]] = {name: {} for name, _ in named}
    # mypy takes a list of several kinds of methods for one of what they extend
    plan = [(seed, name, cast("Strategy", method)) for seed in chosen for name, method in named]
    took: list[tuple[str, float]] = []
    for n, (seed, name, method) in enumerate(plan, 1):
        left = left_in_words(took, [name for _, name, _ in plan[n - 1 :]])
        title = f"run {n} of {len(plan)}{left}  {name}, seed {seed}"
        began = time.monotonic()
        found[name][seed] = run_one_of_several(title, method, fleet=fleet, seed=seed, **options)
        took.append((name, time.monotonic() - began))
    return Comparison(results=found)


def _chosen(seeds: int | Iterable[int]) -> list[int]:
    """The seeds. Raises UsageError for what is none, or is given twice."""
    if not isinstance(seeds, (Integral, Iterable)) or isinstance(seeds, (bool, str)):
        raise UsageError(f"seeds is {seeds!r}", hint="give how many, as seeds=3, or which, as seeds=[0, 7]")
    chosen = list(range(int(seeds))) if isinstance(seeds, Integral) else list(seeds)
    if not chosen:
        raise UsageError("no seeds", hint="give how many, as seeds=3, or which, as seeds=[0, 7]")
    if twice := [seed for seed in dict.fromkeys(chosen) if chosen.count(seed) > 1]:
        raise UsageError(f"seed {twice[0]} is given twice", hint="give each once: the same seed is the same run")
    for seed in chosen:
        OPTIONS["seed"].check(seed)
    return chosen


def left_in_words(took: Sequence[tuple[str, float]], names: Sequence[str]) -> str:
    """The minutes that runs of these methods will take, by the seconds of earlier ones; "" below one, or unknown.

    >>> left_in_words([("one", 50.0), ("three", 100.0)], ["one", "three", "five"])
    ' (4 min left)'
    """
    if not took:
        return ""
    usual = _mean([seconds for _, seconds in took])
    own = {name: _mean([seconds for one, seconds in took if one == name]) for name, _ in took}
    left = sum(own.get(name, usual) for name in names)
    return f" ({left / 60:.0f} min left)" if left >= 60 else ""  # noqa: PLR2004 - a minute


def _spread(half: float | None, scale: float) -> str:
    return "" if half is None else f" ± {_in_digits(scale * half, scale)}"


def _signed(value: float, half: float | None, scale: float) -> str:
    digits = _in_digits(scale * abs(value), scale)
    return f"{'-' if value < 0 and float(digits) else '+'}{digits}{_spread(half, scale)}"


def _in_digits(value: float, scale: float) -> str:
    """A tenth of a point of a share; a loss has no scale of its own."""
    return f"{value:.1f}" if scale > 1 else f"{value:.3g}"


def _last(result: Result, measure: str) -> float | None:
    """The mean of the last three tests."""
    values = last_rounds(list(result.rows()), measure)
    return _mean(values) if values else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
