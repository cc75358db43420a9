"""How many centers a fleet needs, from Python: the trials of the command `choose-k` as a value."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from io import BytesIO
from typing import TYPE_CHECKING, Any

from coordinator.strategies.base import Strategy
from coordinator.strategies.registry import method_path, method_settings, summed_members
from edge_client.errors import UsageError
from edge_client.printable import counted
from emulator import choose_k as trials
from emulator.api.checks import check_fleet, check_method, check_own, in_words_of_python
from emulator.api.history import Table, frame
from emulator.api.progress import show_work
from emulator.data.fleet import Fleet
from emulator.options import OPTIONS, SimulateArgs

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

    from coordinator.models.registry import Model
    from export.compiler.losses.sample_losses import LossFunction


@dataclass(frozen=True, kw_only=True, repr=False)
class ClusterCounts:
    """The trials with each number of centers. `clusters` is the number to take by the criterion that was asked for.

    `recommended` has the number by each criterion: "accuracy", "silhouette" and "distance".

    >>> import fedcenters as fc
    >>> counts = fc.choose_k(fc.FeSEM(local_steps=5), fleet=fc.fleets.digits(devices=6), ks=[1, 3], rounds=1)
    >>> counts.clusters, list(counts.table["clusters"])
    (3, [1, 3])
    """

    found: Mapping[str, Any]

    @property
    def clusters(self) -> int:
        return int(self.found["clusters"])

    @property
    def recommended(self) -> Mapping[str, int]:
        return dict(self.found["recommended"])

    @property
    def table(self) -> Any:  # noqa: ANN401 - a DataFrame, or a `Table` without pandas
        """One row per number: `clusters`, `used` (centers with devices), `accuracy`, `distance`, `silhouette`."""
        return frame(self.found["trials"])

    def plot(self) -> Figure:
        """A matplotlib figure: the criteria by number of centers, those to take marked."""
        from emulator.api.pictures import show_in_notebooks

        figure = trials.draw_trials(self.found)
        show_in_notebooks(figure)
        return figure

    def __repr__(self) -> str:
        by = ", ".join(f"{count} by {name}" for name, count in self.recommended.items())
        return f"{Table(self.found['trials'])!r}\n{self._advice} ({by})"

    @property
    def _advice(self) -> str:
        return f"take {counted(self.clusters, 'center')}"

    def _repr_html_(self) -> str:
        picture = BytesIO()
        self.plot().savefig(picture, format="svg")
        drawn = base64.b64encode(picture.getvalue()).decode()
        image = f'<img alt="the trials" style="max-width: 100%" src="data:image/svg+xml;base64,{drawn}">'
        return f"{Table(self.found['trials'])._repr_html_()}<p>{self._advice}</p>{image}"


def choose_k(  # noqa: PLR0913 - the parts of a run
    method: Strategy,
    *,
    fleet: Fleet,
    ks: Iterable[int] = range(1, 7),
    model: nn.Module | Callable[[], nn.Module] | str | None = None,
    loss: LossFunction | None = None,
    by: str = "accuracy",
    rounds: int = 3,
    sample: int = 100,
    seed: int = 0,
) -> ClusterCounts:
    """Try how many centers suit a fleet: short runs of a method with each number in `ks`, on a sample of the devices.

    A fifth of each device's training samples measures the accuracy; test samples are not looked at. `by`: "accuracy"
    takes the least number that is not clearly worse than the best; "silhouette" the best separated clusters of first
    models; "distance" the elbow of the distance within clusters. `sample`: devices at most; `model` and `loss` are as
    for `fc.simulate`. The trials look at each device's models and losses, also where the method has `secure`. Raises
    UsageError for a method without a setting `clusters`.

    >>> import fedcenters as fc
    >>> fc.choose_k(fc.FeSEM(local_steps=5), fleet=fc.fleets.digits(devices=6), ks=[1, 3], rounds=1).recommended
    {'accuracy': 3, 'silhouette': 3, 'distance': 1}
    """
    check_method(method)
    check_fleet(fleet)
    check_own(loss=loss)
    if "clusters" not in {f.name for f in fields(method)}:  # type: ignore[arg-type]  # methods are dataclasses
        raise UsageError(f"{method!r} has no setting `clusters`", hint="try a clustered method, as fc.FeSEM()")
    if isinstance(ks, (int, str)):
        raise UsageError(f"ks is {ks!r}", hint="give the numbers to try, as ks=range(1, 7) or ks=[2, 4]")
    numbers = list(ks)
    methods: list[Strategy] = [replace(method, clusters=k) for k in numbers]  # type: ignore[type-var]
    own: Model | None = None
    with in_words_of_python():
        OPTIONS["num-rounds"].check(rounds)
        OPTIONS["seed"].check(seed)
        if model is not None or loss is not None or not fleet.model:
            from emulator.api.models import own_model

            wanted = (fleet.model or None) if model is None else model
            members = summed_members(method_path(method))
            own = own_model(wanted, fleet.cut(seed), loss=loss, seed=seed, members=members)
        args = SimulateArgs(method=method_path(method), settings=method_settings(method), rounds=rounds, seed=seed)
        with show_work("choose_k") as busy:
            found = trials.choose_k_json(
                args, numbers, by, sample=sample, busy=busy, methods=methods, fleet=fleet, model=own
            )
            return ClusterCounts(found=found)
