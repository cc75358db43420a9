from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.nearest.answer import answer_near
from edge_client.errors import Malformed
from edge_client.protocol import codecs
from edge_client.protocol.blocks import manifest_of
from edge_client.protocol.messages import read_message, write_message
from edge_client.protocol.nearest.catalog import Catalog, CatalogCenter
from edge_client.protocol.nearest.router import FeatureBaseline, Router
from edge_client.protocol.nearest.selection_rule import GUESSING_UNKNOWN, guessing_loss
from edge_client.protocol.task import Reply
from export.serve.nearest import answer_nearest
from tests.support.softmax_program import program, schema
from tests.support.virtual_federation import Anything

if TYPE_CHECKING:
    from export.bundle.reader import Bundle

MODEL = manifest_of(b"model", "model")
FILES = {"onnx": manifest_of(b"onnx", "container"), "tflite": manifest_of(b"tflite", "container")}


def catalog(centers: int = 3, abstain: float = 2.0) -> Catalog:
    return Catalog(
        version=1,
        program=replace(manifest_of(b"program", "program"), key="0" * 16, sig="0" * 128),
        containers={"onnx": manifest_of(b"evaluate", "container")},
        centers=tuple(CatalogCenter(model=MODEL, devices=k, files=FILES) for k in range(centers)),
        abstain=abstain,
    )


def question(losses: list[float], **changes: Anything) -> dict[str, Any]:
    data = codecs.encode_stats(Reply(n=5, losses=np.array(losses)), schema())
    return {"how": "loss", "stats": manifest_of(data, "stats", inline=True).to_json(), "n": 5, **changes}


@given(st.lists(st.floats(0, 100), min_size=3, max_size=3))
def test_the_nearest_center_is_that_of_least_loss_unless_none_fits(losses: list[float]) -> None:
    answer = answer_near(catalog(), question(losses), schema())
    assert answer["distance"] == min(losses)
    if min(losses) > 2.0:
        assert answer["center"] is None
    else:
        assert losses[answer["center"]] == min(losses)
    assert sorted(a["distance"] for a in answer["alternatives"]) == [a["distance"] for a in answer["alternatives"]]


def test_a_question_that_cannot_be_answered_is_refused() -> None:
    with pytest.raises(Malformed, match="by loss"):
        answer_near(catalog(), question([1.0, 2.0, 3.0], how="round"), schema())
    with pytest.raises(Malformed, match="candidates"):
        answer_near(catalog(), question([1.0, 2.0]), schema())
    with pytest.raises(Malformed, match="inline"):
        answer_near(catalog(), question([1.0] * 3, stats=manifest_of(b"x", "stats").to_json()), schema())
    votes = codecs.encode_stats(Reply(n=5, votes=np.array([1, 2, 2])), schema())
    with pytest.raises(Malformed, match="no losses"):
        answer_near(catalog(), question([0.0], stats=manifest_of(votes, "stats", inline=True).to_json()), schema())


@pytest.mark.parametrize(("loss", "fit", "center"), [(0.3, "well", 1), (1.2, "badly", 1), (1.8, "none", None)])
def test_a_router_says_how_the_nearest_center_fits(loss: float, fit: str, center: int | None) -> None:
    middle, spread, well, none = np.array([[0.5], [0.1], [1.0], [1.5]])
    usual = FeatureBaseline(middle=middle, spread=spread, well=well, none=none)
    router = Router(centers=3, sizes=(5,), usual={"loss": usual}, ways={})
    answer = answer_near(catalog(), question([1.9, loss, 1.9]), schema(), router)
    assert (answer["center"], answer["fit"]) == (center, fit)


def test_a_question_without_its_number_of_samples_has_the_same_answer_over_mqtt_and_http() -> None:
    """Limits for one sample are wider than those for twenty: MQTT took one, HTTP twenty."""
    usual = FeatureBaseline(
        middle=np.array([0.5, 0.5]), spread=np.array([0.1, 0.1]), well=np.array([1.6, 0.6]), none=np.array([1.8, 0.8])
    )
    router = Router(centers=3, sizes=(1, 20), usual={"loss": usual}, ways={})
    asked = question([1.9, 1.0, 1.9])
    silent = {key: value for key, value in asked.items() if key != "n"}
    answers = [answer_near(catalog(), said, schema(), router) for said in ({**asked, "n": 20}, silent)]
    http = SimpleNamespace(router=router, manifest={"centers": [{}] * 3}, program=program())
    answers.append(answer_nearest(cast("Bundle", http), {"how": "loss", "losses": [1.9, 1.0, 1.9]}))
    assert [(answer["center"], answer["fit"]) for answer in answers] == [(None, "none")] * 3


def test_a_center_that_only_guesses_does_not_fit() -> None:
    assert guessing_loss(program()) == pytest.approx(np.log(program().classes))
    assert np.isfinite(guessing_loss(replace(program(), loss="squared-error")))


def test_the_answer_to_losses_below_zero_is_a_message_that_a_device_reads() -> None:
    """A loss of the user's own may be below zero; the device asked again and again for an answer that was refused."""
    answer = answer_near(catalog(abstain=GUESSING_UNKNOWN), question([0.5, -0.25, -0.125]), schema())
    message = write_message("near", ident="c1-1", t_ms=0, epoch=1, re="d1-1", **answer)
    read = read_message(message, "t")
    assert (read["center"], read["distance"]) == (1, -0.25)
    assert [other["distance"] for other in read["alternatives"]] == [-0.125, 0.5]
