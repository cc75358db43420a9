"""How a device chooses among the centers that it can fetch.

The device compares sketches of its inputs first, since these need only the router. Then it fetches the models of the
few candidates that remain and measures them. A `CenterSource` provides the models: over MQTT (catalog_source.py) or
from a site (over_http.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from edge_client.data.dataset import Dataset
from edge_client.errors import UsageError
from edge_client.nearest import features
from edge_client.protocol.nearest import selection_rule
from edge_client.protocol.nearest.center_tree import CenterTree
from edge_client.protocol.nearest.router import FEATURES, NEED_LABELS, Router
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array, Flat
from edge_client.training.learner import Learner

MAX_CANDIDATES = 3  # models that are fetched and measured
CANDIDATE_PROBABILITY = 0.99  # fewer candidates, if their probability by `sketch` reaches this
MAX_SAMPLES = 256  # samples that are measured
AUTO, LABELLED, UNLABELLED, TREE = "auto", "labelled", "unlabelled", "tree"
RULE_NAMES = (AUTO, LABELLED, UNLABELLED, *FEATURES, TREE)


class CenterSource(Protocol):
    """The centers of a federation. Each model is fetched, checked and cached on request."""

    @property
    def program(self) -> Program: ...

    @property
    def centers(self) -> int: ...

    @property
    def router(self) -> Router | None: ...

    @property
    def abstain(self) -> float:
        """The mean loss above which no center fits, where there is no router."""
        ...

    @property
    def tree(self) -> CenterTree | None: ...

    def learner(self, *, training: bool) -> Learner:
        """A learner for evaluation; with `training`, for SGD steps as well."""
        ...

    def models(self, centers: Sequence[int]) -> list[Flat]: ...

    def start(self) -> Flat | None:
        """The common start of the run [schema.size], if the run publishes it."""
        ...

    def split(self, number: int) -> Flat:
        """The model of a split of the tree [schema.size]."""
        ...


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The outcome of a choice. `center` is None if none fits; `best` is the nearest in any case.

    `confidence` (center -> probability) sums to 1 where it is known.

    `distances`: feature -> center -> how far, for those that were looked at; `told`: why, in plain lines.
    """

    center: int | None
    best: int
    way: str
    samples: int
    ranking: tuple[int, ...]
    confidence: Mapping[int, float] = field(default_factory=dict)
    distances: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    mixture: Mapping[int, float] = field(default_factory=dict)  # FedSoft's weights: shares of votes
    reasons: tuple[str, ...] = ()


def choose_center(source: CenterSource, data: Dataset, *, labels: bool, by: str = AUTO) -> Selection:
    """The center for these samples, by the rule `by`. Raises UsageError for a rule that is impossible here."""
    if source.centers == 0:
        return Selection(
            center=None, best=0, way=by, samples=len(data), ranking=(), reasons=("there is no center yet",)
        )
    rows = np.random.Generator(np.random.PCG64(0)).permutation(len(data))[:MAX_SAMPLES]
    few = Dataset(data.x[rows], data.y[rows])
    way = by if by != AUTO else _default_rule(source, labels=labels)
    if way == TREE:
        return _walk_tree(source, few, labels=labels)
    router = source.router
    wanted = router.ways[way].features if router is not None and way in router.ways else (way,)
    if not labels and set(wanted) <= NEED_LABELS:
        raise UsageError(f"{way} needs labels, which this data has not", hint="leave out --by")
    if router is not None and router.round is not None and way == "round" and way not in router.ways:
        return _RoutedChoice(source, router, few, way, labels=labels).choose_by_round()
    if router is None or way not in router.ways:
        return _without_router(source, few, way, labels=labels)
    return _RoutedChoice(source, router, few, way, labels=labels).chosen()


def _default_rule(source: CenterSource, *, labels: bool) -> str:
    known = {} if source.router is None else source.router.ways
    ways = (LABELLED, "loss") if labels else (UNLABELLED, "sketch", "entropy")
    if source.tree is not None and not known:
        return TREE
    return next((way for way in ways if way in known), "loss" if labels else "entropy")


