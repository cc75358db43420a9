"""What the answer of `nearest` says in words and as JSON."""

from __future__ import annotations

import pytest

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


def test_a_selection_shows_that_nothing_was_taken_because_nothing_is_known() -> None:
    unknown = Selection(center=None, best=1, way="entropy", samples=3, ranking=(1, 0))
    assert "center 1 is the nearest, whether it fits is not known" in repr(unknown)
