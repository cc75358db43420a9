from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.errors import ConfigError
from emulator.data.loaders.samples import DataSet, RawSamples
from emulator.data.loaders.tables import regression
from emulator.data.mixtures import SHARE_KINDS, mixture_shares
from emulator.data.partition_schemes import parse_scheme
from emulator.simulation.device_profiles import DEVICE_PROFILES, draw_profiles
from tests.support.raw_data_files import images


def two_domains() -> DataSet:
    """Domain s holds the feature s, in five classes of different sizes."""
    domain = np.arange(2_000) % 2
    y = np.minimum(np.random.default_rng(0).geometric(0.5, size=2_000) - 1, 4)
    part = RawSamples(x=domain[:, None].astype(np.float32), y=y, domain=domain)
    return DataSet(train=part, test=part)


@given(st.sampled_from(SHARE_KINDS), st.integers(2, 60), st.integers(0, 2**32))
def test_shares_are_not_negative_and_sum_to_one(kind: str, devices: int, seed: int) -> None:
    for domains in (2, 5):
        if kind == "linear" and domains > 2:
            continue
        u = mixture_shares(kind, devices, domains, np.random.default_rng(seed))
        assert u.shape == (devices, domains)
        assert (u >= 0).all()
        np.testing.assert_allclose(u.sum(axis=1), 1.0)


@pytest.mark.parametrize(
    ("kind", "first"), [("10-90", [0.9] * 5 + [0.1] * 5), ("30-70", [0.7] * 5 + [0.3] * 5), ("linear", None)]
)
def test_devices_hold_the_shares_that_the_paper_names(kind: str, first: list[float] | None) -> None:
    split = parse_scheme(f"mixtures:shares={kind}").split(two_domains(), devices=10, seed=0)
    expected = first or [(k + 0.5) / 10 for k in range(10)]
    for (who, local), share in zip(sorted(split.devices.items()), expected, strict=True):
        assert 100 <= len(local.train) <= 200
        # Rounded to whole samples.
        assert abs((local.train.x == 0).mean() - share) <= 1 / len(local.train)
        assert split.groups[who] == (0 if share > 0.5 else 1)


@pytest.mark.parametrize("seed", range(3))
def test_who_holds_much_is_neither_fast_nor_slow_for_it(seed: int) -> None:
    split = parse_scheme("mixtures:shares=10-90").split(two_domains(), devices=60, seed=seed)
    kinds = draw_profiles(split.devices, seed)
    by_size = sorted(split.devices, key=lambda who: len(split.devices[who].train))
    for third in (by_size[:20], by_size[20:40], by_size[40:]):
        # Some kind is missing among twenty independent draws of three with a probability of 3 (2/3)^20 = 0.001.
        assert {kinds[who] for who in third} == set(DEVICE_PROFILES)


def test_classes_are_drawn_alike_however_rare_and_hold_outs_are_pure() -> None:
    split = parse_scheme("mixtures:shares=30-70,least=2000,most=2000").split(two_domains(), devices=4, seed=0)
    for local in split.devices.values():
        counts = np.bincount(local.train.y, minlength=5)
        assert (np.abs(counts - 400) < 5 * np.sqrt(2_000 * 0.2 * 0.8)).all()  # five deviations of a binomial
    assert [set(held.x[:, 0].tolist()) for held in split.holdouts.values()] == [{0.0}, {1.0}]


def test_quarter_turns_make_distributions_of_images() -> None:
    data = images(200)
    split = parse_scheme("mixtures:shares=10-90,turns=2").split(data, devices=6, seed=0)
    upright = {image.tobytes() for image in data.dataset(data.train).x}
    main = {}
    for who, local in split.devices.items():
        main[who] = np.mean([image.tobytes() in upright for image in local.train.x])
    assert all((share > 0.85) == (split.groups[who] == 0) for who, share in main.items())
    assert list(split.holdouts) == ["domain 0", "domain 1"]


def test_regressions_keep_their_targets_and_their_test_pools() -> None:
    split = parse_scheme("mixtures:shares=random").split(regression(2, seed=0), devices=5, seed=0)
    assert [held.y.shape for held in split.holdouts.values()] == [(1_000, 1)] * 2
    assert all(local.train.y.shape == (len(local.train), 1) for local in split.devices.values())


@pytest.mark.parametrize("wrong", ["shares=20-80", "least=9,most=8", "turns=5", "shares=linear,turns=2"])
def test_a_mixture_that_cannot_be_made_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError):
        parse_scheme(f"mixtures:{wrong}").split(two_domains(), devices=4, seed=0)


def test_a_number_of_a_domain_that_no_sample_has_is_none() -> None:
    whole = two_domains()
    part = replace(whole.train, domain=2 * np.arange(2_000) % 4)
    split, usual = (
        parse_scheme("mixtures").split(data, devices=10, seed=0) for data in (DataSet(train=part, test=part), whole)
    )
    assert list(split.holdouts) == ["domain 0", "domain 1"]
    assert dict(split.groups) == dict(usual.groups)


def test_a_domain_that_only_one_part_has_is_named() -> None:
    """Groups of training samples beside a test part without any ended with an error of zip."""
    whole = two_domains()
    bare = RawSamples(x=whole.train.x, y=whole.train.y)
    with pytest.raises(ConfigError, match="test samples of 1 domains, training samples of 2"):
        parse_scheme("mixtures").split(DataSet(train=whole.train, test=bare), devices=10, seed=0)
