"""A picture is readable on the ground that the user's style of matplotlib has; a report does not follow that style."""

from __future__ import annotations

import re

import matplotlib.pyplot as plt
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from emulator.api.pictures import draw_comparison
from emulator.reports import plots

RUNS = {name: [[0.1, 0.2], [0.2, 0.3]] for name in "abcdefgh"}  # as many as there are colours, one of which is black
STYLES = ["default", "dark_background", "ggplot", "Solarize_Light2", "grayscale"]


def brightness(colour: object) -> float:
    return sum(to_rgb(colour)) / 3  # type: ignore[arg-type]


def words_and_lines(axes: Axes) -> list[object]:
    legend = axes.get_legend()
    assert legend is not None
    words = [axes.xaxis.label, axes.title, *axes.get_xticklabels(), *axes.get_yticklabels(), *legend.get_texts()]
    return [*(word.get_color() for word in words), *(line.get_color() for line in axes.get_lines())]


@pytest.mark.parametrize("style", STYLES)
def test_words_and_lines_stand_out_from_the_ground_of_each_style(style: str) -> None:
    with plt.style.context(style):
        (axes,) = draw_comparison(RUNS, "accuracy").axes
    ground = brightness(axes.get_facecolor())
    assert all(abs(brightness(colour) - ground) > 0.25 for colour in words_and_lines(axes))


def test_a_transparent_ground_is_no_dark_one() -> None:
    with plt.rc_context({"figure.facecolor": "none"}):
        (axes,) = draw_comparison(RUNS, "accuracy").axes
    assert brightness(axes.xaxis.label.get_color()) < 0.5


@pytest.mark.parametrize("style", STYLES)
def test_the_picture_of_a_page_has_the_same_colours_whatever_the_style(style: str) -> None:
    """A page turns these into variables, so that it can be dark."""

    def colours() -> set[str]:
        figure = plots.make_figure(3, 2, lambda axes: plots.draw_curves(axes, {"a": [0.1, 0.2]}, title="t"))
        return set(re.findall(r"#[0-9a-f]{6}|var\(--[a-z0-9]+\)", plots.to_svg(figure)))

    plain = colours()
    assert {"var(--quiet)", "var(--line)"} <= plain
    with plt.style.context(style):
        assert colours() == plain
