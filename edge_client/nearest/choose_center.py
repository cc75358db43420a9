"""How a device chooses among the centers that it can fetch.

It compares sketches of its inputs first, since these need only the router. Then it fetches the models of the few
candidates that remain and measures them. A `CenterSource` provides them: over MQTT (catalog_centers.py) or from a
site (over_http.py).
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from edge_client.data.dataset import Dataset
from edge_client.engines.targets import no_targets
from edge_client.errors import UsageError
from edge_client.nearest import features
from edge_client.protocol.nearest import selection_rule
from edge_client.protocol.nearest.center_tree import CenterTree
from edge_client.protocol.nearest.router import (
    FEATURES,
    FITS,
    MIN_LIMIT_DEVICES,
    MIXED,
    NEED_LABELS,
    ONLY_TESTED,
    Router,
    joint_fit,
)
from edge_client.protocol.program import IGNORED, Program
from edge_client.protocol.task import Array, Flat
from edge_client.training.learner import Learner

MAX_CANDIDATES = 3  # models that are fetched and measured
CANDIDATE_PROBABILITY = 0.99  # fewer candidates, if their probability by `sketch` reaches this
UNSURE = 0.6  # a probability of the nearest center below which the samples do not tell the centers apart
MAX_SAMPLES = 256  # samples that are measured
MAX_PLAIN = 1e6  # a distance from here on is shown as a power of ten
MEASURED_BESIDE = frozenset({"loss", "answers"})  # of each fetched model, whatever the rule weighs
AUTO, LABELLED, UNLABELLED, TREE = "auto", "labelled", "unlabelled", "tree"
RULE_NAMES = (AUTO, LABELLED, UNLABELLED, *(name for name in FEATURES if name not in ONLY_TESTED), TREE)


class CenterSource(Protocol):
    """The centers of a federation. Each model is fetched, checked and cached on request."""

    @property
    def program(self) -> Program: ...

    @property
    def centers(self) -> int: ...

    @property
    def router(self) -> Router | None:
        """What the run teaches newcomers."""
        ...

    @property
    def abstain(self) -> float:
        """The mean loss of guessing, above which no center fits."""
        ...

    @property
    def tree(self) -> CenterTree | None: ...

    def learner(self, *, training: bool) -> Learner:
        """A learner for evaluation; with `training`, for SGD steps as well."""
        ...

    def models(self, centers: Sequence[int]) -> list[Flat]:
        """Weights [schema.size] each."""
        ...

    def start(self) -> Flat | None:
        """The common start of the run [schema.size], if the run publishes it."""
        ...

    def split(self, number: int) -> Flat:
        """The model of a split of the tree [schema.size]."""
        ...


@dataclass(frozen=True, kw_only=True, repr=False)
class Selection:
    """The outcome of a choice. `center` is None if none is taken; `best` is the nearest in any case.

    `fit`: how `best` fits, of router.FITS; None where it is not known. Then a device with labels takes `best`, and one
    without takes none. `probabilities` (center -> probability) compare the centers among themselves and sum to 1 where
    they are known.

    `distances`: feature -> center -> how far, for those that were looked at; `reasons`: why, in plain lines.
    """

    center: int | None
    best: int
    way: str
    samples: int
    ranking: tuple[int, ...]
    fit: str | None = None
    probabilities: Mapping[int, float] = field(default_factory=dict)
    distances: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    mixture: Mapping[int, float] = field(default_factory=dict)  # FedSoft's weights: shares of votes
    reasons: tuple[str, ...] = ()
    limit_devices: int | None = None  # on how many devices the limits of the fit rest; None: there are none

    @property
    def probability(self) -> float | None:
        """That `best` is the nearest of the centers; None where the run has taught nothing to tell it by.

        `fit` says something else: whether it suits the samples at all. Two centers may suit them equally well.
        """
        return self.probabilities.get(self.best)

    @property
    def hardly_ahead_of(self) -> int | None:
        """The next center, where the samples do not tell it from `best`; else None."""
        sure = (self.probability or 1.0) >= UNSURE or len(self.ranking) < 2  # noqa: PLR2004 - it and the next
        return None if sure else self.ranking[1]

    def __repr__(self) -> str:
        """Both answers in words."""
        fits = f"fits {self.fit}" if self.fit else "is the nearest, whether it fits is not known"
        fits = "does not fit" if self.fit == "none" else fits
        fits = fits if self.hardly_ahead_of is None else f"is hardly ahead of center {self.hardly_ahead_of}: it {fits}"
        sure = "" if self.probability is None else f", with a probability of {self.probability:.0%}"
        return f"Selection(center {self.best} {fits}{sure}; by {self.way}, {self.samples} samples)"

    def _repr_html_(self) -> str:
        head = "<tr><th>center</th><th>probability</th></tr>"
        rows = "".join(f"<tr><td>{k}</td><td>{p:.0%}</td></tr>" for k, p in self.probabilities.items())
        reasons = "".join(f"<li>{html.escape(line)}</li>" for line in self.reasons)
        return f"<p>{html.escape(repr(self))}</p><table>{head}{rows}</table><ul>{reasons}</ul>"


def choose_center(source: CenterSource, data: Dataset, *, labels: bool, by: str = AUTO) -> Selection:
    """The center for these samples, by the rule `by`. Raises UsageError for a rule that is impossible here."""
    if source.centers == 0:
        why = ("there is no center yet",)
        return Selection(center=None, best=0, way=by, samples=len(data), ranking=(), fit=FITS[-1], reasons=why)
    rows = np.random.Generator(np.random.PCG64(0)).permutation(len(data))[:MAX_SAMPLES]
    if labels:
        if not data.counted.any():
            raise UsageError(f"all labels are {IGNORED}, which counts nothing", hint="leave y out")
        if not data.counted[rows].any():
            rows[0] = data.counted.argmax()
    few = Dataset(data.x[rows], data.y[rows] if labels else no_targets(source.program, len(rows)))
    way = by if by != AUTO else _default_rule(source, labels=labels)
    ranked = _rank(source, few, way, labels=labels)
    return _judged(source, few, ranked, labels=labels, told_way=by != AUTO)


def _rank(source: CenterSource, data: Dataset, way: str, *, labels: bool) -> _Ranking:
    """The centers by the rule `way`, whether any fits or not."""
    if way == TREE:
        return _walk_tree(source, data, labels=labels)
    router = source.router
    wanted = router.ways[way].features if router is not None and way in router.ways else (way,)
    if not labels and set(wanted) <= NEED_LABELS:
        raise UsageError(f"{way} needs labels, which this data has not", hint="leave out --by")
    if router is None or way not in router.ways:
        return _without_rule(source, data, way, labels=labels)
    return _rank_by_rule(source, router, data, way, labels=labels)


@dataclass(frozen=True, kw_only=True)
class _Ranking:
    """The centers best first; `found`: feature -> distances [K], infinite where not measured."""

    order: Sequence[int]
    way: str
    found: Mapping[str, Array]
    probabilities: Mapping[int, float] = field(default_factory=dict)
    told: tuple[str, ...] = ()


def _default_rule(source: CenterSource, *, labels: bool) -> str:
    known = {} if source.router is None else source.router.ways
    ways = (LABELLED, "loss") if labels else (UNLABELLED, "sketch", "entropy")
    if source.tree is not None and not known:
        return TREE
    return next((way for way in ways if way in known), "loss" if labels else "entropy")


def _rank_by_rule(source: CenterSource, router: Router, data: Dataset, way: str, *, labels: bool) -> _Ranking:
    wanted, found, told = router.ways[way].features, dict[str, Array](), list[str]()
    if router.sketch is not None and "sketch" in wanted:
        found["sketch"] = selection_rule.sketch_distance(
            features.sketch_inputs(data, router.sketch), router.sketch.centers
        )
    if "round" in wanted:
        found["round"] = _measure_round(source, data, labels=labels)
    if set(wanted) - {"sketch", "round"}:
        left = list(range(router.centers))
        if "sketch" in found and "sketch" in router.ways:
            left = router.predict("sketch", found, len(data)).candidates(MAX_CANDIDATES, CANDIDATE_PROBABILITY)
            names = ", ".join(map(str, left))
            told.append(f"the inputs' sketch leaves {len(left)} of {router.centers} centers: {names}")
        found |= _measure_candidates(source, data, left, wanted, labels=labels)
    p = router.predict(way, found, len(data)).probabilities
    order = [int(k) for k in np.argsort(-p, kind="stable") if p[k] > 0]
    return _Ranking(order=order, way=way, found=found, probabilities={k: float(p[k]) for k in order}, told=tuple(told))


def _measure_candidates(
    source: CenterSource, data: Dataset, left: Sequence[int], wanted: Sequence[str], *, labels: bool
) -> dict[str, Array]:
    """Fetch these centers' models and look at the samples with each."""
    models = source.models(left)
    train = "norms" in wanted and features.has_batch_norm(source.program.schema)
    learner = source.learner(training=train)
    profiles = None if source.router is None else source.router.answers
    answers = None if profiles is None else [profiles[k] for k in left]
    found = features.model_distances(learner, models, data, labels=labels, answers=answers)
    if train and (far := features.norm_distances(learner, models, data)) is not None:
        found["norms"] = far
    return {
        name: _spread(d, left, source.centers) for name, d in found.items() if name in wanted or name in MEASURED_BESIDE
    }


