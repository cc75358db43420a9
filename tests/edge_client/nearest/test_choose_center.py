"""A device chooses: sketches first, few models then, none when nothing fits; measured as training measures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.nearest.fit_router import CenterMeasurement, learn_router
from coordinator.nearest.fleet_profiles import make_profile
from edge_client.config import ClientConfig
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import UsageError
from edge_client.nearest import features
from edge_client.nearest.choose_center import MAX_CANDIDATES, Selection, choose_center
from edge_client.nearest.over_mqtt import personalise_and_score
from edge_client.nearest.personalise import personalise
from edge_client.protocol.nearest.center_tree import CenterTree
from edge_client.protocol.nearest.input_moments import moments_of
from edge_client.protocol.nearest.router import InputSketch, LocalRound, Router
from edge_client.protocol.nearest.selection_rule import guessing_loss, sketch_distance
from edge_client.protocol.program import IGNORED, Program
from edge_client.protocol.task import Fit, Flat
from edge_client.training.fit_probe import run_fit
from edge_client.training.learner import EngineLearner
from tests.support import softmax_program

K, N = 5, 40
ABOUT = InputSketch(seed=1, width=3.0, centers=np.zeros((K, 64)))
ROUND = LocalRound(representation="all", lr=0.2, momentum=0.0, batch=8, steps=5, centers=np.zeros((K, 384)))


def data_of(group: int, *, seed: int = 0, n: int = N) -> Dataset:
    """Inputs around a place of the group's own; labels by its own rule."""
    rng = np.random.default_rng([seed, group])
    means = 2 * np.eye(softmax_program.FEATURES)[group % softmax_program.FEATURES]
    x = rng.normal(size=(n, softmax_program.FEATURES)) + means
    rule = np.random.default_rng(group).normal(size=(softmax_program.FEATURES, softmax_program.CLASSES))
    return Dataset(x, (x @ rule).argmax(axis=1))


PROFILE = make_profile([moments_of(data_of(g).x) for g in range(K)])


@dataclass
class CenterShelf:
    """An offer of centers that are here; what was fetched is noted."""

    vectors: list[Flat]
    router: Router | None = None
    tree: CenterTree | None = None
    splits: Sequence[Flat] = ()
    begin: Flat | None = None
    fetched: list[int] = field(default_factory=list)
    abstain: float = guessing_loss(softmax_program.program())
    program: Program = field(default_factory=softmax_program.program)

    @property
    def centers(self) -> int:
        return len(self.vectors)

    def learner(self, *, training: bool) -> EngineLearner:
        return EngineLearner(softmax_program.SoftmaxEngine(), self.program)

    def models(self, centers: Sequence[int]) -> list[Flat]:
        self.fetched += centers
        return [self.vectors[k] for k in centers]

    def start(self) -> Flat | None:
        return self.begin

    def split(self, number: int) -> Flat:
        return self.splits[number]


def trained(data: Dataset) -> Flat:
    learner = CenterShelf([]).learner(training=True)
    task = Fit(start=np.zeros(learner.program.schema.size), steps=200, lr=0.3, batch=len(data), seed=0)
    return run_fit(learner, task, data).vector


@pytest.fixture(scope="module")
def shelf() -> CenterShelf:
    """Five centers, and a guide that two devices of each have taught."""
    centers = [trained(data_of(g)) for g in range(K)]
    begin = np.zeros(centers[0].size)
    offer = CenterShelf(centers, begin=begin)
    learner = offer.learner(training=True)
    about = replace(ABOUT, centers=np.stack([features.sketch_inputs(data_of(g), ABOUT) for g in range(K)]))
    went = np.stack([features.sketch_local_round(learner, begin, data_of(g), ROUND) for g in range(K)])
    rounds = replace(ROUND, centers=went)
    looks: list[CenterMeasurement] = []
    for g in range(K):
        for seed in range(1, 5):
            data = data_of(g, seed=seed)
            d = features.model_distances(learner, centers, data, labels=True)
            d["sketch"] = sketch_distance(features.sketch_inputs(data, about), about.centers)
            d["inputs"] = np.full(K, PROFILE.distance(moments_of(data.x)))
            d["round"] = sketch_distance(features.sketch_local_round(learner, begin, data, rounds), went)
            looks.append(CenterMeasurement(device=len(looks), n=N, distances=d, own_center=g))
    return replace(offer, router=learn_router(looks, sizes=[N], centers=K, sketch=about, round=rounds, inputs=PROFILE))


