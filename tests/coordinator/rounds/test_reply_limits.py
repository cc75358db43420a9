"""What a reply may be at most: its bytes, its moves, its counts; and what of it counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coordinator.rounds.update_validation import (
    MAX_PARAMETER_MOVE,
    MAX_UPDATE_RMS,
    ReplySpec,
    decode_accepted,
    decode_reply,
    delta_base,
    max_reply_bytes,
    outliers,
    validate_reply,
)
from edge_client.errors import Malformed
from edge_client.protocol import codecs
from edge_client.protocol.nearest.answer_moments import MAX_CLASSES, AnswerLook, answer_moments, vector_size
from edge_client.protocol.nearest.input_moments import InputMoments, moments_of
from edge_client.protocol.task import MAX_MODELS, OWN_MODEL, Fit, Flat, Reply, Schema, TensorSpec
from tests.coordinator.rounds.test_update_validation import (
    BASE,
    DELTA,
    FIT,
    SCHEMA,
    START,
    delta,
    probe,
    question,
    stats,
)

WIDE = Schema((TensorSpec(name="w", role="p", shape=(100, 100)), TensorSpec(name="b", role="b", shape=(4,))))
ZEROS: Flat = np.zeros(WIDE.size, np.float32)
OWN = Fit(start=OWN_MODEL, init=START, steps=1, lr=0.1, batch=8, seed=0)


def code_of(asked: ReplySpec, reply: Reply) -> str | None:
    try:
        validate_reply(asked, reply)
    except Malformed as refused:
        return refused.code
    return None


# ---- bytes ----


@pytest.mark.parametrize(
    ("want", "classes", "models", "values"),
    [
        ({"loss", "votes", "posterior"}, 10, 16, {"losses": (16,), "votes": (16,), "posterior": (16,)}),
        ({"confusion", "loss"}, 200, 16, {"confusion": (16, 200, 200), "losses": (16,)}),
        ({"errors", "positions"}, 10, 16, {"errors": (16, 3), "positions": (16, 3)}),
        ({"answers"}, 20, 16, {"answers": (16, 1 + 2 * vector_size(20))}),
        ({"answers"}, 900, 16, {"answers": (16, 1 + 2 * vector_size(MAX_CLASSES))}),
        ({"inputs"}, 10, 1, {"inputs": (2_415,)}),
        ({"labels"}, 50_000, 1, {"labels": (50_000,)}),
        ({"grad"}, 10, 1, {"grad": (10_000,)}),
    ],
)
def test_statistics_of_the_most_models_and_classes_fit_and_little_more_does(
    want: set[str], classes: int, models: int, values: dict[str, tuple[int, ...]]
) -> None:
    kinds = {"votes": np.int64, "confusion": np.int64, "grad": np.float32}
    reply = Reply(n=1, **{name: np.zeros(shape, kinds.get(name, np.float64)) for name, shape in values.items()})
    size = len(codecs.encode_stats(reply, WIDE))
    asked = replace(question(probe(*want, models=models), classes=classes), schema=WIDE)
    assert models <= MAX_MODELS
    assert size <= max_reply_bytes(asked) < size + 8 * classes + 2**15 + 4_096


def test_the_loss_of_a_fit_that_stays_needs_no_more_than_a_header_whatever_the_classes() -> None:
    kept = replace(OWN, upload=False)
    assert max_reply_bytes(question(kept)) == max_reply_bytes(question(probe("loss", models=1)))
    assert max_reply_bytes(question(kept, classes=100)) == max_reply_bytes(question(kept)) + 800


# ---- moves ----


def test_an_update_may_move_as_far_as_its_bound_and_no_further() -> None:
    assert (MAX_UPDATE_RMS, MAX_PARAMETER_MOVE) == (10.0, 200.0)
    asked = replace(question(), schema=WIDE, base_vector=ZEROS, max_update_rms=10.0)
    flat = np.full(WIDE.size, 10.0, np.float32)
    assert code_of(asked, Reply(n=1, update=flat)) is None
    assert code_of(asked, Reply(n=1, update=flat * np.float32(1.001))) == "rejected"
    for peak, code in ((200.0, None), (-200.0, None), (200.1, "rejected"), (-200.1, "rejected")):
        one = ZEROS.copy()
        one[5] = peak
        assert code_of(asked, Reply(n=1, update=one)) == code
    buffers = ZEROS.copy()
    buffers[-4:] = 1e5  # buffers have bounds of their own
    assert code_of(asked, Reply(n=1, update=buffers)) is None


def test_a_model_that_is_no_difference_has_no_bound_of_a_move() -> None:
    asked = question(OWN, base="zero", base_vector=None)
    assert code_of(asked, Reply(n=1, update=np.full(SCHEMA.size, 300.0, np.float32))) is None


def test_moves_are_compared_by_kind_each_with_its_margin() -> None:
    """Ten times what is usual; twenty times for one parameter, and a hundred times for buffers."""
    usual = {f"d{i}": {"delta": 1.0, "delta peak": 1.0, "delta buffers": 1.0} for i in range(3)}
    for kind, most in (("delta", 10.0), ("delta peak", 20.0), ("delta buffers", 100.0)):
        for far, refused in ((most, False), (1.01 * most, True)):
            found, scales = outliers({**usual, "far": usual["d0"] | {kind: far}}, {}, ratio=10.0)
            assert bool(found) == refused
            assert set(found) <= {"far"}
            assert scales == usual["d0"]


def test_of_fewer_than_three_moves_no_scale_is_learned_but_a_known_one_counts() -> None:
    two = {"a": {"delta": 1.0}, "b": {"delta": 30.0}}
    assert outliers(two, {}, ratio=10.0) == ({}, {})
    refused, scales = outliers(two, {"delta": 2.0}, ratio=10.0)
    assert (set(refused), scales) == ({"b"}, {"delta": 2.0})
    assert outliers({**two, "c": {"delta": 1.5}}, {}, ratio=100.0)[1] == {"delta": 1.5}


# ---- counts, of emulated devices too ----


@pytest.mark.parametrize(
    ("want", "fields", "code"),
    [
        ("votes", {"votes": [10, 0]}, None),
        ("votes", {"votes": [11, -1]}, "rejected"),
        ("votes", {"votes": [9, 0]}, "rejected"),
        ("votes", {"votes": [10]}, "bad_schema"),
        ("loss", {"losses": [1.0]}, "bad_schema"),
        ("posterior", {"posterior": [0.5, 0.5 + 9e-7]}, None),
        ("posterior", {"posterior": [0.5, 0.5 + 2e-6]}, "rejected"),
        ("posterior", {"posterior": [0.5, 0.5 - 2e-6]}, "rejected"),
        ("posterior", {"posterior": [1.0]}, "bad_schema"),
        ("confusion", {"confusion": [[[9, 1], [0, 0]], [[0, 10], [0, 0]]]}, None),
        ("confusion", {"confusion": [[[9, 2], [0, -1]], [[0, 10], [0, 0]]]}, "rejected"),
        ("confusion", {"confusion": [[[9, 1], [0, 0]], [[0, 9], [0, 0]]]}, "rejected"),
        ("confusion", {"confusion": [[[9, 1], [0, 0]]]}, "bad_schema"),
        ("errors", {"errors": [[4.0, 2.0, 1.0]]}, "bad_schema"),
        ("positions", {"positions": [[4.0, 2.0, 1.0]] * 3}, "bad_schema"),
        ("labels", {"labels": [0.0, 0.5]}, None),
        ("labels", {"labels": [0.0, 0.0]}, "rejected"),
        ("grad", {"grad": [0.0] * SCHEMA.n_params}, None),
        ("grad", {"grad": [0.0] * (SCHEMA.n_params + 1)}, "bad_schema"),
        ("answers", {"answers": np.zeros((2, 1 + 2 * vector_size(3)))}, "bad_schema"),
    ],
)
def test_statistics_of_another_form_or_sum_than_asked_are_refused(
    want: str, fields: dict[str, Any], code: str | None
) -> None:
    asked = question(probe(want, models=1 if want == "grad" else 2), classes=2)
    assert code_of(asked, Reply(n=10, **{name: np.array(value) for name, value in fields.items()})) == code


def test_where_the_classes_are_not_known_counts_of_any_number_are_taken_if_the_matrix_is_square() -> None:
    asked = question(probe("confusion", models=1))
    matrix = np.zeros((1, 7, 7), np.int64)
    matrix[0, 6, 6] = 10
    assert code_of(asked, Reply(n=10, confusion=matrix)) is None
    assert code_of(asked, Reply(n=10, confusion=matrix[:, 1:])) == "bad_schema"
    assert code_of(question(probe("labels", models=1)), Reply(n=10, labels=np.ones(7))) is None
    assert code_of(question(probe("labels", models=1), classes=6), Reply(n=10, labels=np.ones(7))) == "bad_schema"


# ---- what counts ----


def weighed(want: str, **fields: Any) -> Reply:  # noqa: ANN401 - fields of a reply
    """The reply of a device with ten samples, of which four count."""
    asked = question(probe(want, models=1), classes=2, max_samples=4.5)
    return validate_reply(asked, Reply(n=10, **fields))


def test_no_more_samples_count_than_of_any_device_and_means_and_shares_stay() -> None:
    loss = weighed("loss", losses=np.array([0.5]))
    assert (loss.n, loss.losses is not None and loss.losses[0]) == (4, 0.5)
    confusion = weighed("confusion", confusion=np.array([[[5, 0], [5, 0]]])).confusion
    assert confusion is not None
    np.testing.assert_allclose(confusion.ravel(), [2.0, 0, 2.0, 0])
    labels = weighed("labels", labels=np.array([15.0, 5.0])).labels  # it has more samples now than it joined with
    assert labels is not None
    np.testing.assert_allclose(labels, [3.0, 1.0])
    np.testing.assert_array_equal(weighed("labels", labels=np.array([1.0, 2.0])).labels, [1.0, 2.0])
    moments = moments_of(np.random.default_rng(0).normal(size=(20, 3)))
    found = weighed("inputs", inputs=moments.to_vector()).inputs
    assert found is not None
    few = InputMoments.from_vector(found)
    assert few.n == 4
    np.testing.assert_allclose(few.first / few.n, moments.first / moments.n)


def test_of_answers_no_more_samples_of_either_kind_count() -> None:
    logits = np.random.default_rng(0).normal(size=(20, 2))
    look = AnswerLook(entropy=0.1, train=answer_moments(logits), test=answer_moments(logits[:2]))
    found = weighed("answers", answers=look.to_vector()[None]).answers
    assert found is not None
    few = AnswerLook.from_vector(found[0])
    assert few.train.n == pytest.approx(4.5)
    assert few.test.n == pytest.approx(2)


def test_what_was_accepted_is_read_again_as_it_was() -> None:
    asked = question(max_samples=20)
    for spec, data in ((asked, delta()), (question(probe("votes"), max_samples=4), stats(votes=np.array([6, 4])))):
        once, again = decode_reply(spec, data, 10), decode_accepted(spec, data, 10)
        assert once.n == again.n
        np.testing.assert_equal((once.update, once.votes), (again.update, again.votes))
    assert decode_accepted(asked, delta(), 2**31).n == 20
    far = decode_accepted(asked, delta(np.full(SCHEMA.size, 11.0, np.float32)), 10)  # refused before, or never
    np.testing.assert_array_equal(far.update, START + np.float32(11.0))


def test_a_delta_is_taken_from_the_start_else_from_the_anchor_else_from_nothing() -> None:
    doubles = START.astype(np.float64)
    anchored = replace(OWN, anchor=doubles)
    for task, name, vector in (
        (replace(FIT, start=doubles, anchor=DELTA), "start", START),
        (anchored, "anchor", START),
        (OWN, "zero", None),
        (replace(anchored, upload=False), "zero", None),
        (probe("loss"), "zero", None),
    ):
        found, base = delta_base(task)
        assert found == name
        assert (base is None) == (vector is None)
        assert base is None or base.dtype == np.float32
    assert question(base=BASE).vector == "update"
    assert (question(probe("grad", models=1)).vector, question(probe("loss")).vector) == ("grad", "")
    assert question(replace(OWN, upload=False)).vector == ""