def _measure_round(source: CenterSource, data: Dataset, *, labels: bool) -> Array:
    about, start = None if source.router is None else source.router.round, source.start()
    if about is None or start is None or not labels:
        raise UsageError("a local round needs labels and the run's common start", hint="leave out --by")
    point = features.sketch_local_round(source.learner(training=True), start, data, about)
    return selection_rule.sketch_distance(point, about.centers)


def _judged(source: CenterSource, data: Dataset, ranked: _Ranking, *, labels: bool, told_way: bool) -> Selection:
    """Whether the best center fits: by the limits of the run's router, and never with a loss worse than guessing.

    Without labels it may not be known whether one fits. Then none is taken unless the caller named the way.
    """
    best, router, found, n = ranked.order[0], source.router, dict(ranked.found), len(data)
    if labels and not np.isfinite(found.get("loss", np.full(best + 1, np.inf))[best]):
        found |= _measure_candidates(source, data, [best], ("loss",), labels=True)
    if router is not None and router.inputs is not None:
        found["inputs"] = features.input_distance(data, router.inputs, source.centers)
    at_best = {name: float(d[best]) for name, d in found.items()}
    fits = {} if router is None else router.fits(at_best, n)
    devices = _devices_behind_limits(at_best, fits, router, n)
    told = [*ranked.told, *(_compared(name, d, best, router, n) for name, d in at_best.items())]
    if router is not None:
        counting = fits.keys() - MIXED if "loss" in fits else fits.keys()  # as in joint_fit
        told += [_above(name, at_best[name], router, n) for name in fits if name in counting and fits[name] == FITS[-1]]
    if guesses := at_best.get("loss", 0.0) > source.abstain:
        told.append(f"a mean loss above {source.abstain:.3f} is worse than guessing")
    fit = FITS[-1] if guesses else joint_fit(fits)
    if devices is not None:
        told.append(f"the limits rest on {devices} device{'' if devices == 1 else 's'}")
    if fit is None:
        told.append(_why_unknown(fits, devices, labels=labels))
    if ranked.probabilities.get(best, 1.0) < UNSURE:
        shares = ", ".join(f"center {k} {p:.0%}" for k, p in ranked.probabilities.items())
        told.append(f"these samples tell the centers apart badly: {shares}")
    taken = labels or told_way if fit is None else fit != FITS[-1]
    return Selection(
        center=best if taken else None,
        best=best,
        way=ranked.way,
        samples=n,
        ranking=tuple(ranked.order),
        fit=fit,
        probabilities=ranked.probabilities,
        distances=_listed(found),
        mixture=_mixture(found),
        reasons=tuple(told),
        limit_devices=devices,
    )


