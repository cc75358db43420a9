from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds.update_validation import (
    ZERO_BASE,
    ReplySpec,
    decode_reply,
    max_reply_bytes,
    outliers,
    update_moves,
    validate_reply,
)
from edge_client.errors import Malformed
from edge_client.protocol import codecs, tensors
from edge_client.protocol.task import OWN_MODEL, Fit, Flat, Probe, Reply, Schema, Task, TensorSpec
from tests.support.softmax_program import CLASSES, schema
from tests.support.virtual_federation import Anything

SCHEMA = schema()
BASE = "ab" * 32
START: Flat = np.linspace(-1, 1, SCHEMA.size, dtype=np.float32)
DELTA: Flat = np.linspace(0, 0.5, SCHEMA.size, dtype=np.float32)
FIT = Fit(start=START, steps=1, lr=0.1, batch=8, seed=0)


def question(task: Task = FIT, **changes: Anything) -> ReplySpec:
    fields: dict[str, Any] = {"codec": "f32", "base": BASE, "base_vector": START, "max_update_rms": 10.0}
    return ReplySpec(task=task, schema=SCHEMA, samples=50, **(fields | changes))


def delta(vector: Flat = DELTA, *, codec: str = "f32", base: str = BASE) -> bytes:
    return codecs.encode_vector(vector, SCHEMA, codec=codec, kind="delta", base=base)


def probe(*want: str, models: int = 2, **more: Anything) -> Probe:
    return Probe(models=[START] * models, want=frozenset(want), batch=8, seed=0, **more)


def stats(n: int = 10, **values: Anything) -> bytes:
    return codecs.encode_stats(Reply(n=n, **values), SCHEMA)


def code_of(asked: ReplySpec, data: bytes, n: int = 10) -> str:
    with pytest.raises(Malformed) as refused:
        decode_reply(asked, data, n)
    return refused.value.code


def test_an_update_is_the_base_plus_the_delta_in_float32() -> None:
    reply = decode_reply(question(), delta(), 30)
    assert reply.update is not None
    assert reply.update.dtype == np.float32
    np.testing.assert_array_equal(reply.update, START + DELTA)


@given(
    names=st.lists(st.text(st.characters(exclude_characters="#", codec="utf-8"), min_size=1), unique=True, max_size=4),
    codec=st.sampled_from(["f32", "f16", "i8"]),
)
def test_every_update_fits_into_the_bytes_that_its_device_may_announce(names: list[str], codec: str) -> None:
    tensors = [TensorSpec(name=name, role="p", shape=(2,) * (1 + k)) for k, name in enumerate(["w", *names])]
    made = Schema(tuple({tensor.name: tensor for tensor in tensors}.values()))
    update = codecs.encode_vector(np.zeros(made.size), made, codec=codec, kind="delta", base=BASE)
    assert len(update) <= max_reply_bytes(replace(question(codec=codec), schema=made))


def test_a_large_update_may_be_announced_with_little_more_bytes_than_it_has() -> None:
    large = Schema((TensorSpec(name="w", role="p", shape=(512, 512)),))
    update = codecs.encode_vector(np.zeros(large.size), large, codec="i8", kind="delta", base=BASE)
    assert max_reply_bytes(replace(question(codec="i8"), schema=large)) < 1.01 * len(update)


