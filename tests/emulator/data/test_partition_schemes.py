"""Laws of every scheme: disjoint, complete, deterministic; then what each promises about sizes and groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import ConfigError, UsageError
from edge_client.protocol.task import F64
from emulator.data import share_matrices
from emulator.data.fleet_split import FleetData
from emulator.data.loaders.samples import DataSet, RawSamples
from emulator.data.partition_schemes import PARTITION_SCHEMES, describe_scheme, parse_scheme
from tests.support.raw_data_files import images, numbered

DATA = numbered(2_000, 400, users=40)
ALONE = numbered(2_000, 0, users=40)  # without a test part


def pictures(data: DataSet) -> DataSet:
    """Every sample as a picture of one pixel, which no turn changes."""

    def pixel(part: RawSamples) -> RawSamples:
        return replace(part, x=part.x[:, :, None, None])

    return replace(data, train=pixel(data.train), test=None if data.test is None else pixel(data.test))


def mixed(data: DataSet) -> DataSet:
    """Every fifth block of ten samples, with all classes in it, is of domain 1, the others of domain 0."""

    def of_two(part: RawSamples) -> RawSamples:
        return replace(part, domain=(np.arange(len(part)) // 10 % 5 == 0).astype(np.int64))

    return replace(data, train=of_two(data.train), test=None if data.test is None else of_two(data.test))


TRUE_CUTS = [  # every sample is used exactly once
    "iid",
    "dirichlet:alpha=0.5,least=2",
    "n-class:classes=3,least=2",
    "cluster-dirichlet:groups=3,alpha-group=0.5,alpha=10,least=2",
    "cluster-n-class:groups=4,classes-group=5,classes=3,least=2",
    "rotations:groups=4",
    "label-permutations:groups=3,new=0",
    "shifts:alpha=1.0,groups=2,turns=2,least=2",
    "by-user",
    "by-user:per-device=3",
    "size-skew",
    "size-skew:law=square",
    "size-skew:law=exponential,least=5",
    "shards:each=2",
    "continuous:strictness=0.7",
]
MIXTURES = [f"mixtures:shares={shares}" for shares in ("10-90", "30-70", "linear", "random")]
FORMS = {"rotations": pictures, "shifts": pictures, "mixtures": mixed}  # what a scheme needs of its data
every_cut = pytest.mark.parametrize("spec", TRUE_CUTS)


def fit_for(spec: str, data: DataSet) -> DataSet:
    """The same samples in the form that the scheme takes."""
    return FORMS.get(spec.partition(":")[0], lambda same: same)(data)


def held(local: DeviceData, part: str) -> Dataset:
    found = local.train if part == "train" else local.test
    assert found is not None
    return found


def numbers(split: FleetData, part: str) -> list[int]:
    return [int(v) for local in split.devices.values() for v in held(local, part).x.ravel()]


@every_cut
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32), devices=st.integers(8, 30))
def test_every_sample_goes_to_one_device_and_there_to_one_part(spec: str, seed: int, devices: int) -> None:
    if spec.startswith("by-user"):
        devices = 0  # fewer are a choice of users, which leaves the others' samples out
    kept = 16 if spec.startswith("label") else 0  # for reference
    for data in (DATA, ALONE):
        split = parse_scheme(spec).split(fit_for(spec, data), devices=devices, seed=seed)
        train, test = (numbers(split, part) for part in ("train", "test"))
        whole = len(data.train) + len(data.test or ())
        assert len(train + test) == len(set(train + test)) == whole - kept
        assert len(split.devices) == (devices or (14 if "per-device" in spec else 40))
        assert all(len(local.train) >= 1 and len(held(local, "test")) >= 1 for local in split.devices.values())
        if data.test is not None and not spec.startswith("by-user"):
            assert max(train) < 2_000 <= min(test)


@pytest.mark.parametrize("spec", [*TRUE_CUTS, *MIXTURES])
def test_the_same_seed_cuts_alike_and_another_does_not(spec: str) -> None:
    first, again, other = (parse_scheme(spec).split(fit_for(spec, DATA), devices=12, seed=s) for s in (5, 5, 6))
    assert numbers(first, "train") == numbers(again, "train")
    assert numbers(first, "test") == numbers(again, "test")
    assert numbers(first, "train") != numbers(other, "train")
    assert dict(first.groups) == dict(again.groups)


@pytest.mark.parametrize("spec", MIXTURES)
def test_a_mixture_trains_on_the_training_part_alone_and_takes_samples_more_than_once(spec: str) -> None:
    split = parse_scheme(spec).split(fit_for(spec, DATA), devices=30, seed=0)
    train, test = (numbers(split, part) for part in ("train", "test"))
    pure = [int(v) for held_out in split.holdouts.values() for v in held_out.x[:, 0]]
    assert max(train) < 2_000 <= min(test + pure)
    # Drawn with replacement, as the paper does: so neither disjoint nor complete, also within one device.
    assert len(set(train)) < len(train)
    assert any(len(set(local.train.x[:, 0])) < len(local.train) for local in split.devices.values())


def mixture(data: Dataset) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.bincount(data.y, minlength=10) / len(data)


@pytest.mark.parametrize("spec", [s for s in TRUE_CUTS if "class" in s or "dirichlet" in s])
def test_a_device_tests_on_the_classes_that_it_trains_on_in_the_same_proportions(spec: str) -> None:
    big = numbered(60_000, 10_000)
    for local in parse_scheme(spec).split(big, devices=10, seed=1).devices.values():
        # Rounding moves at most one sample of each class, of a few hundred to test.
        np.testing.assert_allclose(mixture(local.train), mixture(held(local, "test")), atol=10 / len(local.test or ()))


def test_two_classes_each_means_two_classes_each() -> None:
    for local in parse_scheme("n-class:classes=2").split(DATA, devices=20, seed=2).devices.values():
        assert len(set(local.train.y.tolist())) == 2


def test_the_devices_of_a_group_share_its_three_classes_and_hold_two_of_them() -> None:
    split = parse_scheme("cluster-n-class:groups=4,classes-group=3,classes=2,least=2").split(DATA, devices=40, seed=0)
    classes: dict[int, set[int]] = {}
    for who, local in split.devices.items():
        mine = set(local.train.y.tolist())
        assert len(mine) == 2
        classes.setdefault(split.groups[who], set()).update(mine)
    assert [len(found) for found in classes.values()] == [3] * 4
    assert set.union(*classes.values()) == set(range(10))


def test_devices_of_one_group_are_alike_and_groups_differ() -> None:
    big = numbered(60_000, 10_000)
    split = parse_scheme("cluster-dirichlet:groups=4,alpha-group=0.1,alpha=10").split(big, devices=40, seed=0)
    p = {who: mixture(local.train) for who, local in split.devices.items()}
    apart = {
        same: np.mean(
            [np.abs(p[a] - p[b]).sum() for a in p for b in p if (split.groups[a] == split.groups[b]) == same and a < b]
        )
        for same in (True, False)
    }
    assert apart[True] < 0.4
    assert apart[False] > 1.0
    assert Counter(split.groups.values()) == dict.fromkeys(range(4), 10)


@pytest.mark.parametrize(("groups", "turns"), [(2, [0, 2]), (4, [0, 1, 2, 3])])
def test_each_group_turns_its_images_by_its_own_angle(groups: int, turns: list[int]) -> None:
    data = images()
    split = parse_scheme(f"rotations:groups={groups}").split(data, devices=8, seed=0)
    upright = {image.tobytes() for image in data.dataset(data.train).x}
    for who, local in split.devices.items():
        back = np.rot90(local.train.x, -turns[split.groups[who]], axes=(2, 3))
        assert {np.ascontiguousarray(image).tobytes() for image in back} <= upright


def test_a_user_is_a_device_and_official_parts_stand_if_they_share_users() -> None:
    split = parse_scheme("by-user").split(ALONE, devices=0, seed=0)
    assert len(split.devices) == 40
    for local in split.devices.values():
        assert len({int(v) // 7 % 40 for v in (*local.train.x[:, 0], *held(local, "test").x[:, 0])}) == 1
    both = parse_scheme("by-user").split(DATA, devices=0, seed=0)  # the test part's users are among the training part's
    assert max(numbers(both, "train")) < 2_000 <= min(numbers(both, "test"))
    assert len(parse_scheme("by-user").split(DATA, devices=7, seed=0).devices) == 7


def test_users_of_one_domain_each_are_grouped_by_it() -> None:
    user = np.arange(2_000) // 50
    domain = (user % 3 == 0).astype(np.int64)
    data = DataSet(train=RawSamples(x=np.zeros((2_000, 1)), y=np.arange(2_000) % 5, user=user, domain=domain))
    split = parse_scheme("by-user").split(data, devices=0, seed=0)
    assert Counter(split.groups.values()) == {0: 26, 1: 14}


def test_the_published_codes_quirks_are_off_unless_asked_for_and_copy_devices_then() -> None:
    big = numbered(60_000, 10_000)
    quirky = parse_scheme("dirichlet:alpha=0.1,paper-quirks=1").split(big, devices=200, seed=0)
    held_ = [tuple(local.train.x[:, 0]) for local in quirky.devices.values()]
    assert len(set(held_)) < 200  # survivors stand in for the devices with at most five test samples
    assert all(len(local.test or ()) > 5 for local in quirky.devices.values())
    plain = parse_scheme("dirichlet:alpha=0.1").split(big, devices=200, seed=0)
    assert len({tuple(local.train.x[:, 0]) for local in plain.devices.values()}) == 200


def test_groups_with_the_published_codes_quirks_copy_devices_whole_and_may_lose_classes() -> None:
    data, spec = numbered(6_000, 1_000), "cluster-n-class:groups=3,classes-group=3,classes=2"
    split = parse_scheme(f"{spec},paper-quirks=1").split(data, devices=40, seed=2)
    groups: dict[tuple[int, ...], set[int]] = {}
    classes: dict[int, set[int]] = {}
    for who, local in split.devices.items():
        mine = set(local.train.y.tolist())
        assert len(mine) == 2
        assert set(held(local, "test").y.tolist()) == mine
        assert len(held(local, "test")) > 5
        classes.setdefault(split.groups[who], set()).update(mine)
        groups.setdefault(tuple(local.train.x.ravel().tolist()), set()).add(split.groups[who])
    assert len(groups) < 40  # somebody's samples are another's as well
    assert all(len(found) == 1 for found in groups.values())  # who is of the same group
    assert [len(found) for found in classes.values()] == [3] * 3
    assert len(set.union(*classes.values())) < 10  # three groups of three cannot hold ten classes
    with pytest.raises(ConfigError, match="3 groups with 3 classes each cannot hold all 10"):
        parse_scheme(spec).split(data, devices=40, seed=2)


SHARES = st.integers(0, 2**32).flatmap(
    lambda seed: st.tuples(st.just(seed), st.integers(1, 12), st.integers(1, 6), st.sampled_from([0.05, 1.0, 50.0]))
)


@given(SHARES, st.integers(0, 300))
def test_dealing_by_any_shares_is_disjoint_complete_and_of_the_foretold_sizes(
    drawn: tuple[int, int, int, float], n: int
) -> None:
    seed, devices, classes, alpha = drawn
    rng = np.random.default_rng(seed)
    p = share_matrices.dirichlet_shares(devices, classes, alpha, rng)
    labels = rng.integers(classes, size=n)
    dealt = share_matrices.deal_by_shares(labels, p, rng)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(n))
    expected = share_matrices.dealt_sizes(p, np.bincount(labels, minlength=classes))
    assert [len(part) for part in dealt] == expected.tolist()
    for c in range(classes):
        for i, part in enumerate(dealt):
            assert abs((labels[part] == c).sum() - p[i, c] * (labels == c).sum()) <= 1 + 1e-6


LAWS: dict[str, Callable[[F64], F64]] = {"linear": lambda i: i, "square": lambda i: i**2, "exponential": np.exp}


@pytest.mark.parametrize("law", LAWS)
@given(n=st.integers(500, 3_000), devices=st.integers(2, 12), least=st.integers(2, 20))
def test_sizes_follow_their_law_above_the_least(law: str, n: int, devices: int, least: int) -> None:
    alone = replace(numbered(n, 0), train_share=0.5)
    split = parse_scheme(f"size-skew:law={law},least={least}").split(alone, devices=devices, seed=n)
    sizes = np.array([len(local.train) + len(held(local, "test")) for local in split.devices.values()])
    weight = LAWS[law](np.arange(1.0, devices + 1))
    # Each end is rounded by half a sample, so a size by one at most.
    np.testing.assert_allclose(sizes, least + weight / weight.sum() * (n - least * devices), atol=1 + 1e-6)


def test_two_shards_hold_at_most_four_classes_and_most_devices_two() -> None:
    split = parse_scheme("shards").split(numbered(6_000, 1_000), devices=50, seed=0)
    classes = [len(set(local.train.y.tolist())) for local in split.devices.values()]
    assert max(classes) <= 2  # 100 shards of 60 samples: each lies within a class of 600
    for local in split.devices.values():
        assert set(held(local, "test").y.tolist()) == set(local.train.y.tolist())


def test_a_strict_continuous_cut_sorts_and_a_loose_one_mixes() -> None:
    y = np.random.default_rng(0).normal(size=(1_000, 1)).astype(np.float32)
    data = DataSet(train=RawSamples(x=y, y=y))

    def spread(strictness: float) -> float:
        split = parse_scheme(f"continuous:strictness={strictness}").split(data, devices=10, seed=1)
        return float(np.mean([np.ptp(local.train.y) for local in split.devices.values()]))

    lows = [
        local.train.y.min() for local in parse_scheme("continuous").split(data, devices=10, seed=1).devices.values()
    ]
    assert lows == sorted(lows)
    assert spread(1.0) < spread(0.8) < spread(0.0)


def test_a_device_of_several_users_has_all_samples_of_each() -> None:
    split = parse_scheme("by-user:per-device=3").split(ALONE, devices=5, seed=0)
    users = [{v // 7 % 40 for v in _all(local)} for local in split.devices.values()]
    assert [len(found) for found in users] == [3] * 5
    assert len(set.union(*users)) == 15
    everything = numbered(2_000, 0, users=40).train
    assert everything.user is not None
    for local, mine in zip(split.devices.values(), users, strict=True):
        assert len(_all(local)) == np.isin(everything.user, list(mine)).sum()


def test_a_user_with_fewer_samples_than_the_least_has_no_device() -> None:
    user = np.repeat(np.arange(6), [3, 5, 8, 9, 20, 30])
    part = RawSamples(x=np.zeros((len(user), 1)), y=np.arange(len(user)) % 2, user=user)
    for least, able in ((2, 6), (5, 5), (8, 4), (9, 3), (31, 0)):
        scheme = parse_scheme(f"by-user:least={least}")
        if able:
            assert len(scheme.split(DataSet(train=part), devices=0, seed=0).devices) == able
        with pytest.raises(ConfigError, match=f"only {able} users have {least} samples"):
            scheme.split(DataSet(train=part), devices=able + 1, seed=0)


def test_every_device_of_a_dirichlet_cut_has_the_least() -> None:
    for seed in range(3):
        split = parse_scheme("dirichlet:alpha=0.3,least=40").split(DATA, devices=12, seed=seed)
        assert min(len(local.train) for local in split.devices.values()) >= 40


def _all(local: DeviceData) -> list[int]:
    return [int(v) for v in (*local.train.x[:, 0], *held(local, "test").x[:, 0])]


@pytest.mark.parametrize("spec", [*TRUE_CUTS, *MIXTURES])
def test_a_scheme_is_described_by_the_text_that_makes_it(spec: str) -> None:
    made = parse_scheme(spec)
    assert parse_scheme(describe_scheme(made)) == made


def test_what_is_beyond_all_shares_is_dealt_to_nobody() -> None:
    labels = np.repeat([0, 1], 100)
    dealt = share_matrices.deal_by_shares(labels, np.array([[0.25, 0.0], [0.5, 0.0]]), np.random.default_rng(0))
    assert [np.bincount(labels[part], minlength=2).tolist() for part in dealt] == [[25, 0], [50, 0]]


@pytest.mark.parametrize(
    ("spec", "error", "said"),
    [
        ("size-skew:law=cubic", ConfigError, "linear, square, exponential"),
        ("size-skew:least=200", ConfigError, "fewer devices"),
        ("shards:each=0", ConfigError, "at least 1"),
        ("shards:each=500", ConfigError, "fewer devices"),
        ("continuous:strictness=2", ConfigError, "0 .random. to 1"),
        ("by-user:per-device=0", ConfigError, "at least one"),
        ("by-user:per-device=3", ConfigError, "use fewer devices"),
        ("dirichlets", UsageError, "did you mean 'dirichlet'"),
        ("dirichlet:alfa=1", UsageError, "did you mean 'alpha'"),
        ("dirichlet:alpha", UsageError, "no setting"),
        ("dirichlet:alpha=x", UsageError, "use a number"),
        ("iid:x=1", UsageError, "it has no settings"),
        ("n-class:classes=11", ConfigError, "use 1 to 10"),
        ("cluster-dirichlet:groups=21", ConfigError, "every group needs a device"),
        (
            "cluster-n-class:groups=3",
            ConfigError,
            "3 groups with 3 classes each cannot hold all 10",
        ),
        ("cluster-n-class:groups=20", ConfigError, "1 devices with 2 classes each cannot hold all 3"),
        ("rotations:groups=3", ConfigError, "quarters"),
        ("rotations:groups=4", ConfigError, "square images"),
        ("dirichlet:alpha=0.01,least=90", ConfigError, "larger alpha"),
        ("mixtures", ConfigError, "turns=2"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_a_hint(
    spec: str, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share_matrices, "MAX_DRAWS", 50)
    with pytest.raises(error, match=said):
        parse_scheme(spec).split(DATA, devices=20, seed=0)


def test_few_devices_with_few_classes_are_told_so_and_not_to_be_fewer() -> None:
    with pytest.raises(ConfigError, match="4 devices with 2 classes each cannot hold all 10") as refused:
        parse_scheme("n-class:classes=2").split(DATA, devices=4, seed=0)
    assert refused.value.hint == "use more devices, or more classes of each"


def test_an_override_replaces_a_key_and_is_refused_where_the_scheme_has_none() -> None:
    """Else a run would be told as one of two groups, and have none."""
    assert parse_scheme("rotations:groups=4", groups=2) == parse_scheme("rotations:groups=2")
    assert parse_scheme("iid", groups=None) == parse_scheme("iid")
    with pytest.raises(UsageError, match="the partition iid has no groups, and groups is 2"):
        parse_scheme("iid", groups=2)


def test_data_without_classes_or_users_say_so() -> None:
    targets = DataSet(train=RawSamples(x=np.zeros((50, 2)), y=np.zeros((50, 1), np.float32)))
    for spec in ("dirichlet", "by-user", "label-permutations", "shards"):
        with pytest.raises(ConfigError, match=r"no classes|does not say"):
            parse_scheme(spec).split(targets, devices=2, seed=0)
    assert len(parse_scheme("iid").split(targets, devices=2, seed=0).devices) == 2


def test_every_scheme_is_tried_here() -> None:
    tried = {spec.partition(":")[0] for spec in (*TRUE_CUTS, *MIXTURES)}
    assert tried == set(PARTITION_SCHEMES)
