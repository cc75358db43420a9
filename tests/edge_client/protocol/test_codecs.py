"""Codecs: how much each may lose, and that decoding gives finite float32 or a refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge_client.errors import Malformed
from edge_client.protocol import tensors
from edge_client.protocol.codecs import decode_stats, decode_vector, encode_stats, encode_vector, encode_with_feedback
from edge_client.protocol.nearest.answer_moments import AnswerLook, answer_moments
from edge_client.protocol.nearest.input_moments import moments_of
from edge_client.protocol.task import Flat, Reply, Schema, TensorSpec
from tests.support.sample_messages import SCHEMA

F32 = np.float32
CODECS = ("f32", "f16", "i8")
BASE = "a" * 64
BOUND = float(np.nextafter(F32(2.0**127), F32(0)))
VECTORS = hnp.arrays(F32, SCHEMA.size, elements=st.floats(-BOUND, BOUND, width=32))
SMALL = hnp.arrays(F32, SCHEMA.size, elements=st.floats(-1, 1, width=32))


def packed(stored: dict[str, Any], **meta: Any) -> bytes:  # noqa: ANN401 - one changed item of the metadata
    return tensors.pack_tensors(stored, **{"kind": "model", "codec": "f32", "schema": SCHEMA.sha256} | meta)


def refusal(data: bytes, **how: Any) -> str:  # noqa: ANN401 - arguments of decode
    with pytest.raises(Malformed) as refused:
        decode_vector(data, SCHEMA, **{"kind": "model"} | how)
    return refused.value.code


@given(VECTORS)
def test_f32_loses_nothing(vector: Flat) -> None:
    assert (
        decode_vector(encode_vector(vector, SCHEMA, codec="f32", kind="model"), SCHEMA, kind="model").tobytes()
        == vector.tobytes()
    )


@given(VECTORS)
def test_f16_loses_at_most_2_to_the_minus_11_of_each_tensors_largest_value(vector: Flat) -> None:
    # T/s is in (-1, 1), where float16 rounds by at most 2^-12; s is at most twice the largest value.
    back = decode_vector(encode_vector(vector, SCHEMA, codec="f16", kind="model"), SCHEMA, kind="model")
    for t in SCHEMA.tensors:
        value = vector[SCHEMA.slices[t.name]].astype(np.float64)
        largest = max(np.abs(value).max(), 2.0**-126)  # smaller tensors become zero
        assert np.abs(back[SCHEMA.slices[t.name]] - value).max() <= largest * 2.0**-11 or largest == 2.0**-126


@given(VECTORS)
def test_i8_loses_at_most_half_a_step_of_each_row(vector: Flat) -> None:
    back = SCHEMA.split(decode_vector(encode_vector(vector, SCHEMA, codec="i8", kind="model"), SCHEMA, kind="model"))
    for name, value in SCHEMA.split(vector).items():
        if value.ndim < 2:
            assert np.array_equal(back[name], value)
            continue
        rows, again = (a.reshape(len(value), -1).astype(np.float64) for a in (value, back[name]))
        step = np.abs(rows).max(axis=1) / 127
        tolerance = 0.5 + 1e-4  # float32 rounding of the scale and of the quotient, at most 127 * 2^-23 steps
        assert ((np.abs(again - rows).max(axis=1) <= tolerance * step) | (step < 2.0**-126)).all()


@given(st.lists(SMALL, min_size=1, max_size=6))
def test_with_feedback_the_sum_sent_stays_within_one_rounding_of_the_sum_meant(deltas: list[Flat]) -> None:
    residual, sent = None, np.zeros(SCHEMA.size)
    for delta in deltas:
        data, residual = encode_with_feedback(delta, residual, SCHEMA, codec="i8", base=BASE)
        sent += decode_vector(data, SCHEMA, kind="delta", codec="i8", base=BASE)
    assert residual is not None
    meant = np.sum(deltas, axis=0, dtype=np.float64)
    assert np.abs(sent + residual - meant).max() < 1e-5  # float32 sums of at most six values below 2
    assert np.abs(residual).max() <= 0.51 * 2 / 127


def test_feedback_leaves_what_it_was_given_alone() -> None:
    delta, residual = np.full(SCHEMA.size, 0.3, F32), np.full(SCHEMA.size, 0.01, F32)
    kept = delta.copy(), residual.copy()
    encode_with_feedback(delta, residual, SCHEMA, codec="i8", base="zero")
    assert np.array_equal(delta, kept[0])
    assert np.array_equal(residual, kept[1])


def test_small_deltas_survive_f16() -> None:
    tiny = np.full(SCHEMA.size, 1e-30, F32)
    back = decode_vector(encode_vector(tiny, SCHEMA, codec="f16", kind="delta", base="zero"), SCHEMA, kind="delta")
    np.testing.assert_allclose(back, tiny, rtol=2.0**-11)


@pytest.mark.parametrize(("codec", "largest"), [("f16", 0.75), ("i8", 127.0)])
def test_the_least_normal_scale_is_kept_and_one_below_it_becomes_zero(codec: str, largest: float) -> None:
    for scale, kept in ((2.0**-126, True), (2.0**-127, False)):
        data = encode_vector(np.full(SCHEMA.size, largest * scale), SCHEMA, codec=codec, kind="model")
        stored, _ = tensors.unpack_tensors(data)
        assert np.unique(stored["fc.weight#s"]) == (scale if kept else 0)
        assert np.unique(stored["fc.weight"]) == (largest if kept else 0)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e39])
def test_nothing_infinite_is_sent(codec: str, wrong: float) -> None:
    vector = np.zeros(SCHEMA.size)
    vector[3] = wrong
    with pytest.raises(Malformed, match=r"^not_finite: "):
        encode_vector(vector, SCHEMA, codec=codec, kind="model")


@pytest.mark.parametrize("codec", ["f16", "i8"])
@pytest.mark.parametrize("value", [2.0**127, np.finfo(F32).max])
def test_values_whose_rounding_could_overflow_are_refused_by_the_scaled_codecs(codec: str, value: float) -> None:
    with pytest.raises(Malformed, match=r"^not_finite: "):
        encode_vector(np.full(SCHEMA.size, value), SCHEMA, codec=codec, kind="model")


def test_a_file_must_be_what_the_task_asked_for() -> None:
    data = encode_vector(np.zeros(SCHEMA.size), SCHEMA, codec="f16", kind="delta", base=BASE)
    assert refusal(data) == "bad_schema"
    assert refusal(data, kind="delta", codec="f32") == "bad_codec"
    assert refusal(data, kind="delta", base="zero") == "bad_codec"
    other = Schema((TensorSpec(name="w", role="p", shape=(SCHEMA.size,)),))
    assert refusal(encode_vector(np.zeros(SCHEMA.size), other, codec="f32", kind="model")) == "bad_schema"
    with pytest.raises(Malformed, match=r"^bad_codec: "):
        encode_vector(np.zeros(SCHEMA.size), SCHEMA, codec="i4", kind="model")


def test_the_same_tensors_under_another_schema_are_refused() -> None:
    assert refusal(packed(model(), schema="1" * 64)) == "bad_schema"  # for example a buffer made a parameter


def model(**change: Any) -> dict[str, Any]:  # noqa: ANN401 - arrays
    return {t.name: np.zeros(t.shape, F32) for t in SCHEMA.tensors} | change


@pytest.mark.parametrize(
    "stored",
    [
        {k: v for k, v in model().items() if k != "scale"},
        model(more=np.zeros(1, F32)),
        model(scale=np.zeros(1, F32)),
        model(scale=np.zeros((), np.float64)),
        {**{k: v for k, v in model().items() if k != "fc.bias"}, "fc.bias": np.zeros((3, 1), F32)},
    ],
)
def test_names_shapes_and_dtypes_must_be_the_schemas(stored: dict[str, Any]) -> None:
    assert refusal(packed(stored)) == "bad_schema"


def quantised(scale: float, value: int) -> bytes:
    stored, _ = tensors.unpack_tensors(encode_vector(np.ones(SCHEMA.size), SCHEMA, codec="i8", kind="model"))
    stored["fc.weight#s"] = np.full(3, scale, F32)
    stored["fc.weight"] = np.full((3, 2), value, np.int8)
    return packed(stored, codec="i8")


@pytest.mark.parametrize(
    ("scale", "value", "code"),
    [
        (np.inf, 0, "not_finite"),
        (np.nan, 1, "not_finite"),
        (3e38, 100, "not_finite"),
        (-1.0, 1, "bad_codec"),
        (1.0, -128, "bad_codec"),
    ],
)
def test_a_hostile_scale_is_found_after_decoding(scale: float, value: int, code: str) -> None:
    assert refusal(quantised(scale, value)) == code


MOMENTS = answer_moments(np.array([[0.5, -1.0], [2.0, 0.25]]))
REPLY = Reply(
    n=10,
    losses=np.array([0.5, 0.25]),
    votes=np.array([4, 6]),
    posterior=np.array([0.4, 0.6]),
    confusion=np.array([[[5, 0], [1, 4]], [[4, 1], [0, 5]]]),
    errors=np.array([[4.0, 2.0, 1.0], [0.0, 0.0, 0.0]]),  # a mean absolute error is the root of the squared one at most
    positions=np.array([[10.0, 10.0, 2.5], [10.0, 0.0, 0.0]]),
    labels=np.array([7.5, 0.0]),
    inputs=moments_of(np.arange(24.0).reshape(6, 4)).to_vector(),
    answers=np.stack([AnswerLook(entropy=0.5, train=MOMENTS, test=MOMENTS).to_vector()] * 2),
    grad=np.arange(SCHEMA.n_params, dtype=F32),
)


def test_statistics_come_back_as_they_were() -> None:
    back = decode_stats(encode_stats(REPLY, SCHEMA), SCHEMA, 10, models=2)
    assert back.n == 10
    assert back.update is None
    for name in vars(REPLY).keys() - {"n", "update", "words"}:
        assert np.array_equal(getattr(back, name), getattr(REPLY, name))


def test_only_what_was_asked_for_is_present() -> None:
    back = decode_stats(encode_stats(Reply(n=3, losses=np.array([1.0])), SCHEMA), SCHEMA, 3)
    assert (back.votes, back.posterior, back.confusion, back.grad) == (None, None, None, None)


@given(st.integers(1, 16), st.data())
def test_every_number_of_candidates_is_carried(models: int, data: st.DataObject) -> None:
    losses = data.draw(hnp.arrays(np.float64, models, elements=st.floats(-1e300, 1e300)))
    back = decode_stats(encode_stats(Reply(n=1, losses=losses), SCHEMA), SCHEMA, 1, models=models)
    assert np.array_equal(np.asarray(back.losses), losses)


@pytest.mark.parametrize("reply", [Reply(n=3), Reply(n=3, update=np.zeros(SCHEMA.size))])
def test_statistics_hold_something_and_no_update(reply: Reply) -> None:
    with pytest.raises(ValueError, match="at least one"):
        encode_stats(reply, SCHEMA)


I64 = np.int64


@pytest.mark.parametrize(
    ("stored", "code"),
    [
        ({"loss": np.array([np.nan])}, "not_finite"),
        ({"loss": np.array([1.0], F32)}, "bad_schema"),
        ({"loss": np.array([[1.0]])}, "bad_schema"),
        ({"loss": np.array([1.0, 2.0]), "votes": np.array([1], I64)}, "bad_schema"),
        ({"loss": np.zeros(17)}, "bad_schema"),
        ({"votes": np.array([-1, 2], I64)}, "bad_field"),
        ({"votes": np.array([9, 2], I64)}, "bad_field"),
        ({"votes": np.full(2, 2**62, I64)}, "bad_field"),
        ({"confusion": np.ones((1, 2, 3), I64)}, "bad_schema"),
        ({"confusion": np.array([[[-1, 1], [1, 1]]], I64)}, "bad_field"),
        ({"confusion": np.full((1, 2, 2), 3, I64)}, "bad_field"),
        ({"confusion": np.ones((3, 2, 2), I64), "loss": np.zeros(2)}, "bad_schema"),
        ({"posterior": np.array([-0.1, 1.1])}, "bad_field"),
        ({"labels": np.array([-1.0, 2.0])}, "bad_field"),
        ({"errors": np.array([[1.0, 1.001, 0.0]])}, "bad_field"),
        ({"errors": np.array([[1.0, 1.0, -1e-9]])}, "bad_field"),
        ({"errors": np.zeros((1, 4))}, "bad_field"),
        ({"positions": np.array([[10.0, 10.5, 0.0]])}, "bad_field"),
        ({"positions": np.array([[10.5, 10.0, 0.0]])}, "bad_field"),
        ({"positions": np.array([[10.0, 1.0, 0.0], [9.0, 1.0, 0.0]])}, "bad_field"),
        ({"inputs": np.zeros(3)}, "bad_schema"),
        ({"answers": np.zeros((1, 3))}, "bad_schema"),
        ({"weights": np.array([1.0])}, "bad_schema"),
        ({"grad/fc.bias": np.zeros(3, F32)}, "bad_schema"),
    ],
)
def test_statistics_that_no_device_could_have_measured_are_refused(stored: dict[str, Any], code: str) -> None:
    with pytest.raises(Malformed, match=rf"^{code}: "):
        decode_stats(packed(stored, kind="stats"), SCHEMA, 10)


def test_statistics_must_answer_the_question() -> None:
    data = encode_stats(REPLY, SCHEMA)
    for other in (packed(model()), packed({"loss": np.zeros(1)}, kind="stats", codec="i8")):
        with pytest.raises(Malformed):
            decode_stats(other, SCHEMA, 10)
    with pytest.raises(Malformed):
        decode_stats(data, SCHEMA, 10, models=3)
    with pytest.raises(Malformed):
        decode_stats(data, SCHEMA, 9)


def test_one_confusion_matrix_may_stand_for_the_mixture() -> None:
    mixture = Reply(n=4, losses=np.zeros(3), confusion=np.ones((1, 2, 2), I64))
    back = decode_stats(encode_stats(mixture, SCHEMA), SCHEMA, 4, models=3)
    assert np.array_equal(np.asarray(back.confusion), np.asarray(mixture.confusion))
