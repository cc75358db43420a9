"""A phone's browser reads rows of several arrays, and trains a model with several inputs as Python's client does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_client.data.dataset import Dataset
from edge_client.protocol.samples.input_parts import row_size
from edge_client.protocol.task import Array, Fit
from edge_client.training import fit_probe
from edge_client.training.learner import EngineLearner
from export.compiler.program import CompilerOutput
from tests.support.architectures import PARTS
from tests.support.browser import Open
from tests.support.one_phone import KEPT, RATE, SAMPLES, SETTINGS, STEPS, TRAIN, one_phone, start_of
from tests.support.phone_page import csv, text
from tests.support.process_fleet import centers_in
from tests.support.programs import compiled, opened

pytestmark = [pytest.mark.broker, pytest.mark.browser, pytest.mark.slow]

MODEL = "tests.support.architectures:SEVERAL_INPUTS"
SCALE = 4  # which divides the floating point numbers alone
WHOLE_FROM = 1 + 25  # age and the image come before seen and words


def rows() -> tuple[Array, Array]:
    """[n, 38] as a table has them: age, image, seen, words; and labels that follow from all four."""
    rng = np.random.default_rng(0)
    age, image = rng.standard_normal((SAMPLES, 1)), rng.standard_normal((SAMPLES, 25))
    seen, words = rng.integers(2, size=(SAMPLES, 6)), rng.integers(11, size=(SAMPLES, 6))
    y = ((words * seen).sum(1) + (age[:, 0] > 0) + (image.sum(1) > 0)) % 3
    return np.concatenate([age, image, seen, words], axis=1).round(3).astype(np.float32), y.astype(np.int64)


def trained_in_python(made: CompilerOutput, folder: Path) -> dict[str, Array]:
    """One round on the samples that the page trains on, by Python's client."""
    x, y = rows()
    x[:, :WHOLE_FROM] /= SCALE
    learner, start = EngineLearner(opened(made, "onnx", folder), made.program), start_of(made, MODEL)
    task = Fit(start=start, anchor=None, lr=RATE, momentum=0.0, mu=0.0, steps=STEPS, batch=TRAIN, seed=0)
    return made.program.schema.split(fit_probe.run_fit(learner, task, Dataset(x[KEPT], y[KEPT])).vector)


def test_a_phone_trains_a_model_with_several_inputs_from_a_table_and_refuses_a_fraction_for_a_word(
    visit: Open, tmp_path: Path
) -> None:
    made = compiled(MODEL, engines=("onnx",))
    run = {"method": "fedavg", "num-rounds": 1, **SETTINGS}
    (x, y), table = rows(), tmp_path / "rows.csv"
    assert x.shape == (SAMPLES, row_size(PARTS))
    with one_phone(visit, tmp_path, made, MODEL, run) as (opened_page, take_part):
        page = opened_page.page
        text(
            page,
            "columns",
            "38 values .1 of age; 25 of image; 6 of seen: 0 or 1, .*; 6 of words: whole numbers, .*label",
        )
        page.fill("#scale", str(SCALE))
        table.write_bytes(csv(x[:1] + 0.5, y[:1]))
        page.set_input_files("#table", table)
        text(page, "trouble", "^line 2 has .* in seen, which takes 0 or 1$")
        table.write_bytes(csv(x, y))
        page.set_input_files("#table", table)
        text(page, "count", f"^{SAMPLES} in 3 classes")
        opened_page.shot("several-inputs")
        take_part()
    (center,), wanted = centers_in(tmp_path / "run", "fedavg"), trained_in_python(made, tmp_path)
    start = made.program.schema.split(start_of(made, MODEL))
    for name, weights in wanted.items():
        np.testing.assert_allclose(center[name], weights, atol=1e-4)
        assert np.abs(center[name] - start[name]).max() > 1e-3