class _RoutedChoice:
    """One choice with a router; `found` fills feature by feature."""

    def __init__(self, source: CenterSource, router: Router, data: Dataset, way: str, *, labels: bool) -> None:
        self._source, self._router, self._data, self._way, self._labels = source, router, data, way, labels
        self._found: dict[str, Array] = {}
        self._told: list[str] = []

    def chosen(self) -> Selection:
        wanted = self._router.ways[self._way].features
        if self._router.sketch is not None and "sketch" in wanted:
            point = features.sketch_inputs(self._data, self._router.sketch)
            self._found["sketch"] = selection_rule.sketch_distance(point, self._router.sketch.centers)
        if "round" in wanted:
            self._found["round"] = self._round()
        if set(wanted) - {"sketch", "round"}:
            self._measure_candidates(wanted)
        belief = self._router.predict(self._way, self._found, len(self._data))
        order = [int(k) for k in np.argsort(-belief.probabilities, kind="stable") if belief.probabilities[k] > 0]
        self._conclude(belief.best, belief.center, float(belief.probabilities[belief.best]))
        return Selection(
            center=belief.center,
            best=belief.best,
            way=self._way,
            samples=len(self._data),
            ranking=tuple(order),
            confidence={k: float(belief.probabilities[k]) for k in order},
            distances=_listed(self._found),
            mixture=_mixture(self._found),
            reasons=tuple(self._told),
        )

    def choose_by_round(self) -> Selection:
        """The nearest center by a local round, where the run has not learned how sure that is, nor a line."""
        return _by_distance({"round": self._round()}, "round", self._data, "the run has not learned how sure this is")

    def _measure_candidates(self, wanted: Sequence[str]) -> None:
        """Fetch the candidates' models and look at the samples with each."""
        router, source = self._router, self._source
        left = list(range(router.centers))
        if "sketch" in self._found and "sketch" in router.ways:
            left = router.predict("sketch", self._found, len(self._data)).candidates(
                MAX_CANDIDATES, CANDIDATE_PROBABILITY
            )
            names = ", ".join(map(str, left))
            self._told.append(f"the inputs' sketch leaves {len(left)} of {router.centers} centers: {names}")
        models = source.models(left)
        train = "norms" in wanted and features.has_batch_norm(source.program.schema)
        learner = source.learner(training=train)
        found = features.model_distances(learner, models, self._data, labels=self._labels)
        if train and (far := features.norm_distances(learner, models, self._data)) is not None:
            found["norms"] = far
        self._found |= {name: _spread(d, left, router.centers) for name, d in found.items() if name in wanted}

    def _round(self) -> Array:
        about, start = self._router.round, self._source.start()
        if about is None or start is None or not self._labels:
            raise UsageError("a local round needs labels and the run's common start", hint="leave out --by")
        point = features.sketch_local_round(self._source.learner(training=True), start, self._data, about)
        return selection_rule.sketch_distance(point, about.centers)

    def _conclude(self, best: int, center: int | None, confidence: float) -> None:
        for name, d in self._found.items():
            usual = self._router.usual[name].middle
            typical = float(np.interp(np.log(len(self._data)), np.log(self._router.sizes), usual))
            self._told.append(
                f"{_WORDS[name]} {d[best]:.3f} at center {best}; its own devices have about {typical:.3f}"
            )
        self._told.append(
            f"{confidence:.0%} of the belief is in center {best}"
            if center is not None
            else f"center {best} is nearest, but further off than nearly all devices that trained are from theirs"
        )


_WORDS = {
    "loss": "mean loss",
    "votes": "share of samples that another center explains better:",
    "entropy": "entropy of the answers",
    "norms": "distance from batch norm's statistics",
    "sketch": "distance from the inputs' sketch",
    "round": "distance from where a local round led:",
}


