"""`fc.choose_k`: the command's numbers, on the user's own fleet and module."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn

import fedcenters as fc
from edge_client.errors import ConfigError, UsageError
from emulator.choose_k import choose_k_json
from emulator.options import SimulateArgs


def test_the_numbers_are_those_of_the_command() -> None:
    asked = SimulateArgs(devices=4, groups=2, rounds=1, settings={"local-steps": 5})
    command = choose_k_json(asked, [1, 2], "accuracy", sample=4)
    fleet = fc.fleets.digits(devices=4, groups=2)
    counts = fc.choose_k(fc.FeSEM(local_steps=5), fleet=fleet, ks=[1, 2], rounds=1, sample=4)
    assert [row | {"clusters": k} for row, k in zip(command["trials"], [1, 2], strict=True)] == counts.found["trials"]
    assert (counts.clusters, counts.recommended) == (command["clusters"], command["recommended"])
    assert list(counts.table["clusters"]) == [1, 2]
    assert f"take {counts.clusters} center" in repr(counts)
    figure: Any = counts.plot()
    assert len(figure.axes) == len(counts.recommended)
    assert figure._repr_png_().startswith(b"\x89PNG")  # a notebook shows it
    assert "data:image/svg+xml" in counts._repr_html_()


def test_a_module_of_ones_own_is_tried() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    fleet = fc.fleets.digits(devices=4, groups=2)
    counts = fc.choose_k(fc.FeSEM(local_steps=5), fleet=fleet, ks=[2], rounds=1, model=module)
    assert counts.clusters == 2


def test_targets_that_are_no_classes_are_tried_by_the_other_criteria() -> None:
    """One center was recommended "by accuracy", of which there was none."""
    x = np.random.default_rng(0).normal(size=(80, 3))
    fleet = fc.fleet((x, x[:, 0]), by=np.arange(80) // 20, name="sensors")
    with pytest.raises(UsageError, match=r'(?s)targets of sensors are no classes.*by="silhouette" or by="distance"'):
        fc.choose_k(fc.FeSEM(local_steps=1), fleet=fleet, ks=[1, 2], rounds=1)
    counts = fc.choose_k(fc.FeSEM(local_steps=1), fleet=fleet, ks=[1, 2], rounds=1, by="distance")
    assert list(counts.recommended) == ["silhouette", "distance"]
    assert counts.found["devices"] == 4
    assert [row["accuracy"] for row in counts.found["trials"]] == [None, None]
    assert "data:image/svg+xml" in counts._repr_html_()


def test_a_loss_of_ones_own_is_tried() -> None:
    """Outputs that the usual loss cannot compare with the targets."""
    x = np.random.default_rng(0).normal(size=(80, 3))
    fleet = fc.fleet((x, x[:, :1]), by=np.arange(80) // 20)
    asked: dict[str, Any] = {"fleet": fleet, "model": lambda: nn.Linear(3, 2), "by": "distance", "rounds": 1, "ks": [2]}
    method = fc.FeSEM(local_steps=2)
    with pytest.raises(UsageError, match="device device-0 cannot train Linear: y has targets of shape"):
        fc.choose_k(method, **asked)
    with pytest.raises(UsageError, match="loss is 3"):
        fc.choose_k(method, loss=3, **asked)  # type: ignore[arg-type]
    counts = fc.choose_k(method, loss=lambda out, y: (out[:, 0] - y[:, 0]) ** 2 * out[:, 1].exp() - out[:, 1], **asked)
    assert counts.clusters == 2


def test_trials_in_which_no_training_counts_say_why() -> None:
    """They ended in numpy's ValueError."""
    x = 1e15 * np.random.default_rng(0).normal(size=(80, 3))
    fleet = fc.fleet((x, x[:, :1]), by=np.arange(80) // 20)
    with pytest.raises(UsageError, match=r"(?s)no device's training counted: not_finite.*lower `?learning-rate"):
        fc.choose_k(fc.FeSEM(local_steps=20), fleet=fleet, ks=[2], rounds=1, by="distance")
    later = fc.FeMAM(local_steps=1, level_rounds=1)  # its groups come after a level
    with pytest.raises(UsageError, match=r"(?s)FeMAM.* has given no device a center by round 1.*more `rounds`"):
        fc.choose_k(later, fleet=fc.fleets.digits(devices=4), ks=[2], rounds=1)
    assert fc.choose_k(later, fleet=fc.fleets.digits(devices=4), ks=[2], rounds=2).clusters == 2


def test_a_method_without_clusters_is_refused() -> None:
    with pytest.raises(UsageError, match=r"FedAvg.* has no setting `clusters`"):
        fc.choose_k(fc.FedAvg(), fleet=fc.fleets.digits(devices=4))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ks": 3}, r"ks is 3.*ks=\[2, 4\]"),
        ({"rounds": 0}, "rounds is 0.*use at least 1"),
        ({"fleet": 3}, "fleet is int"),
        ({"method": fc.FeSEM}, r"FeSEM is a class.*write FeSEM\(\)"),
    ],
)
def test_a_wrong_argument_is_told_by_its_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises((UsageError, ConfigError), match=f"(?s){said}"):
        fc.choose_k(**{"method": fc.FeSEM(), "fleet": fc.fleets.digits(devices=3), **given})


@pytest.mark.parametrize("secure", ["off", "updates"])
def test_a_method_with_noise_is_tried(secure: str) -> None:
    """The trials had no key for the noise, and named a coordinator's."""
    server = fc.ServerOptions(privacy_noise=0.5, privacy_clip=5.0, secure=secure, least_members=2)
    fleet = fc.fleets.digits(devices=6, groups=2)
    counts = fc.choose_k(fc.FeSEM(local_steps=2, server=server), fleet=fleet, ks=[1, 2], rounds=1)
    assert list(counts.table["clusters"]) == [1, 2]


@pytest.mark.parametrize("sample", [2.5, None, "4"])
def test_a_sample_that_is_no_number_of_devices_is_named(sample: object) -> None:
    with pytest.raises(ConfigError, match="sample is") as refused:
        fc.choose_k(fc.FeSEM(), fleet=fc.fleets.digits(devices=4), ks=[1], sample=sample)  # type: ignore[arg-type]
    assert refused.value.hint == "use a whole number"
