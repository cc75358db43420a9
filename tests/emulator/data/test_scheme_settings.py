"""No number that a partition's setting may hold ends in anything but a fleet, or a message with a hint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from edge_client.errors import ConfigError, UsageError
from emulator.api.data.partitions import as_scheme
from emulator.data import share_matrices
from emulator.data.drawn_mixes import label_mixes
from emulator.data.fleet_split import FleetData
from emulator.data.loaders.samples import DataSet, RawSamples
from emulator.data.partition_schemes import PARTITION_SCHEMES, parse_scheme

NUMBERS = ("0", "1.5", "11", "1000", "1e300", "1" + "0" * 30, "1" + "0" * 400)
NO_SETTINGS = ("-1", "-7", "nan", "inf", "-inf", "x", "")
RNG = np.random.Generator(np.random.PCG64(0))


def samples(n: int) -> RawSamples:
    x = RNG.random((n, 1, 4, 4)).astype(np.float32)
    return RawSamples(x=x, y=np.arange(n) % 10, user=np.arange(n) % 12, domain=np.arange(n) % 2)


DATA = DataSet(train=samples(600), test=samples(240))


def said_of(cut: Callable[[], FleetData]) -> str:
    """The hint of a refusal, or that a fleet was made; empty for a device without samples, and for no hint."""
    try:
        fleet = cut()
    except (ConfigError, UsageError) as wrong:
        return wrong.hint
    return "a fleet" if fleet.devices and all(len(local.train) for local in fleet.devices.values()) else ""


def settings() -> list[tuple[str, str]]:
    schemes: dict[str, Any] = dict(PARTITION_SCHEMES)
    return [(name, f.name) for name, scheme in schemes.items() for f in fields(scheme) if f.type != "str"]


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_matrices, "MAX_DRAWS", 20)


@pytest.mark.parametrize(("name", "key"), settings())
def test_any_number_makes_a_fleet_or_a_message_with_a_hint(name: str, key: str) -> None:
    for text in (*NUMBERS, *NO_SETTINGS):
        for devices in (20, 1, 0):
            spec = f"{name}:{key.replace('_', '-')}={text}"
            said = said_of(lambda spec=spec, d=devices: parse_scheme(spec).split(DATA, devices=d, seed=0))  # type: ignore[misc]
            assert said, (spec, devices)
            assert said != "a fleet" or text in NUMBERS, (spec, devices)


@pytest.mark.parametrize("kind", sorted(PARTITION_SCHEMES))
def test_a_value_of_python_makes_a_fleet_or_a_message_with_a_hint(kind: str) -> None:
    scheme: Any = PARTITION_SCHEMES[kind]
    for f in fields(scheme):
        for value in (0, -1, 1.5, float("nan"), float("inf"), 10**400, "2", None, True, np.float32(-1)):

            def cut(given: Any = {f.name: value}) -> FleetData:  # noqa: ANN401, B006 - bound in the loop
                return as_scheme(scheme(**given)).split(DATA, devices=20, seed=0)

            assert said_of(cut), (kind, f.name, value)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("dirichlet:alpha=-1", "alpha is -1.0\n\nhint: use a number above 0"),
        ("dirichlet:alpha=0", "alpha is 0.0\n\nhint: use a number above 0"),
        ("dirichlet:alpha=nan", "alpha is nan\n\nhint: use a number above 0"),
        ("dirichlet:alpha=inf", "alpha is inf\n\nhint: use a number above 0, at most 1e\\+100"),
        ("shifts:turns=5", "turns is 5\n\nhint: use a number from 1 to 4"),
        ("cluster-dirichlet:alpha-group=-1", "alpha-group is -1.0\n\nhint: use a number above 0"),
        ("n-class:classes=1.5", "classes of partition 'n-class' is '1.5'\n\nhint: use a whole number"),
        ("n-class:paper-quirks=2", "paper-quirks of partition 'n-class' is '2'\n\nhint: use 0 or 1"),
        ("n-class:least=31", "20 devices of 31 samples each, and the data have 600\n\nhint: use fewer devices"),
        ("label-permutations:new=-1", "new is -1\n\nhint: use a number at least 0"),
        ("mixtures:most=50", "most is 50\n\nhint: use a number from 100"),
    ],
)
def test_a_wrong_number_is_told_with_what_may_stand_there(spec: str, told: str) -> None:
    with pytest.raises((ConfigError, UsageError), match=told):
        parse_scheme(spec).split(DATA, devices=20, seed=0)


@pytest.mark.parametrize("kind", ["iid", "mixtures"])
def test_no_devices_are_not_told_to_be_fewer(kind: str) -> None:
    with pytest.raises(ConfigError, match="0 devices\n\nhint: use at least one"):
        parse_scheme(kind).split(DATA, devices=0, seed=0)


def test_shifts_with_the_quirks_of_a_paper_still_number_the_classes_by_group() -> None:
    """Its groups were told, and all devices were alike."""
    split = parse_scheme("shifts:groups=2,turns=1,paper-quirks=1").split(DATA, devices=6, seed=0)
    given = dict(zip(map(bytes, DATA.train.x), DATA.train.y.tolist(), strict=True))
    names = [
        {(given[bytes(x)], int(y)) for x, y in zip(d.train.x, d.train.y, strict=True)} for d in split.devices.values()
    ]
    each = [
        set[tuple[int, int]]().union(*(n for n, g in zip(names, split.groups.values(), strict=True) if g == k))
        for k in (0, 1)
    ]
    assert all(len(written) == 10 for written in each)
    assert not each[0] & each[1]


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_a_mix_of_labels_needs_a_positive_number(alpha: float) -> None:
    with pytest.raises(UsageError, match="a positive alpha"):
        label_mixes(DATA.train.x, DATA.train.y, devices=2, train=2, test=1, alpha=alpha)