def _without_router(source: CenterSource, data: Dataset, way: str, *, labels: bool) -> Selection:
    """Every model is looked at; the line is the loss of guessing, and no confidence can be told."""
    if way not in ("loss", "votes", "entropy"):
        raise UsageError(f"this run has learned no way {way!r}", hint="it knows loss, votes and entropy")
    found = features.model_distances(source.learner(training=False), _LazyModels(source), data, labels=labels)
    if way not in found:
        raise UsageError("a model of numbers has no entropy", hint="give labels: y in the data")
    abstain = {"loss": source.abstain, "votes": 1.0}.get(way, np.inf)
    unsure = "this run tells nothing about newcomers, so how sure this is cannot be said"
    return _by_distance(found, way, data, unsure, abstain=abstain)


def _by_distance(
    found: Mapping[str, Array], way: str, data: Dataset, unsure: str, *, abstain: float = np.inf
) -> Selection:
    """The nearest center, or none beyond the line."""
    center = selection_rule.choose_by_distance(found[way], abstain).center
    order = [int(k) for k in np.argsort(found[way], kind="stable")]
    fits = "is nearest" if center is not None else f"is nearest, but above {abstain:.3f}, what guessing gives"
    return Selection(
        center=center,
        best=order[0],
        way=way,
        samples=len(data),
        ranking=tuple(order),
        distances=_listed(found),
        mixture=_mixture(found),
        reasons=(f"{_WORDS[way]} {float(found[way][order[0]]):.3f}: center {order[0]} {fits}", unsure),
    )


class _LazyModels(Sequence[Flat]):
    """Every center's model, one in memory at a time."""

    def __init__(self, source: CenterSource) -> None:
        self._source = source
        source.models(())

    def __len__(self) -> int:
        return self._source.centers

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - a sequence's
        if not isinstance(index, int) or index >= len(self):
            raise IndexError(index)
        return self._source.models([index])[0]


def _walk_tree(source: CenterSource, data: Dataset, *, labels: bool) -> Selection:
    """At each split to the child whose model explains the samples best; without labels, to the surest one."""
    tree = source.tree
    if tree is None:
        raise UsageError("this run's method has no tree", hint="leave out --by")
    learner, feature = source.learner(training=False), "loss" if labels else "entropy"
    told = []

    def model(node: int) -> Flat:
        return source.split(node) if node >= 0 else source.models([~node])[0]

    def far(children: Sequence[int]) -> Array:
        found = features.model_distances(learner, [model(node) for node in children], data, labels=labels)[feature]
        names = [f"split {node}" if node >= 0 else f"center {~node}" for node in children]
        told.append("; ".join(f"{name}: {_WORDS[feature]} {d:.3f}" for name, d in zip(names, found, strict=True)))
        return found

    leaf = tree.walk(far)
    at_leaf = features.model_distances(learner, [model(~leaf)], data, labels=labels)
    fits = not labels or float(at_leaf["loss"][0]) <= source.abstain
    return Selection(
        center=leaf if fits else None,
        best=leaf,
        way=TREE,
        samples=len(data),
        ranking=(leaf,),
        distances={name: {leaf: float(d[0])} for name, d in at_leaf.items()},
        reasons=(*told, f"the walk ends at center {leaf}" + ("" if fits else ", which only guesses")),
    )


def _spread(values: Array, centers: Sequence[int], count: int) -> Array:
    """Distances of some centers -> [count], infinite for the others."""
    out = np.full(count, np.inf)
    out[list(centers)] = values
    return out


def _listed(found: Mapping[str, Array]) -> dict[str, dict[int, float]]:
    return {name: {int(k): float(d[k]) for k in np.flatnonzero(np.isfinite(d))} for name, d in found.items()}


def _mixture(found: Mapping[str, Array]) -> dict[int, float]:
    """What share of the samples each center explains best."""
    if "votes" not in found:
        return {}
    return {k: round(1 - d, 6) for k, d in _listed({"votes": found["votes"]})["votes"].items() if d < 1}