@pytest.mark.parametrize("want", ["loss", "confusion", "grad", "labels", "inputs"])
def test_every_statistic_fits_into_the_bytes_that_its_device_may_announce(want: str) -> None:
    most: dict[str, Any] = {
        "loss": {"losses": np.zeros(16)},
        "confusion": {"losses": np.zeros(16), "confusion": np.zeros((16, CLASSES, CLASSES), np.int64)},
        "grad": {"losses": np.zeros(16), "grad": np.zeros(SCHEMA.n_params, np.float32)},
        "labels": {"labels": np.zeros(CLASSES)},
        "inputs": {"losses": np.zeros(16), "inputs": np.zeros(1 + 68 + 68 * 69 // 2)},
    }
    asked = question(probe(want, models=16), classes=CLASSES)
    assert len(stats(**most[want])) <= max_reply_bytes(asked)


def test_no_device_weighs_more_than_the_samples_that_it_was_enrolled_with() -> None:
    assert decode_reply(question(), delta(), 2**31).n == 50
    assert decode_reply(question(), delta(), 7).n == 7


def test_no_gradient_weighs_more_than_the_samples_that_its_device_was_enrolled_with() -> None:
    asked = question(probe("grad", models=1))
    grad = np.zeros(SCHEMA.n_params, dtype=np.float32)
    assert decode_reply(asked, stats(grad=grad), 2**31).n == 50
    assert decode_reply(asked, stats(grad=grad), 7).n == 7


def test_a_huge_gradient_is_rejected_by_the_norm_bound_of_updates() -> None:
    asked = question(probe("grad", models=1))
    assert code_of(asked, stats(grad=np.full(SCHEMA.n_params, 11.0, np.float32)), 7) == "rejected"
    assert decode_reply(asked, stats(grad=np.full(SCHEMA.n_params, 9.0, np.float32)), 7).n == 7


def test_votes_of_more_samples_than_were_enrolled_are_refused() -> None:
    asked = question(probe("votes"))
    assert code_of(asked, stats(n=70, votes=np.array([60, 10])), 70) in ("rejected", "bad_field")


def test_held_out_samples_may_be_more_than_those_that_train() -> None:
    asked = question(probe("confusion", models=1, split="test"))
    assert decode_reply(asked, stats(n=70, confusion=np.array([[[60, 10], [0, 0]]])), 70).n == 70


def test_a_fit_that_uploads_nothing_is_answered_by_its_loss_alone() -> None:
    asked = question(Fit(start=OWN_MODEL, init=START, steps=1, lr=0.1, batch=8, seed=0, upload=False))
    assert asked.blob_kind == "stats"
    reply = decode_reply(asked, stats(losses=np.array([0.5])), 10)
    assert reply.update is None
    assert reply.losses is not None
    assert reply.losses.tolist() == [0.5]
    assert code_of(asked, stats(losses=np.array([0.5, 0.5]))) == "bad_schema"
    assert code_of(asked, stats(losses=np.array([0.5]), votes=np.array([10]))) == "bad_schema"
    assert code_of(asked, delta()) == "bad_schema"


def test_mean_responsibilities_sum_to_one() -> None:
    asked = question(probe("posterior"))
    assert decode_reply(asked, stats(posterior=np.array([0.25, 0.75])), 10).posterior is not None
    for wrong in ([0.0, 0.0], [1.0, 1.0], [0.5, 0.4]):
        assert code_of(asked, stats(posterior=np.array(wrong))) == "rejected"


def test_a_delta_from_nothing_is_the_model_itself() -> None:
    own = Fit(start=OWN_MODEL, init=START, steps=1, lr=0.1, batch=8, seed=0)
    reply = decode_reply(question(own, base=ZERO_BASE, base_vector=None), delta(base=ZERO_BASE), 5)
    assert reply.update is not None
    np.testing.assert_array_equal(reply.update, DELTA)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 a zip", b"\x80\x05 a pickle", b"\xff" * 64])
def test_what_is_no_tensor_file_is_bad_schema(data: bytes) -> None:
    assert code_of(question(), data) == "bad_schema"


def test_another_codec_or_another_base_than_asked_is_bad_codec() -> None:
    assert code_of(question(), delta(codec="f16")) == "bad_codec"
    assert code_of(question(), delta(base="cd" * 32)) == "bad_codec"


def test_a_model_where_a_delta_was_asked_for_is_bad_schema() -> None:
    assert code_of(question(), codecs.encode_vector(DELTA, SCHEMA, codec="f32", kind="model")) == "bad_schema"


def test_a_delta_that_is_not_finite_is_refused() -> None:
    split = dict(SCHEMA.split(np.where(np.arange(SCHEMA.size) == 3, np.nan, DELTA).astype(np.float32)))
    data = tensors.pack_tensors(split, kind="delta", codec="f32", schema=SCHEMA.sha256, base=BASE)
    assert code_of(question(), data) == "not_finite"


def test_a_huge_finite_update_is_rejected_by_the_norm_bound() -> None:
    assert code_of(question(), delta(np.full(SCHEMA.size, 11.0, np.float32))) == "rejected"
    assert code_of(question(), delta(np.full(SCHEMA.size, 3e38, np.float32))) == "rejected"


def test_an_overflow_of_the_sum_is_not_finite() -> None:
    start = np.full(SCHEMA.size, 3e38, np.float32)
    asked = question(base_vector=start, max_update_rms=1e39)
    assert code_of(asked, delta(start)) == "not_finite"


def test_statistics_hold_what_was_asked_for_and_nothing_else() -> None:
    losses, votes = np.array([0.5, 0.25]), np.array([4, 6])
    reply = decode_reply(question(probe("loss", "votes")), stats(losses=losses, votes=votes), 10)
    np.testing.assert_array_equal(reply.losses, losses)
    np.testing.assert_array_equal(reply.votes, votes)
    assert code_of(question(probe("loss", "votes")), stats(losses=losses)) == "bad_schema"
    assert code_of(question(probe("loss")), stats(losses=losses, votes=votes)) == "bad_schema"
    assert code_of(question(probe("loss", models=3)), stats(losses=losses)) == "bad_schema"


def test_counts_add_up_to_the_claimed_samples() -> None:
    confusion = np.zeros((2, CLASSES, CLASSES), np.int64)
    confusion[:, 0, 0] = 10
    asked = question(probe("confusion"))
    assert decode_reply(asked, stats(confusion=confusion), 10).confusion is not None
    assert code_of(asked, stats(confusion=confusion), n=11) == "rejected"
    assert code_of(question(probe("votes")), stats(votes=np.array([3, 3])), n=10) == "rejected"


def test_counts_of_samples_with_several_labels_add_up_to_the_same_and_to_no_more_than_all() -> None:
    asked = question(probe("confusion"), classes=CLASSES, positions=4)
    matrix = np.zeros((2, CLASSES, CLASSES), np.int64)
    matrix[:, 0, 0] = 40
    assert decode_reply(asked, stats(confusion=matrix), 10).confusion is not None
    matrix[:, 0, 0] = 17  # the others are ignored
    assert decode_reply(asked, stats(confusion=matrix), 10).confusion is not None
    matrix[1, 0, 0] = 18
    assert code_of(asked, stats(confusion=matrix)) == "rejected"
    matrix[:, 0, 0] = 41
    assert code_of(asked, stats(confusion=matrix)) == "bad_field"
    assert code_of(replace(asked, positions=1), stats(confusion=matrix // 41 * 11)) == "bad_field"


def test_samples_without_a_label_that_counts_do_not_vote_but_some_sample_does() -> None:
    asked = question(probe("votes"), classes=CLASSES, positions=4)
    assert decode_reply(asked, stats(votes=np.array([1, 5])), 10).n == 10
    assert code_of(asked, stats(votes=np.array([0, 0]))) == "rejected"
    assert code_of(asked, stats(votes=np.array([6, 5]))) == "bad_field"


@pytest.mark.parametrize(
    ("name", "row", "code"),
    [
        ("errors", (4.0, 2.0, 1.0), None),
        ("errors", (4.0, 2.1, 1.0), "bad_field"),  # a mean absolute error above the root of the squared one
        ("errors", (-1.0, 0.0, 1.0), "bad_field"),
        ("errors", (4.0, 2.0), "bad_field"),
        ("positions", (40.0, 40.0, 0.5), None),
        ("positions", (40.0, 41.0, 0.5), "bad_field"),
        ("positions", (41.0, 40.0, 0.5), "bad_field"),  # more labels than four of each sample
        ("positions", (40.0, 4.0, -0.5), "bad_field"),
    ],
)
def test_errors_and_positions_are_numbers_that_some_device_can_have(
    name: str, row: tuple[float, ...], code: str | None
) -> None:
    asked = question(probe(name), classes=CLASSES, positions=4)
    rows: dict[str, Any] = {name: np.array([row, row])}
    if code is not None:
        assert code_of(asked, stats(**rows)) == code
        return
    assert decode_reply(asked, stats(**rows), 10).n == 10
    assert code_of(asked, stats(**{name: rows[name][:1]})) == "bad_schema"
    counted = decode_reply(replace(asked, max_samples=5), stats(**rows), 10)
    if counted.positions is not None:
        assert counted.positions[0].tolist() == [20.0, 20.0, 0.25]


def test_a_prior_asks_for_one_confusion_matrix_of_the_mixture() -> None:
    one = np.zeros((1, CLASSES, CLASSES), np.int64)
    one[0, 1, 1] = 10
    assert decode_reply(question(probe("confusion", prior=[0.5, 0.5])), stats(confusion=one), 10).confusion is not None
    assert code_of(question(probe("confusion")), stats(confusion=one)) == "bad_schema"


def test_the_kind_of_answer_follows_from_the_question() -> None:
    assert (question().blob_kind, question(probe("loss")).blob_kind) == ("delta", "stats")


# ---- what never was bytes ----


def test_an_emulated_reply_is_judged_as_a_decoded_one() -> None:
    sent = validate_reply(question(), Reply(n=2**31, update=START + DELTA))
    decoded = decode_reply(question(), delta(), 2**31)
    assert sent.n == decoded.n == 50
    np.testing.assert_array_equal(sent.update, decoded.update)


@pytest.mark.parametrize(
    ("update", "code"),
    [
        (None, "bad_schema"),
        (START[:-1], "bad_schema"),
        (START * np.nan, "not_finite"),
        (START + np.float32(11.0), "rejected"),
    ],
)
def test_an_emulated_model_that_no_device_could_send_is_refused(update: Flat | None, code: str) -> None:
    with pytest.raises(Malformed) as refused:
        validate_reply(question(), Reply(n=1, update=update))
    assert refused.value.code == code


def test_how_far_a_reply_moves_is_told_by_kind() -> None:
    own = question(Fit(start=OWN_MODEL, init=START, steps=1, lr=0.1, batch=8, seed=0), base=ZERO_BASE, base_vector=None)
    ones = np.ones(SCHEMA.size, np.float32)
    peak = ones[: SCHEMA.n_params] * (1 + np.eye(SCHEMA.n_params, dtype=np.float32)[3])
    found = [
        update_moves(question(), Reply(n=1, update=START + 2 * ones)),
        update_moves(own, Reply(n=1, update=3 * ones)),
    ]
    assert [{what: round(far, 5) for what, far in each.items()} for each in found] == [
        {"delta": 2.0, "delta peak": 2.0},
        {"model": 3.0, "model peak": 3.0},
    ]
    assert update_moves(question(probe("grad", models=1)), Reply(n=1, grad=peak))["grad peak"] == 2.0
    assert update_moves(question(probe("loss")), Reply(n=1, losses=np.zeros(2))) == {}


def test_an_update_that_moves_one_parameter_far_is_named_where_all_move_little() -> None:
    far = START + np.float32(0.001)
    far[3] += 0.03
    usual = update_moves(question(), Reply(n=1, update=START + np.float32(0.001)))
    moves = {"d0": usual, "d1": usual, "d2": usual, "far": update_moves(question(), Reply(n=1, update=far))}
    refused, _ = outliers(moves, {}, ratio=10.0)
    assert list(refused) == ["far"]
    assert "one parameter moved 31 times as far as is usual" in refused["far"]
