"""Guides that tests of a router and of its file share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from coordinator.nearest.fleet_profiles import make_profile
from edge_client.protocol.nearest.input_moments import moments_of
from edge_client.protocol.nearest.router import (
    FeatureBaseline,
    FeatureRule,
    InputSketch,
    LocalRound,
    Router,
)

K = 3
TWO = np.array([[1.0, 0.5], [2.0, 1.0]])
GUIDE = Router(
    centers=K,
    sizes=(1, 16),
    usual={
        "loss": FeatureBaseline(
            middle=np.array([1.0, 0.5]),
            spread=np.array([0.5, 0.25]),
            well=np.array([1.5, 0.75]),
            none=np.array([2.5, 1.25]),
        ),
        "sketch": FeatureBaseline(
            middle=np.array([2.0, 1.0]),
            spread=np.array([1.0, 0.5]),
            well=np.array([4.0, 1.5]),
            none=np.array([6.0, 2.0]),
        ),
    },
    ways={
        "loss": FeatureRule(features=("loss",), weights=TWO[:, :1]),
        "labelled": FeatureRule(features=("loss", "sketch"), weights=TWO),
    },
    sketch=InputSketch(seed=1, width=2.0, centers=np.array([[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]])),
    round=LocalRound(representation="classifier", lr=0.1, momentum=0.9, batch=8, steps=3, centers=np.eye(K)),
    inputs=make_profile([moments_of(np.random.default_rng(0).normal(size=(30, 5)))]),
)

FEW = replace(
    GUIDE,
    sizes=(4, 16),
    ways={"loss": GUIDE.ways["loss"]},
    usual={
        "loss": FeatureBaseline(
            middle=np.array([1.0, 1.0]),
            spread=np.array([1.0, 1.0]),
            well=np.array([2.0, 2.0]),
            none=np.array([3.0, 3.0]),
            devices=[4, 9],
        ),
        "votes": FeatureBaseline(
            middle=np.zeros(2), spread=np.ones(2), well=np.zeros(2), none=np.ones(2), devices=[9, 9]
        ),
    },
)
