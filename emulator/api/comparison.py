"""Several methods on the same devices with the same seeds: means, and differences with Student's 95 % interval."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coordinator.rounds.metrics import last_rounds
from coordinator.strategies.base import Strategy
from edge_client.errors import UsageError
from emulator.api.history import Table, frame
from emulator.api.result import Result
from emulator.api.runs import simulate
from emulator.data.fleet import Fleet
from emulator.experiments.table import mean_and_deviation, paired_difference

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from emulator.api.runs import SharedOptions


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """`results` has each method's result for each seed; print it for the table."""

    results: Mapping[str, Mapping[int, Result]] = field(default_factory=dict)

    def table(self) -> Any:  # noqa: ANN401 - a DataFrame, or a `Table` without pandas
        """One row per method, as a pandas DataFrame, or as a `Table` without pandas.

        `accuracy` is a run's mean over its last three tests, `deviation` its standard deviation between seeds;
        `better_by` the mean over the seeds of the method's accuracy less that of the first method with the same seed,
        and `interval` half of Student's 95 % interval of this mean: a difference that is smaller may be chance. `ari`
        is the adjusted Rand index against the true groups, `bytes` all traffic of a run, `seconds` of this machine.
        """
        return frame(self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        rows, first = [], None
        for name, runs in self.results.items():
            found = {seed: accuracy for seed, run in runs.items() if (accuracy := _accuracy(run)) is not None}
            first = found if first is None else first
            mean, deviation = mean_and_deviation(list(found.values())) if found else (None, None)
            better, half, _ = paired_difference(found, first) if found is not first and found else (None, None, 0)
            scores = [score for run in runs.values() if (score := run.summary()["ari"]) is not None]
            rows.append(
                {
                    "method": name,
                    "seeds": len(runs),
                    "accuracy": mean,
                    "deviation": deviation,
                    "better_by": better,
                    "interval": half,
                    "ari": mean_and_deviation(scores)[0] if scores else None,
                    "bytes": _mean(
                        [sum(r["bytes"]["down"] + r["bytes"]["up"] for r in run.run.records) for run in runs.values()]
                    ),
                    "seconds": _mean([run.seconds for run in runs.values()]),
                }
            )
        return rows

    def __repr__(self) -> str:
        return repr(Table(self._rows()))

    def _repr_html_(self) -> str:
        return Table(self._rows())._repr_html_()


def compare(
    methods: Sequence[Strategy], *, fleet: Fleet, seeds: int | Iterable[int] = 3, **options: Unpack[SharedOptions]
) -> Comparison:
    """Run every method with every seed; a seed draws the same devices, samples and first model for all of them.

    `seeds`: how many, from 0 on, or which. Other arguments are those of `simulate`. A fleet with a seed of its own is
    cut once for all seeds. Raises UsageError for methods that cannot be told apart.

    >>> import fedcenters as fc
    >>> methods = [fc.FedAvg(local_steps=5), fc.FeSEM(3, local_steps=5)]
    >>> found = fc.compare(methods, fleet=fc.fleets.digits(devices=6), seeds=2, rounds=2)
    >>> list(found.results), bool(found.table()["better_by"][1] > 0)
    (['FedAvg(local_steps=5)', 'FeSEM(3, local_steps=5)'], True)
    """
    names = [repr(method) for method in methods]
    if not methods or len(set(names)) < len(names):
        raise UsageError(f"methods {', '.join(names) or '(none)'}", hint="give methods with different settings")
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not chosen:
        raise UsageError("no seeds", hint="give how many, as seeds=3, or which, as seeds=[0, 7]")
    found: dict[str, dict[int, Result]] = {name: {} for name in names}
    for seed in chosen:
        for name, method in zip(names, methods, strict=True):
            found[name][seed] = simulate(method, fleet=fleet, seed=seed, **options)
    return Comparison(results=found)


def _accuracy(result: Result) -> float | None:
    values = last_rounds(result.run.records, "accuracy", "micro")
    return _mean(values) if values else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
