"""Checkers: each says what it wanted, and combinators name the place."""

from __future__ import annotations

from typing import Any

import pytest

from edge_client.errors import Malformed
from edge_client.protocol import validators
from edge_client.protocol.blocks import MAX_INTEGER


def test_a_complaint_names_the_place_and_what_was_wanted() -> None:
    table = validators.required(
        at=validators.list_of(validators.record(validators.required(n=validators.integer(1, 9))), 1, 4)
    )
    with pytest.raises(Malformed, match=r"get\.at\[1\]\.n is 10; expected an integer from 1 to 9"):
        validators.record(table)({"at": [{"n": 1}, {"n": 10}]}, "get")
    with pytest.raises(Malformed, match="get lacks at"):
        validators.record(table)({}, "get")


@pytest.mark.parametrize("value", [True, "1", None, float("nan"), float("inf"), [], -1.0])
def test_a_number_is_finite_in_range_and_no_truth_value(value: object) -> None:
    with pytest.raises(Malformed):
        validators.number()(value, "lr")


@pytest.mark.parametrize("value", [1, 1.5, 0])
def test_integers_are_numbers_too(value: float) -> None:
    assert validators.number()(value, "lr") == value


@pytest.mark.parametrize("value", [True, 1.0, "1", None, 10])
def test_an_integer_is_no_float_and_no_truth_value(value: object) -> None:
    with pytest.raises(Malformed):
        validators.integer(0, 9)(value, "n")


def test_a_long_wrong_value_does_not_fill_the_log() -> None:
    with pytest.raises(Malformed) as refused:
        validators.integer(0, 9)("x" * 100_000, "n")
    assert len(str(refused.value)) < 300


def test_words_nulls_and_truth_values() -> None:
    assert validators.word_or("own", validators.integer(0, 1))("own", "start") == "own"
    assert validators.word_or("own", validators.integer(0, 1))(1, "start") == 1
    assert validators.or_null(validators.boolean)(None, "x") is None
    with pytest.raises(Malformed):
        validators.boolean(1, "x")
    with pytest.raises(Malformed):
        validators.text(3)("four", "x")
    with pytest.raises(Malformed):
        validators.map_of(validators.text(3), validators.boolean, 1)([], "x")
    with pytest.raises(Malformed):
        validators.record({})([], "x")


def test_what_is_right_is_given_back() -> None:
    assert [validators.boolean(value, "x") for value in (True, False)] == [True, False]
    assert validators.text(3)("abc", "x") == "abc"
    assert validators.one_of("a", "b")("b", "x") == "b"
    assert validators.matching("[a-z]+")("abc", "x") == "abc"
    assert validators.list_of(validators.integer(0, 9), 0, 2)([1, 2], "x") == [1, 2]
    assert validators.map_of(validators.text(1), validators.boolean, 1)({"a": True}, "x") == {"a": True}


def test_a_named_object_has_exactly_the_fields_of_its_name_and_keeps_the_name() -> None:
    check = validators.named({"sgd": {"momentum": validators.number(0, 1)}, "plain": {}})
    assert check({"name": "sgd", "momentum": 0.5}, "rule") == {"name": "sgd", "momentum": 0.5}
    assert check({"name": "plain"}, "rule") == {"name": "plain"}
    refused: list[Any] = [{"name": "adam"}, {"name": 1}, [], {"name": "sgd"}, {"name": "plain", "momentum": 0.5}]
    for wrong in refused:
        with pytest.raises(Malformed, match=r"^bad_field: rule"):
            check(wrong, "rule")


def test_the_greatest_integer_is_the_last_one_that_a_double_holds_alone() -> None:
    most = MAX_INTEGER
    assert int(float(most)) == most
    assert float(most + 1) == float(most + 2)


def test_a_text_may_be_empty_unless_a_least_length_is_given() -> None:
    assert validators.text(3)("", "x") == ""
    with pytest.raises(Malformed, match="a text of 1 to 3 characters"):
        validators.text(3, low=1)("", "x")