def chosen(shelf: CenterShelf, data: Dataset, *, labels: bool = True, by: str = "auto") -> tuple[Selection, list[int]]:
    offer = replace(shelf, fetched=[])
    return choose_center(offer, data, labels=labels, by=by), offer.fetched


@pytest.mark.parametrize("group", range(K))
@pytest.mark.parametrize(
    ("by", "labels"),
    [("auto", True), ("auto", False), ("loss", True), ("sketch", False), ("round", True), ("entropy", False)],
)
def test_each_way_ranks_every_center_and_most_find_the_right_one(
    shelf: CenterShelf,
    group: int,
    by: str,
    labels: bool,  # noqa: FBT001 - a parameter of the case
) -> None:
    found, fetched = chosen(shelf, data_of(group, seed=9), labels=labels, by=by)
    assert sum(found.probabilities.values()) == pytest.approx(1)
    assert found.ranking[0] == found.best
    assert found.reasons
    if by != "entropy":  # how sure a linear model is says little about whose data it sees
        assert found.best == group
    if by == "auto":
        assert len(fetched) <= MAX_CANDIDATES
    if by in ("sketch", "round"):
        assert fetched == ([group] if labels else [])  # with labels the nearest one's loss is looked at


def test_unseen_inputs_and_unseen_labels_are_answered_none(shelf: CenterShelf) -> None:
    data = data_of(0, seed=9)
    assert chosen(shelf, Dataset(10 - 3 * data.x, data.y))[0].center is None
    assert chosen(shelf, Dataset(data.x, (data.y + 1) % softmax_program.CLASSES))[0].center is None
    assert chosen(shelf, Dataset(10 - 3 * data.x, data.y), labels=False)[0].center is None


def test_distances_of_huge_samples_are_told_in_few_digits(shelf: CenterShelf) -> None:
    data = data_of(0, seed=9)
    found = chosen(shelf, Dataset(1e30 * data.x, data.y))[0]
    assert found.center is None
    assert max(map(len, found.reasons)) < 120
    assert any(re.search(r"mean loss \d\.\d\de\+\d\d at center", line) for line in found.reasons)


@pytest.mark.parametrize("labels", [True, False])
def test_a_center_that_gives_no_numbers_does_not_stand_in_the_way_of_others(
    shelf: CenterShelf, *, labels: bool
) -> None:
    largest = np.finfo(np.float64).max
    vectors = [largest * np.sign(v) if k == 3 else v for k, v in enumerate(shelf.vectors)]
    for by in ("auto", "loss") if labels else ("auto", "entropy"):
        with np.errstate(all="ignore"):
            found, _ = chosen(replace(shelf, vectors=vectors), data_of(0, seed=9), labels=labels, by=by)
        assert 3 not in found.ranking
        assert by == "entropy" or found.best == 0


def test_votes_are_mixture_weights(shelf: CenterShelf) -> None:
    data = data_of(0, seed=9)
    losses, _ = shelf.learner(training=False).evaluate(shelf.vectors, data, batch=N)
    shares = np.bincount(losses.argmin(axis=0), minlength=K) / N
    mixture = chosen(shelf, data, by="votes")[0].mixture
    assert mixture == {k: pytest.approx(shares[k]) for k in range(K) if shares[k]}


def test_without_a_router_the_least_loss_wins_and_no_confidence_is_given(shelf: CenterShelf) -> None:
    bare = replace(shelf, router=None)
    found, _ = chosen(bare, data_of(2, seed=9))
    assert (found.center, found.way, found.fit, dict(found.probabilities)) == (2, "loss", None, {})
    assert chosen(replace(bare, abstain=0.01), data_of(2, seed=9))[0].center is None


