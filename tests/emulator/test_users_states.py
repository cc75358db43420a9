"""The state that a user's own `round` returns: what numpy and torch give is taken, and what is no state is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import fedcenters as fc
from coordinator.strategies.base import Fleet, Round, State
from edge_client.errors import UsageError
from edge_client.protocol.task import Schema
from tests.support.has_option import HasDefault, HasOption

Change = Callable[[State, list[str]], dict[str, Any]]
ONE = [1]
FLEET = fc.fleets.digits(devices=3)


@dataclass(frozen=True, kw_only=True, repr=False)
class Returns(fc.LocalSgd):
    """One center, and what a test wants to have in the state."""

    change: ClassVar[Change]

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        replies = yield {who: self.fit(start=state.centers[0], seed=0) for who in sorted(fleet)}
        mean = np.mean([np.asarray(reply.update) for reply in replies.values()], axis=0)
        return replace(replace(state, centers=mean[None]), **type(self).change(state, sorted(fleet)))


def played(change: Change, **options: Any) -> fc.Result:  # noqa: ANN401 - those of `simulate`
    Returns.change = staticmethod(change)
    return fc.simulate(Returns(local_steps=1), fleet=FLEET, progress=False, **{"rounds": 1, **options})


@pytest.mark.parametrize("zero", [np.int64(0), np.array(0), torch.tensor(0), np.argmin([0.1, 0.7])])
def test_the_center_of_a_device_may_be_what_argmin_gives(zero: object) -> None:
    """The run ended after its first round with a TypeError of json."""
    result = played(lambda _, fleet: {"assignment": dict.fromkeys(fleet, zero)})
    assert [type(center) for center in result.run.state.assignment.values()] == [int, int, int]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _, fleet: {"assignment": [0] * len(fleet)}, "Returns.round returned an assignment of list"),
        (lambda _, fleet: {"assignment": np.zeros(len(fleet), int)}, "Returns.round returned an assignment of ndarray"),
        (lambda _, fleet: {"assignment": dict.fromkeys(fleet, 0.0)}, "Returns.round assigns device-00 to 0.0"),
        (
            lambda _, fleet: {"assignment": dict.fromkeys(fleet, np.array([0.5, 0.5]))},
            "Returns.round assigns device-00 to array([0.5, 0.5])",
        ),
        (lambda *_: {"assignment": {0: 0}}, "Returns.round assigns 0, which is no name of a device"),
        (
            lambda _, fleet: {"assignment": dict.fromkeys([*fleet, "device 01"], 0)},
            "Returns.round assigns 'device 01', which is no device of the fleet",
        ),
        (lambda state, _: {"centers": state.centers[:0]}, "Returns.round returned centers of shape [0, "),
        (lambda state, _: {"centers": state.centers.astype(int)}, "Returns.round returned centers of int64"),
        (lambda *_: {"extra": {"a": {"b": 1}}}, "Returns.round keeps dict that is no array of numbers in extra['a']"),
        (lambda *_: {"extra": {"a": ["x"]}}, "Returns.round keeps list that is no array of numbers in extra['a']"),
        (lambda *_: {"extra": {"a": [[1], [1, 2]]}}, "Returns.round keeps list that is no array of numbers"),
    ],
)
def test_a_state_that_cannot_be_kept_is_told_by_what_is_wrong(change: Change, said: str) -> None:
    """Each ended in an exception of json, numpy or safetensors that named no line of the user's and no state."""
    with pytest.raises(UsageError) as told:
        played(change)
    assert said in told.value.message
    assert told.value.hint


def test_what_a_method_keeps_is_the_same_kind_of_thing_in_a_run_that_went_on_and_in_one_that_did_not(
    tmp_path: Path,
) -> None:
    """A list grew by `+ [1]` in an uninterrupted run, and was added to in one that went on from a checkpoint."""

    def longer(state: State, _: list[str]) -> dict[str, Any]:
        return {"extra": {"rounds": state.extra.get("rounds", [0]) + ONE}}

    whole = played(longer, rounds=3)
    played(longer, rounds=2, out=tmp_path, name="mine")
    more = played(longer, rounds=3, out=tmp_path, name="mine", resume=True)
    np.testing.assert_array_equal(whole.run.state.extra["rounds"], more.run.state.extra["rounds"])


def test_a_setting_of_none_is_kept_with_the_run_as_one_without_a_value(tmp_path: Path) -> None:
    """The run trained without a folder, and with one it ended in a TypeError of TOML."""
    method = HasOption(local_steps=1)
    made = fc.simulate(method, fleet=FLEET, rounds=1, out=tmp_path, name="mine", progress=False)
    again = fc.simulate(method, fleet=FLEET, rounds=2, out=tmp_path, name="mine", resume=True, progress=False)
    assert (len(made.history), len(again.history)) == (1, 2)
    assert fc.load(tmp_path / "mine", method=HasOption(local_steps=1)).accuracy == again.accuracy


@pytest.mark.parametrize("value", [np.linalg.norm, {1, 2}, [None], np.ones(3), np.ones(1)])
def test_a_setting_that_no_file_can_hold_is_told_before_the_first_round(value: object) -> None:
    """It ended after the first round in a TypeError of json that named no setting."""
    with pytest.raises(UsageError, match=r"option of .*HasOption is .*, which the file of a run cannot hold"):
        fc.simulate(HasOption(local_steps=1, option=value), fleet=FLEET, rounds=1, progress=False)


def test_none_in_place_of_another_default_is_told_before_the_first_round() -> None:
    """It was missing in config.toml, so that `fc.load` gave the default."""
    with pytest.raises(UsageError, match=r"option of .*HasDefault is None, which the file of a run cannot hold"):
        fc.simulate(HasDefault(local_steps=1, option=None), fleet=FLEET, rounds=1, progress=False)


def test_an_array_as_a_setting_is_told_with_the_list_to_write() -> None:
    """It ended in "the truth value of an array is ambiguous", from the repr of the method."""
    method = HasOption(local_steps=1, option=np.ones(3))
    assert repr(method) == "HasOption(local_steps=1, option=array([1., 1., 1.]))"
    with pytest.raises(UsageError, match=r"give a list in its place, array\.tolist\(\)"):
        fc.compare([method, fc.FedAvg()], fleet=FLEET, rounds=1, seeds=1, progress=False)


@pytest.mark.parametrize("value", [(1, [0.5]), [1, [0.5]], (np.int64(1), [np.float32(0.5)])])
def test_a_list_as_a_setting_is_kept_with_the_run_and_known_again(tmp_path: Path, value: object) -> None:
    """A tuple was refused as another setting by `load` and `resume`, and a number of numpy by the file."""
    made = HasOption(local_steps=1, option=value)
    fc.simulate(made, fleet=FLEET, rounds=1, out=tmp_path, name="mine", progress=False)
    again = fc.simulate(made, fleet=FLEET, rounds=2, out=tmp_path, name="mine", resume=True, progress=False)
    assert fc.load(tmp_path / "mine", method=made).accuracy == again.accuracy