def _devices_behind_limits(
    measured: Mapping[str, float], fits: Mapping[str, str], router: Router | None, n: int
) -> int | None:
    """On how many devices the limits rest that were used, of several the fewest; where none was, those at hand."""
    behind = {} if router is None else router.devices_behind(measured, n)
    return min((count for name, count in behind.items() if name in fits or not fits), default=None)


def _above(name: str, distance: float, router: Router, n: int) -> str:
    limit = router.limits(name, n)[1]
    return f"{_WORDS[name]} {_shown(distance)} is above {limit:.3f}, below which nearly all devices that trained are"


def _why_unknown(fits: Mapping[str, str], devices: int | None, *, labels: bool) -> str:
    """Why no limit tells whether the center fits, and what would."""
    if fits:
        return (
            "each sample looks known, the samples together do not: few classes, or classes in other proportions than "
            f"on the devices that trained, look so, and so do classes that no center knows{_HOW_TO_TELL}"
        )
    why = (
        "this run taught nothing to tell by how a center fits (a coordinator with `teach-newcomers = true` and "
        f"{MIN_LIMIT_DEVICES} devices or more does)"
        if devices is None
        else f"limits that rest on fewer than {MIN_LIMIT_DEVICES} devices tell nothing about a fit"
    )
    return why + ("" if labels else _HOW_TO_TELL)