def test_without_labels_and_a_guide_nothing_is_taken_unless_a_way_is_named(shelf: CenterShelf) -> None:
    bare = replace(shelf, router=None)
    found, _ = chosen(bare, data_of(2, seed=9), labels=False)
    assert (found.way, found.center, found.fit) == ("entropy", None, None)  # that none fits is not known either
    assert "`teach-newcomers = true`" in found.reasons[-1]
    assert "labels" in found.reasons[-1]
    named, _ = chosen(bare, data_of(2, seed=9), labels=False, by="entropy")
    assert (named.center, named.fit) == (named.best, None)


@pytest.mark.parametrize("by", ["auto", "loss", "votes", "sketch", "round", "entropy"])
def test_a_loss_worse_than_guessing_fits_no_center_by_any_way(shelf: CenterShelf, by: str) -> None:
    data = data_of(0, seed=9)
    wrong = Dataset(data.x, (data.y + 1) % softmax_program.CLASSES)
    found, _ = chosen(shelf, wrong, by=by)
    assert found.distances["loss"][found.best] > shelf.abstain
    assert (found.center, found.fit) == (None, "none")
    assert any("guessing" in reason for reason in found.reasons)


@pytest.mark.parametrize("by", ["auto", "sketch", "entropy"])
def test_noise_without_labels_is_answered_none_by_any_way(shelf: CenterShelf, by: str) -> None:
    noise = np.random.default_rng(0).normal(size=(N, softmax_program.FEATURES)) * 4
    found, _ = chosen(shelf, Dataset(noise, np.zeros(N, np.int64)), labels=False, by=by)
    assert (found.center, found.fit) == (None, "none")


def test_limits_of_three_devices_are_no_evidence_and_the_answer_says_so(shelf: CenterShelf) -> None:
    learner = shelf.learner(training=False)
    looks = [
        CenterMeasurement(
            device=seed,
            n=N,
            distances=features.model_distances(learner, shelf.vectors, data_of(0, seed=seed), labels=True),
            own_center=0,
        )
        for seed in (1, 2, 3)
    ]
    few = replace(shelf, router=learn_router(looks, sizes=[N], centers=K))
    for labels, center in ((True, 0), (False, None)):
        found, _ = chosen(few, data_of(0, seed=9), labels=labels)
        assert (found.center, found.fit, found.limit_devices) == (center, None, 3)
        assert "the limits rest on 3 devices" in found.reasons
        assert any("fewer than 5 devices tell nothing" in line for line in found.reasons)
    noise = data_of(0, seed=9)
    noise = Dataset(noise.x, (noise.y + 1) % softmax_program.CLASSES)
    assert (chosen(few, noise)[0].center, chosen(few, noise)[0].fit) == (None, "none")
    assert chosen(shelf, data_of(0, seed=9))[0].limit_devices == 20


def test_a_known_device_is_told_how_it_fits(shelf: CenterShelf) -> None:
    fits = [chosen(shelf, data_of(g, seed=9), labels=labels)[0].fit for g in range(K) for labels in (True, False)]
    assert set(fits) <= {"well", "badly"}
    assert fits.count("well") >= 0.7 * len(fits)  # 90 % is meant of each feature, three are tested


def one_class(group: int, label: int) -> Dataset:
    data = data_of(group, seed=9, n=10 * N)
    rows = np.flatnonzero(data.y == label)[:N]
    return Dataset(data.x[rows], data.y[rows])


@pytest.mark.parametrize("by", ["auto", "loss", "sketch"])
def test_a_device_of_one_class_is_not_refused_for_its_sketch(shelf: CenterShelf, by: str) -> None:
    for group, label in ((1, 3), (2, 0), (3, 1)):
        found, _ = chosen(shelf, one_class(group, label), by=by)
        assert shelf.router is not None
        if by != "loss":
            assert shelf.router.fits({"sketch": found.distances["sketch"][group]}, N) == {"sketch": "none"}
        assert (found.center, found.fit) == (group, "well")
        assert not any("nearly all devices" in line for line in found.reasons)


