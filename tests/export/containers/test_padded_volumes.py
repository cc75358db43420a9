"""A convolution of volumes with strides and padding has torch's values in a TFLite file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edge_client.errors import ProgramRefused
from export.compiler.program import compile_program
from export.containers.write_tflite import open_tflite, to_named_tflite


class PaddedVolume(nn.Sequential):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": super().forward(x)}  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "settings",
    [
        {"stride": 2, "padding": 1},
        {"stride": (1, 2, 3), "padding": (2, 0, 1)},
        {"stride": (2, 1, 1), "padding": (1, 1, 0)},
    ],
)
def test_a_strided_volume_with_padding_is_converted(settings: Any) -> None:  # noqa: ANN401
    module, x = PaddedVolume(nn.Conv3d(2, 4, 3, **settings)), torch.randn(1, 2, 5, 6, 7)
    got = open_tflite(to_named_tflite(module, {"x": x}), "serving_default")({"x": x.numpy()})
    np.testing.assert_allclose(got["y"], module(x)["y"].detach(), rtol=1e-5, atol=1e-5)


def test_a_model_of_strided_volumes_trains_in_litert() -> None:
    network = nn.Sequential(nn.Conv3d(1, 2, 3, stride=(1, 2, 2), padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(54, 2))
    made = compile_program(network, (1, 3, 6, 6), batch=2, engines=("litert",))
    assert made.program.parity["litert"] < 1e-5


def test_groups_are_refused_and_do_not_end_the_process() -> None:
    network = nn.Sequential(nn.Conv3d(2, 2, 3, padding=1, groups=2), nn.Flatten(), nn.Linear(16, 2))
    with pytest.raises(ProgramRefused, match="cannot be written for litert"):
        compile_program(network, (2, 2, 2, 2), batch=2, engines=("litert",))
