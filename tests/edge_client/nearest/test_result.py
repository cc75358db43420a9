"""What the answer of `nearest` says in words and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from edge_client.nearest import cli
from edge_client.nearest.choose_center import Selection
from edge_client.nearest.result import no_center_answer


@pytest.mark.parametrize(
    ("center", "fit", "headline"),
    [
        (1, "badly", "porch: center 1 (by loss): fits badly"),
        (1, None, "porch: center 1 (by loss): whether it fits is not known"),
        (None, "none", "porch: no center fits this data"),
        (None, None, "porch: it is not known whether a center fits this data, so none is taken"),
    ],
)
def test_the_headline_tells_apart_what_does_not_fit_and_what_is_not_known(
    center: int | None, fit: str | None, headline: str
) -> None:
    chosen = Selection(center=center, best=1, way="loss", samples=3, ranking=(1, 0), fit=fit)
    answer = no_center_answer("porch", chosen, fetched=0, signed_by=None)
    said = {**answer.to_json(), "center": center}
    assert (said["center"], said["fit"]) == (center, fit)
    assert type(answer)(**{**vars(answer), "center": center}).in_words().splitlines()[0] == headline


@pytest.mark.parametrize(("first", "words"), [(0.5, ", hardly ahead of center 0"), (0.7, ""), (None, "")])
def test_the_headline_says_when_the_samples_hardly_tell_the_first_two_centers_apart(
    first: float | None, words: str
) -> None:
    probabilities = {} if first is None else {1: first, 0: 1 - first}
    chosen = Selection(
        center=1, best=1, way="entropy", samples=3, ranking=(1, 0), fit="well", probabilities=probabilities
    )
    answer = no_center_answer("porch", chosen, fetched=0, signed_by=None)
    said = type(answer)(**{**vars(answer), "center": 1}).in_words().splitlines()[0]
    assert said == f"porch: center 1 (by entropy){words}: fits well"


def test_a_selection_that_is_hardly_ahead_says_so_before_how_it_fits() -> None:
    facts: dict[str, Any] = {"center": 1, "best": 1, "way": "entropy", "samples": 3, "ranking": (1, 0), "fit": "well"}
    unsure = Selection(**facts, probabilities={1: 0.51, 0: 0.49})
    assert "center 1 is hardly ahead of center 0: it fits well, with a probability of 51%" in repr(unsure)
    assert "center 1 fits well" in repr(Selection(**facts, probabilities={1: 0.9, 0: 0.1}))
    assert "center 1 fits well" in repr(Selection(**facts))


def test_a_selection_shows_that_nothing_was_taken_because_nothing_is_known() -> None:
    unknown = Selection(center=None, best=1, way="entropy", samples=3, ranking=(1, 0))
    assert "center 1 is the nearest, whether it fits is not known" in repr(unknown)


def test_predictions_have_the_names_of_the_devices_schema_and_numbers_where_it_has_none() -> None:
    chosen = Selection(center=1, best=1, way="loss", samples=3, ranking=(1, 0), fit="well")
    answer = replace(no_center_answer("porch", chosen, fetched=0, signed_by=None), n=3, predicted={0: 2, 2: 1})
    assert "of 3 samples it says class 0: 2, class 2: 1" in answer.in_words()
    assert "of 3 labels of 1 samples it says class 0: 2" in replace(answer, n=1).in_words()
    named = replace(answer, class_names=("sitting", "walking"))
    assert "it says sitting: 2, class 2: 1" in named.in_words()
    assert named.to_json()["class_names"] == ("sitting", "walking")


def test_targets_that_are_no_classes_have_an_error_and_a_gain_in_words() -> None:
    """The line of personal steps had no number, and nothing told how good the center is."""
    chosen = Selection(center=1, best=1, way="loss", samples=3, ranking=(1, 0), fit="well")
    kept = {"steps": 20, "file": "personal-1.safetensors", "model": None, "before": None, "accuracy": None}
    answer = replace(no_center_answer("porch", chosen, fetched=0, signed_by=None), loss=0.125, n=7)
    assert answer.in_words().splitlines()[-1] == "  mean squared error 0.125 on 7 samples"
    held_out = replace(answer, personal={**kept, "loss_before": 0.5, "loss": 0.25})
    assert "20 local steps: loss 0.5 before, 0.25 after; kept in" in held_out.in_words()
    assert "20 local steps; kept" in replace(answer, personal={**kept, "loss_before": None, "loss": None}).in_words()
    classes = replace(answer, accuracy=0.5, personal={**kept, "before": 0.5, "accuracy": 0.75, "loss": 0.1})
    assert "accuracy 50.0% on 7 samples" in classes.in_words()
    assert "20 local steps: accuracy 50.0% before, 75.0% after" in classes.in_words()


def test_the_loss_of_soft_labels_is_named_cross_entropy() -> None:
    chosen = Selection(center=1, best=1, way="loss", samples=3, ranking=(1, 0), fit="well")
    answer = replace(no_center_answer("porch", chosen, fetched=0, signed_by=None), loss=0.125, n=7, predicted={0: 7})
    assert answer.in_words().splitlines()[-1] == "  cross-entropy 0.125 on 7 samples"


def test_a_loss_that_no_json_holds_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    """As of an outlier, or of logits that rule a true class out: the line was no JSON for other readers than Python."""
    chosen = Selection(center=1, best=1, way="loss", samples=3, ranking=(1, 0), fit="well")
    answer = no_center_answer("porch", chosen, fetched=0, signed_by=None)
    told = replace(answer, loss=math.inf, n=7, personal={"steps": 1, "loss_before": math.nan, "loss": 0.5})
    cli._print(told, as_json=True)

    def refuse(word: str) -> None:
        raise ValueError(word)

    read = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert (read["loss"], read["personal"]) == (None, {"steps": 1, "loss_before": None, "loss": 0.5})
    assert read["class_names"] == []