def test_without_labels_a_device_of_one_class_is_told_that_its_fit_is_not_known(shelf: CenterShelf) -> None:
    found, _ = chosen(shelf, one_class(3, 1), labels=False)
    assert (found.center, found.best, found.fit) == (None, 3, None)
    assert any("few classes" in line and "give labels" in line for line in found.reasons)
    assert any("nearly all devices" in line for line in found.reasons)
    named, _ = chosen(shelf, one_class(3, 1), labels=False, by="sketch")
    assert (named.center, named.fit) == (3, None)


@pytest.mark.parametrize("by", ["loss", "votes", "round"])
def test_a_way_that_needs_labels_is_refused_without(shelf: CenterShelf, by: str) -> None:
    with pytest.raises(UsageError, match="labels"):
        chosen(shelf, data_of(0), labels=False, by=by)


def test_a_way_that_the_run_did_not_learn_is_refused_with_what_always_works(shelf: CenterShelf) -> None:
    for by, offer in (("norms", shelf), *((by, replace(shelf, router=None)) for by in ("sketch", "round", "tree"))):
        with pytest.raises(UsageError) as refused:
            chosen(offer, data_of(0), by=by)
        assert refused.value.hint == "leave out --by"


@pytest.mark.parametrize("missing", ["start", "round"])
def test_a_local_round_without_what_it_needs_is_refused(shelf: CenterShelf, missing: str) -> None:
    assert shelf.router is not None
    changed = {"begin": None} if missing == "start" else {"router": replace(shelf.router, round=None)}
    with pytest.raises(UsageError, match="a local round needs labels and the run's common start"):
        chosen(replace(shelf, **changed), data_of(0), by="round")


def test_a_local_round_is_measured_where_no_rule_weighs_it(shelf: CenterShelf) -> None:
    assert shelf.router is not None
    ways = {name: rule for name, rule in shelf.router.ways.items() if name != "round"}
    found, _ = chosen(replace(shelf, router=replace(shelf.router, ways=ways)), data_of(2, seed=9), by="round")
    assert found.best == 2


def test_a_catalog_without_centers_gives_no_center(shelf: CenterShelf) -> None:
    found = choose_center(replace(shelf, vectors=[]), data_of(0), labels=True)
    assert (found.center, found.fit) == (None, "none")


def test_a_walk_down_the_tree_ends_at_the_right_center(shelf: CenterShelf) -> None:
    pairs = [
        trained(Dataset(*(np.concatenate([getattr(data_of(g), n) for g in gs]) for n in ("x", "y"))))
        for gs in ((0, 1), (2, 3))
    ]
    tree = CenterTree(((0, 1), (0, 2), (1, ~0), (1, ~1), (2, ~2), (2, ~3)), 4)
    offer = CenterShelf(shelf.vectors[:4], tree=tree, splits=[pairs[0], *pairs])
    for group in range(4):
        found = choose_center(offer, data_of(group, seed=9), labels=True, by="auto")
        assert (found.way, found.center) == ("tree", group)
    assert len(set(offer.fetched)) == 4


@pytest.mark.parametrize("labels", [True, False])
def test_a_walk_down_the_tree_leaves_out_a_split_that_gives_no_number(shelf: CenterShelf, *, labels: bool) -> None:
    broken = np.full_like(shelf.vectors[0], np.inf)
    tree = CenterTree(((0, 1), (0, ~0), (1, ~1), (1, ~2)), 3)
    offer = CenterShelf(shelf.vectors[:3], tree=tree, splits=[broken, broken])
    with np.errstate(invalid="ignore"):
        assert choose_center(offer, data_of(0), labels=labels).best == 0


@pytest.mark.parametrize("tree", [None, CenterTree(((0, ~0), (0, ~1)), 2)], ids=["no-tree", "tree"])
def test_numbers_without_labels_need_them(shelf: CenterShelf, tree: CenterTree | None) -> None:
    """The walk ended with a KeyError, as only a classifier's answers have an entropy; the engine refused y before."""
    numbers = replace(shelf.program, loss="squared-error")
    offer = CenterShelf(shelf.vectors[:2], tree=tree, splits=[shelf.vectors[0]], program=numbers)
    unlabelled = Dataset(data_of(0).x, np.zeros(N, np.int64))  # as a device's folder gives them
    with pytest.raises(UsageError, match="the entropy of this model's answers is not measured"):
        choose_center(offer, unlabelled, labels=False)