def _compared(name: str, distance: float, best: int, router: Router | None, n: int) -> str:
    """A feature in words, beside what it is on devices that trained."""
    usual = None if router is None else router.typical(name, n)
    beside = "" if usual is None else f"; devices that trained have about {usual:.3f} at theirs"
    return f"{_WORDS[name]} {_shown(distance)} at center {best}{beside}"


def _shown(distance: float) -> str:
    return f"{distance:.3f}" if abs(distance) < MAX_PLAIN else f"{distance:.3g}"


_HOW_TO_TELL = "; give labels, or name a way with --by"
_WORDS = {
    "loss": "mean loss",
    "votes": "share of samples that another center explains better",
    "entropy": "entropy of the answers",
    "norms": "distance from batch norm's statistics",
    "sketch": "distance from the inputs' sketch",
    "round": "distance from where a local round led",
    "inputs": "distance from the fleet's inputs",
    "answers": "distance from the answers to its own devices",
}


def _without_rule(source: CenterSource, data: Dataset, way: str, *, labels: bool) -> _Ranking:
    """Where the run has learned no rule: the least distance, over every model."""
    if way == "round" and source.router is not None and source.router.round is not None:
        found = {"round": _measure_round(source, data, labels=labels)}
    elif way in ("loss", "votes", "entropy"):
        found = dict(features.model_distances(source.learner(training=False), _LazyModels(source), data, labels=labels))
    else:
        raise UsageError(f"this run has no guide for the way {way!r}", hint="leave out --by")
    return _Ranking(order=[int(k) for k in np.argsort(_known(found, way), kind="stable")], way=way, found=found)


def _known(found: Mapping[str, Array], feature: str) -> Array:
    if feature not in found:
        raise UsageError("the entropy of this model's answers is not measured", hint="give labels: y in the data")
    return found[feature]


class _LazyModels(Sequence[Flat]):
    """All centers' models, one in memory at a time."""

    def __init__(self, source: CenterSource) -> None:
        self._source = source
        source.models(())

    def __len__(self) -> int:
        return self._source.centers

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - a sequence's
        if not isinstance(index, int) or index >= len(self):
            raise IndexError(index)
        return self._source.models([index])[0]


def _walk_tree(source: CenterSource, data: Dataset, *, labels: bool) -> _Ranking:
    """At each split to the child whose model explains the samples best; without labels, to the surest one."""
    tree = source.tree
    if tree is None:
        raise UsageError("this run's method has no tree", hint="leave out --by")
    learner, feature = source.learner(training=False), "loss" if labels else "entropy"
    told = []

    def model(node: int) -> Flat:
        return source.split(node) if node >= 0 else source.models([~node])[0]

    def far(children: Sequence[int]) -> Array:
        measured = features.model_distances(learner, [model(node) for node in children], data, labels=labels)
        found = _known(measured, feature)
        found[np.isnan(found)] = np.inf
        names = [f"split {node}" if node >= 0 else f"center {~node}" for node in children]
        told.append("; ".join(f"{name}: {_WORDS[feature]} {d:.3f}" for name, d in zip(names, found, strict=True)))
        return found

    leaf = tree.walk(far)
    at_leaf = _measure_candidates(source, data, [leaf], (feature,), labels=labels)
    return _Ranking(order=[leaf], way=TREE, found=at_leaf, told=(*told, f"the walk ends at center {leaf}"))


def _spread(values: Array, centers: Sequence[int], count: int) -> Array:
    """Distances of some centers -> [count], infinite for the others, and for one that gives no numbers."""
    out = np.full(count, np.inf)
    out[list(centers)] = np.where(np.isnan(values), np.inf, values)
    return out


def _listed(found: Mapping[str, Array]) -> dict[str, dict[int, float]]:
    return {name: {int(k): float(d[k]) for k in np.flatnonzero(np.isfinite(d))} for name, d in found.items()}


def _mixture(found: Mapping[str, Array]) -> dict[int, float]:
    """What share of the samples each center explains best."""
    if "votes" not in found:
        return {}
    return {k: round(1 - d, 6) for k, d in _listed({"votes": found["votes"]})["votes"].items() if d < 1}
