"""Sketches: what a device says of its inputs and of its update in a few numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edge_client.protocol.nearest import sketch
from tests.support import softmax_program

SCHEMA = softmax_program.schema()


def test_the_distance_of_two_sketches_is_that_of_the_distributions_under_a_gaussian_kernel() -> None:
    """Two single samples: the squared distance is 2 - 2 exp(-|x - y|^2 / (2 width^2)) (Rahimi and Recht 2007)."""
    x, y, width, size = np.zeros((1, 3)), np.full((1, 3), 0.7), 1.5, 4_096
    first, second = (sketch.random_features(each, seed=1, size=size, width=width) for each in (x, y))
    expected = 2 - 2 * np.exp(-np.square(x - y).sum() / (2 * width**2))
    assert np.square(first - second).mean() == pytest.approx(expected, rel=0.1)  # the error is about 1 / sqrt(size)


def test_a_count_sketch_keeps_lengths_and_angles_of_each_row() -> None:
    rows = np.random.default_rng(0).normal(size=(3, 5_000)) + np.array([[0.0], [1.0], [-1.0]])
    short = sketch.count_sketch(rows, sketch.MAX_SKETCH_SIZE)
    assert short.shape == (3, sketch.MAX_SKETCH_SIZE)
    norms = np.linalg.norm(rows, axis=1)
    # the error of an inner product is about |a| |b| / sqrt(4096), 1.6 %
    np.testing.assert_allclose(
        short @ short.T / np.outer(norms, norms), rows @ rows.T / np.outer(norms, norms), atol=0.1
    )


def test_samples_wider_than_a_board_can_hold_are_folded_and_others_are_not() -> None:
    wide = np.random.default_rng(0).normal(size=(2, sketch.MAX_INPUT_WIDTH + 1))
    folded, whole = sketch.count_sketch(wide, sketch.MAX_INPUT_WIDTH), wide[:, : sketch.MAX_INPUT_WIDTH]
    of_folded = sketch.random_features(folded, seed=1, size=8, width=9.0)
    np.testing.assert_array_equal(sketch.random_features(wide, seed=1, size=8, width=9.0), of_folded)
    rng = np.random.Generator(np.random.PCG64(1))
    waves = whole @ rng.standard_normal((sketch.MAX_INPUT_WIDTH, 8)) / 9.0
    expected = np.sqrt(2) * np.cos(waves + rng.uniform(0, 2 * np.pi, 8)).mean(axis=0)
    np.testing.assert_allclose(sketch.random_features(whole, seed=1, size=8, width=9.0), expected)


def test_a_direction_has_length_one_and_looks_only_at_what_the_run_compares() -> None:
    first, *others = SCHEMA.slices
    schema = replace(SCHEMA, classifier=(first,))
    delta = np.random.default_rng(0).normal(size=schema.size)
    changed = delta.copy()
    for name in others:
        changed[schema.slices[name]] += 1.0
    for compared, same in (("all", False), ("classifier", True)):
        seen = sketch.update_direction(delta, schema, compared)
        assert seen.shape == (sketch.UPDATE_SKETCH_SIZE,)
        assert np.linalg.norm(seen) == pytest.approx(1)
        np.testing.assert_allclose(sketch.update_direction(7 * delta, schema, compared), seen)
        assert np.array_equal(sketch.update_direction(changed, schema, compared), seen) == same
        assert not sketch.update_direction(np.zeros(schema.size), schema, compared).any()
    whole, without = (sketch.update_direction(delta, s, "all") for s in (schema, replace(SCHEMA, classifier=())))
    np.testing.assert_array_equal(whole, without)


def test_the_numbers_of_a_sketch_are_those_of_every_client_and_guide() -> None:
    assert (sketch.INPUT_SKETCH_SIZE, sketch.UPDATE_SKETCH_SIZE) == (256, 384)
    assert (sketch.MAX_INPUT_WIDTH, sketch.MAX_SKETCH_SIZE) == (1_024, 4_096)