def test_personal_steps_gain_and_stay_near(shelf: CenterShelf) -> None:
    data = data_of(0, seed=9)
    center = shelf.vectors[1]
    mine = personalise(shelf, center, data, 30)
    learner = shelf.learner(training=False)
    losses, _ = learner.evaluate([center, mine], data, batch=N)
    assert losses[1].mean() < losses[0].mean()
    held = personalise(replace(shelf, router=None), center, data, 30)
    assert np.linalg.norm(held - center) < np.linalg.norm(mine - center)  # without a guide the rate is careful


def personal(*asked: Any) -> dict[str, Any]:  # noqa: ANN401 - those of personalise_and_score
    told = personalise_and_score(*asked)
    assert told is not None
    return told


def test_personal_steps_are_told_with_accuracy_and_loss_before_and_after(shelf: CenterShelf, tmp_path: Path) -> None:
    config = ClientConfig(federation="f", device_id="d", broker="", data=tmp_path, state=tmp_path, signing_keys=())
    local = DeviceData(train=data_of(0, seed=9), test=data_of(0, seed=8))
    told = personal(shelf, 1, None, local, 30, config)
    assert Path(told["file"]).stat().st_mode & 0o077 == 0  # what a device trained is its owner's
    assert told["accuracy"] > told["before"]
    assert told["loss"] < told["loss_before"]
    unmeasured = personal(shelf, 1, None, replace(local, test=None), 30, config)
    assert {name for name, value in unmeasured.items() if value is not None} == {"steps", "file"}


def test_no_personal_file_of_other_weights_stays_beside_the_newest(
    shelf: CenterShelf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ClientConfig(federation="f", device_id="d", broker="", data=tmp_path, state=tmp_path, signing_keys=())
    local, earlier = DeviceData(train=data_of(0, seed=9)), tmp_path / "personal-1.onnx"
    earlier.write_bytes(b"of an earlier visit")
    assert personal(shelf, 1, "center-1.tflite", local, 1, config)["model"] is None
    assert not earlier.exists()
    other = tmp_path / "center-1.onnx"  # has none of the program's constants
    other.write_bytes(b"")
    onnx = replace(shelf, program=replace(shelf.program, containers={"onnx": {}}))
    told = personal(onnx, 1, str(other), local, 1, config)
    assert told["model"] is None
    assert Path(told["file"]).exists()  # the answer and the weights are kept
    assert "no personal ONNX file" in caplog.text


class ShelfOfFixedBatches(CenterShelf):
    """For an engine that takes eight samples at a time."""

    def learner(self, *, training: bool) -> EngineLearner:
        return EngineLearner(softmax_program.SoftmaxEngine(fixed_batch=8), self.program)


def test_personal_steps_need_no_whole_batch_of_samples(shelf: CenterShelf) -> None:
    fixed = ShelfOfFixedBatches(shelf.vectors, router=shelf.router)
    for n in (1, 3, 8, 9):
        few, center = data_of(0, n=n, seed=9), shelf.vectors[1]
        mine = personalise(fixed, center, few, 20)
        losses, _ = fixed.learner(training=False).evaluate([center, mine], few, batch=8)
        assert losses[1].mean() < losses[0].mean()


def test_a_few_samples_fill_whatever_batch_an_engine_takes(shelf: CenterShelf) -> None:
    few = data_of(0, n=3)
    learner = EngineLearner(softmax_program.SoftmaxEngine(fixed_batch=8), softmax_program.program())
    assert features.sketch_local_round(learner, shelf.vectors[0], few, ROUND).shape == (384,)
    assert features.norm_distances(learner, shelf.vectors, few) is None  # this model has no batch norm


def test_labels_that_all_count_for_nothing_are_no_labels(shelf: CenterShelf) -> None:
    """Their loss was 0, so that the first center fitted well."""
    data = Dataset(data_of(0).x, np.full((N, 3), IGNORED))
    with pytest.raises(UsageError, match="all labels are -100, which counts nothing") as told:
        choose_center(shelf, data, labels=True)
    assert told.value.hint == "leave y out"
