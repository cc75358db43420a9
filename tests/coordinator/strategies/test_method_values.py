"""Methods in Python: values with a short repr, docstrings with everything, errors that say what to do."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch

import fedcenters as fc
from coordinator.strategies.base import State
from coordinator.strategies.documentation import COSTS, ONE, setting_words
from coordinator.strategies.registry import METHODS, make_method, method_settings
from edge_client.errors import ConfigError
from tests.docs.test_methods_page import COSTS as PAGE

NAMES = sorted(METHODS)


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_has_the_settings_of_the_command_line_with_their_defaults(name: str) -> None:
    kind, method = METHODS[name], make_method(name)
    told = dict(re.findall(r"^    (\w+): .*?\. Default: (.*)\.$", kind.__doc__ or "", flags=re.MULTILINE))
    asked = {key.replace("-", "_"): repr(value) for key, value in method_settings(method).items()}
    options = {f.name for f in fields(fc.ServerOptions)}
    assert {k: v for k, v in told.items() if k != "server"} == {k: v for k, v in asked.items() if k not in options}
    assert ("server" in told) == bool(asked.keys() & options)


def test_the_docstring_of_the_server_options_has_each_with_its_default() -> None:
    told = dict(re.findall(r"^    (\w+): .+\. Default: (.*)\.$", fc.ServerOptions.__doc__ or "", flags=re.MULTILINE))
    settings = [f for f in fields(fc.ServerOptions) if f.name != "secret"]
    assert told == {f.name: repr(f.default) for f in settings}


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_names_the_paper_and_the_costs_that_the_page_has(name: str) -> None:
    text, cost, row = METHODS[name].__doc__ or "", COSTS.get(name, ONE), PAGE[name]
    assert re.search(r"\b20[12]\d\b", text) or name == "nonfed"  # no paper has it for its own
    page = [cell.replace("`", "").replace("local-rounds", "local_rounds") for cell in row[1:4]]
    assert [cost.exchanges, cost.down, cost.up] == page
    assert f"Models down: {cost.down}. Models up: {cost.up}" in text
    assert f"fc.{METHODS[name].__name__}()" in text


@pytest.mark.parametrize("kind", [fc.ServerOptions, *METHODS.values()], ids=lambda kind: kind.__name__)
def test_the_words_of_a_setting_name_the_values_that_its_class_takes_and_no_others(kind: type) -> None:
    for field in (f for f in fields(kind) if f.metadata.get("setting", True)):
        assert setting_words(kind, field.name)
        if isinstance(field.default, str):
            said = {value for other in (kind, *METHODS.values()) for value in quoted(other, field.name)}
            assert quoted(kind, field.name) == {value for value in said if is_taken(kind, field.name, value)}


def test_the_reduce_of_a_method_is_said_as_it_takes_it() -> None:
    for name in (name for name in NAMES if "reduce" in method_settings(make_method(name))):
        rules = quoted(fc.ServerOptions, "reduce")
        assert quoted(METHODS[name], "reduce") == {rule for rule in rules if makes(name, rule)}


def makes(name: str, reduce: str) -> bool:
    """Whether the method takes this reduce."""
    try:
        make_method(name, reduce=reduce)
    except ConfigError:
        return False
    return True


def quoted(kind: type, setting: str) -> set[str]:
    """The values that the words of a setting have in quotes."""
    return set(re.findall(r'"([^"]+)"', setting_words(kind, setting)))


def is_taken(kind: type, setting: str, value: str) -> bool:
    """Whether a class takes this value of a setting, beside the one of another setting that it needs."""
    beside = {"metric": "l2"} if value == "ward" and "metric" in {f.name for f in fields(kind)} else {}
    beside |= {"secure": "updates"} if setting == "secure_start" else {}
    try:
        kind(**{setting: value, **beside})
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_the_repr_can_be_typed_again_and_shows_what_is_not_the_default(name: str) -> None:
    method = replace(make_method(name), learning_rate=0.03)  # type: ignore[type-var]
    assert "learning_rate=0.03" in repr(method)
    assert "momentum" not in repr(method)
    assert eval(f"fc.{method!r}") == method  # noqa: S307 - our own text
    assert pickle.loads(pickle.dumps(method)) == method  # noqa: S301 - our own bytes


def test_the_number_of_centers_may_be_given_by_position() -> None:
    assert repr(fc.FeSEM(4)) == "FeSEM(4)"
    assert [m.clusters for m in (fc.FeSEM(4), fc.IFCA(2), fc.WeCFL(5), fc.FedGroup(6), fc.FedEM(7))] == [4, 2, 5, 6, 7]
    assert fc.FedAvgPlus(2).runs == 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"cluster": 3}, "FeSEM has no setting 'cluster'.*did you mean 'clusters'"),
        ({"reduce": "median"}, r"write server=fc.ServerOptions\(reduce=...\)"),
        (
            {"server": {"reduce": "median"}},
            r"server of FeSEM is dict.*server=fc.ServerOptions\(reduce='median'\)",
        ),
    ],
)
def test_a_wrong_setting_says_what_to_write(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(TypeError, match=f"(?s){said}"):
        fc.FeSEM(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: fc.FeSEM("three"), "clusters is 'three'.*use a whole number"),  # type: ignore[arg-type]
        (lambda: fc.FeSEM(clusters=2.5), "clusters is 2.5.*use a whole number"),  # type: ignore[arg-type]
        (lambda: fc.FeSEM(clusters=True), "clusters is True.*use a whole number"),
        (lambda: fc.FedAvg(learning_rate=None), "learning-rate is None.*use a number"),  # type: ignore[arg-type]
        (lambda: fc.ServerOptions(reduce=3), "reduce is 3.*use a word"),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_another_kind_is_told_as_such(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        make()


@dataclass(frozen=True, kw_only=True, repr=False)
class FewSteps(fc.FedAvg):
    """A method of the user with another default, and a setting of its own."""

    local_steps: int = 2
    share: float = 5.0


def test_another_default_in_a_subclass_keeps_the_words_and_the_limits_of_the_setting() -> None:
    assert FewSteps().local_steps == 2
    assert setting_words(FewSteps, "local_steps") == setting_words(fc.FedAvg, "local_steps")
    assert not setting_words(FewSteps, "share")
    with pytest.raises(ConfigError, match="local-steps is 0"):
        FewSteps(local_steps=0)


def test_a_value_too_many_without_a_name_is_told_with_a_name() -> None:
    with pytest.raises(TypeError, match=r"(?s)FedAvg\(3\) has a value without a name.*write local_steps="):
        fc.FedAvg(3)  # type: ignore[call-arg]


class Bare(fc.FedAvg):
    """A method of the user, without `@dataclass` above it."""

    share: float = 0.5


class Made(fc.FedAvg):
    def __init__(self, share: float) -> None:
        self.share = share


@pytest.mark.parametrize(
    "make",
    [
        lambda: Bare(share=0.3),  # type: ignore[call-arg]
        lambda: Made(0.3),
        lambda: Made(share=0.3),
    ],
)
def test_a_setting_of_a_class_that_is_no_dataclass_is_told_to_need_one(make: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"(?s)write @dataclass\(frozen=True, kw_only=True, repr=False\) above class"):
        make()


class UntypedDefault(fc.FedAvg):
    local_steps = 5


@dataclass(frozen=True, kw_only=True, repr=False)
class UntypedInDataclass(fc.FedAvg):
    local_steps = 5


class UndecoratedDefault(fc.FedAvg):
    local_steps: int = 5


@pytest.mark.parametrize("kind", [UntypedDefault, UntypedInDataclass, UndecoratedDefault])
def test_a_default_that_python_does_not_take_for_one_is_told_how_to_write_it(kind: type[fc.FedAvg]) -> None:
    """It trained the 20 steps of the class above, without a word."""
    with pytest.raises(
        ConfigError, match=r"(?s)local_steps = 5 in \w+ has no effect: 20 stays.*local_steps: int = 5, and"
    ):
        kind()


NO_MASK = torch.ones(2)


@dataclass(frozen=True, kw_only=True, repr=False, slots=True)
class DefaultsThatDifferFromThemselves(fc.FedAvg):
    threshold: float = math.nan
    mask: torch.Tensor = NO_MASK
    local_steps: int = 5


def test_defaults_that_are_no_number_or_lie_in_slots_are_taken() -> None:
    """The look for defaults without a type refused them: NaN is not equal to itself, and two tensors have no `==`."""
    assert repr(DefaultsThatDifferFromThemselves()).startswith("DefaultsThatDifferFromThemselves(")
    assert DefaultsThatDifferFromThemselves().local_steps == 5


def test_numbers_of_numpy_are_numbers() -> None:
    method = fc.FeSEM(np.int64(4), learning_rate=np.float32(0.5))  # type: ignore[arg-type]
    assert (method.clusters, method.learning_rate) == (4, 0.5)


def test_states_are_equal_where_all_their_bits_are() -> None:
    """A comparison ended in "the truth value of an array is ambiguous"."""

    def state(center: float, who: int = 1, **extra: float) -> State:
        arrays = {name: np.full(3, value) for name, value in extra.items()}
        return State(centers=np.full((2, 4), center), assignment={"device-00": who}, extra=arrays)

    one = state(0.5, velocity=np.nan)
    assert one == state(0.5, velocity=np.nan)
    others = [state(0.5), state(0.5, velocity=0.0), state(0.5, 0, velocity=np.nan), state(1.0, velocity=np.nan), 0.5]
    assert not any(one == other for other in others)
    assert one != replace(one, centers=one.centers.astype(np.float32))
