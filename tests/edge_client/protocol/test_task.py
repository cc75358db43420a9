"""A task, a schema and an optimiser that exist are valid: each limit is held, and the least and the greatest pass."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from edge_client.protocol.task import Fit, Flat, Optimiser, OwnModel, Probe, Reply, Schema, TensorSpec

FIT: dict[str, Any] = {"start": np.zeros(4), "steps": 1, "lr": 0.1, "batch": 1, "seed": 0}
PROBE: dict[str, Any] = {"models": [np.zeros(4)], "want": frozenset({"loss"}), "batch": 1, "seed": 0}
TWO = [np.zeros(4), OwnModel()]


@pytest.mark.parametrize(
    "changed",
    [
        {"steps": 1_000_000},
        {"batch": 65_536},
        {"seed": 2**53 - 1},
        {"lr": 0.0, "momentum": 0.0},
        {"mu": 0.5, "anchor": np.ones(4), "linear": np.ones(4), "init": np.ones(4)},
        {"start": "own", "init": np.ones(4)},
        {"rows": "posterior:99"},
        {"rows": "all-but:999999999"},
        {"slot": "x" * 32, "buffers": "own"},
        {"optimiser": Optimiser(name="sgd", momentum=0.9)},
    ],
)
def test_a_fit_at_its_limits_is_one(changed: dict[str, Any]) -> None:
    assert {name: vars(Fit(**FIT | changed))[name] for name in changed} == changed


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"steps": 0}, "steps must be 1"),
        ({"steps": 1_000_001}, "steps must be 1"),
        ({"batch": 0}, "batch must be 1"),
        ({"batch": 65_537}, "batch must be 1"),
        ({"seed": -1}, "seed must be 0"),
        ({"seed": 2**53}, "seed must be 0"),
        ({"lr": -0.1}, "lr must be finite"),
        ({"lr": math.inf}, "lr must be finite"),
        ({"momentum": math.nan}, "momentum must be finite"),
        ({"mu": -0.1}, "mu must be finite"),
        ({"mu": 0.1}, "mu > 0 needs an anchor"),
        ({"momentum": 0.1, "optimiser": Optimiser(name="adam")}, "is the optimiser's"),
        ({"slot": ""}, "slot must have the form"),
        ({"slot": "x" * 33}, "slot must have the form"),
        ({"rows": "posterior:100"}, "rows must have the form"),
        ({"rows": "all-but:0"}, "rows must have the form"),
        ({"buffers": "batch"}, "buffers must be one of"),
        ({"linear": np.ones(5)}, "must have one shape"),
        ({"start": "own", "init": np.ones(4), "anchor": np.ones(5)}, "must have one shape"),
        ({"start": "mine"}, r"start must be one of \['own'\], got 'mine'"),
        ({"start": None}, "start must be a model or 'own'"),
        ({"start": [0.0] * 4}, "must be arrays of floating point numbers, got list"),
        ({"start": np.zeros(4, np.int64)}, "must be arrays of floating point numbers, got int64"),
        ({"linear": 3}, "must be arrays of floating point numbers, got int"),
    ],
)
def test_a_fit_beyond_a_limit_is_none(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Fit(**FIT | changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"models": [np.zeros(4)] * 16},
        {"models": [], "want": frozenset({"labels"})},
        {"want": frozenset({"loss", "votes", "confusion"})},
        {"want": frozenset({"grad"})},
        {"split": "test"},
        {"buffers": "batch"},
        {"models": TWO, "prior": [0.5, 0.5], "label_totals": [[1.0] * 512, None]},
        {"models": TWO, "want": frozenset({"loss"}), "least": True},
    ],
)
def test_a_probe_at_its_limits_is_one(changed: dict[str, Any]) -> None:
    assert {name: vars(Probe(**PROBE | changed))[name] for name in changed} == changed


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"models": []}, "carries 1 to 16 models"),
        ({"models": [np.zeros(4)] * 17}, "carries 1 to 16 models"),
        ({"want": frozenset()}, "want must be some of"),
        ({"want": frozenset({"weights"})}, "want must be some of"),
        ({"want": frozenset({"loss", "grad"})}, "asked for alone"),
        ({"want": frozenset({"loss", "labels"})}, "asked for alone"),
        ({"split": "all"}, "split must be"),
        ({"buffers": "mine"}, "buffers must be one of"),
        ({"batch": 0}, "batch must be 1"),
        ({"batch": 65_537}, "batch must be 1"),
        ({"seed": -1}, "seed must be 0"),
        ({"seed": 2**53}, "seed must be 0"),
        ({"models": ["own"]}, "models must be arrays of floating point numbers, got str"),
        ({"models": [OwnModel(init=np.zeros(4, bool))]}, "models must be arrays of floating point numbers, got bool"),
        ({"models": TWO, "prior": [1.0]}, "prior needs one weight per model"),
        ({"models": TWO, "label_totals": [[1.0]]}, "label_totals needs one entry per model"),
        ({"models": TWO, "label_totals": [[1.0] * 512, [1.0]]}, "more than 512 numbers"),
        ({"models": TWO, "want": frozenset({"loss", "votes"}), "least": True}, "least is asked of the losses alone"),
    ],
)
def test_a_probe_beyond_a_limit_is_none(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Probe(**PROBE | changed)


@pytest.mark.parametrize(
    ("changed", "fits"),
    [
        ({"momentum": 1.0, "nesterov": True, "weight_decay": 1e300, "clip_norm": 1e300}, True),
        ({"momentum": 1.0001}, False),
        ({"momentum": -1e-9}, False),
        ({"nesterov": True}, False),
        ({"weight_decay": -1e-9}, False),
        ({"clip_norm": math.inf}, False),
        ({"name": "adam", "beta1": 0.0, "beta2": 0.999999, "eps": 1.0}, True),
        ({"name": "adamw", "eps": 1e-16}, True),
        ({"name": "adam", "eps": 0.9e-16}, False),
        ({"name": "adam", "eps": 1.0001}, False),
        ({"name": "adam", "beta1": 0.9999991}, False),
        ({"name": "adam", "beta2": 1.0}, False),
        ({"name": "adam", "momentum": 0.5}, False),
        ({"name": "rmsprop"}, False),
    ],
)
def test_an_optimiser_has_options_in_their_ranges(changed: dict[str, Any], fits: bool) -> None:  # noqa: FBT001 - a row
    if fits:
        told = Optimiser(**{"name": "sgd"} | changed).to_json()
        assert {name: told[name] for name in changed} == changed
    else:
        with pytest.raises(ValueError, match=r"must be|options of sgd|nesterov needs"):
            Optimiser(**{"name": "sgd"} | changed)


def test_what_a_fit_and_an_optimiser_do_not_name_is_plain_sgd_of_the_whole_update() -> None:
    fit = Fit(**FIT)
    assert (fit.mu, fit.momentum, fit.rows, fit.slot, fit.upload, fit.buffers) == (0, 0, "ones", "main", True, "sent")
    none = {"weight_decay": 0.0, "clip_norm": 0.0}
    assert Optimiser(name="sgd").to_json() == {"name": "sgd", "momentum": 0.0, "nesterov": False} | none
    adam = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8} | none
    assert Optimiser(name="adam").to_json() == {"name": "adam"} | adam


def test_a_schema_has_its_parameters_first_and_each_name_once() -> None:
    weight, mean = TensorSpec(name="w", role="p", shape=(2, 3)), TensorSpec(name="m", role="b", shape=())
    schema = Schema((weight, mean), ("w",))
    assert (schema.n_params, schema.size) == (6, 7)
    assert schema.slices == {"w": slice(0, 6), "m": slice(6, 7)}
    parts = schema.split(np.arange(7.0))
    assert parts["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert schema.join(parts).tolist() == list(range(7))
    for tensors, classifier in [((), ()), ((weight, weight), ()), ((mean, weight), ()), ((weight, mean), ("m",))]:
        with pytest.raises(ValueError, match=r"a schema needs|come before|classifier names"):
            Schema(tensors, classifier)
    with pytest.raises(ValueError, match="does not fit a schema of 7"):
        schema.split(np.zeros(6))
    with pytest.raises(ValueError, match="names differ"):
        schema.join({"w": np.zeros((2, 3))})
    with pytest.raises(ValueError, match="shapes differ"):
        schema.join({"w": np.zeros(6), "m": np.zeros(())})


@pytest.mark.parametrize(
    ("name", "role", "shape"),
    [("", "p", ()), ("a#s", "p", ()), ("a", "x", ()), ("a", "p", (0,)), ("a", "p", (1,) * 9)],
)
def test_a_tensor_has_a_name_a_role_and_at_most_eight_dimensions(name: str, role: Any, shape: tuple[int, ...]) -> None:  # noqa: ANN401
    assert TensorSpec(name="a", role="b", shape=(1,) * 8).size == 1
    with pytest.raises(ValueError, match=r"tensor name|role of|shape of"):
        TensorSpec(name=name, role=role, shape=shape)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"want": "loss"}, "want must be a set, as {'loss'}, got 'loss'"),
        ({"want": ["loss"]}, "want must be a set"),
        ({"seed": np.random.default_rng(0)}, "seed must be a whole number, got Generator"),
        ({"seed": None}, "seed must be a whole number, got NoneType"),
        ({"seed": 1.5}, "seed must be a whole number, got float"),
    ],
)
def test_a_probe_of_another_kind_of_thing_is_told_what_to_write(changed: dict[str, Any], says: str) -> None:
    """A method's author read that `<=` is not supported between instances of 'str' and 'frozenset'."""
    with pytest.raises(TypeError, match=says):
        Probe(**PROBE | changed)


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_tasks_and_replies_are_equal_where_all_their_bits_are(value: float) -> None:
    """`==` ended in numpy's words: the truth value of an array is ambiguous."""

    def made(value: float, kind: type = np.float32) -> list[Any]:
        model: Flat = np.array([value, 1], dtype=kind)
        own = OwnModel(slot="mine", init=model)
        fit: dict[str, Any] = {"steps": 1, "lr": 0.1, "batch": 4, "seed": 0}
        probe = Probe(models=[model, own], want=frozenset({"loss"}), prior=[0.5, 0.5], batch=4, seed=0)
        return [Fit(start=model, anchor=model, mu=1.0, **fit), probe, own, Reply(n=3, update=model)]

    first, again = made(value), made(value)
    assert first == again
    for others in (made(2.0), made(value, np.float64)):
        assert not any(one == other for one, other in zip(first, others, strict=True))
    assert [one == other for one in first for other in again].count(True) == len(first)
