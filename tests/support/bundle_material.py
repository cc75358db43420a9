"""What a small bundle of two centers is written from."""

from __future__ import annotations

from typing import Any

import numpy as np

from edge_client.protocol.task import Array, Flat
from export.bundle.bundle_contents import BundleSource, LabelledSamples
from export.bundle.verify_centers import torch_logits
from export.compiler.program import vector_of
from tests.support.programs import compiled, model


def centers() -> list[Flat]:
    start = vector_of(model("digits-mlp").module, compiled("digits-mlp").program.schema)
    return [start, start * np.float32(0.5)]


def reference() -> Array:
    return np.random.default_rng(1).random((4, 1, 8, 8), dtype=np.float32)


def judged() -> LabelledSamples:
    """The reference with what is known of it: two devices, one per center, labelled as center 0 answers."""
    x = reference()
    y = torch_logits(model("digits-mlp").module, x).argmax(axis=-1)
    return LabelledSamples(x=x, y=y, device=np.array(["a", "a", "b", "b"]), center=np.array([0, 0, 1, 1]))


def material(**settings: Any) -> BundleSource:  # noqa: ANN401 - Material's own
    made = compiled("digits-mlp")
    usual: dict[str, Any] = {
        "program": made.program,
        "files": made.files,
        "centers": centers(),
        "cards": [{"devices": 4}, {"devices": 8}],
        "reference": judged(),
        "calibration": judged(),
    }
    return BundleSource(**usual | settings)
