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


@pytest.mark.parametrize(
    ("volumes", "said"),
    [
        (nn.Conv3d(2, 4, 3, groups=2), "no Conv3d with groups"),
        (nn.Conv3d(2, 2, 3, padding=1, groups=2), "no Conv3d with groups"),
        (nn.ConvTranspose3d(2, 2, 2), "ConvTranspose3d"),
        (nn.ConvTranspose3d(2, 2, 3, stride=2, padding=1), "ConvTranspose3d"),
        (nn.Sequential(nn.Conv3d(2, 2, 1), nn.Conv3d(2, 2, 3, stride=2)), "Conv3d with strides behind the first"),
    ],
)
def test_what_the_converter_cannot_take_is_refused_by_its_name_and_does_not_end_the_process(
    volumes: nn.Module, said: str
) -> None:
    width = volumes(torch.zeros(1, 2, 4, 4, 4)).numel()
    network = nn.Sequential(volumes, nn.Flatten(), nn.Linear(width, 2))
    with pytest.raises(ProgramRefused, match=f"cannot be written for litert: its converter takes .*{said}"):
        compile_program(network, (2, 4, 4, 4), batch=2, engines=("litert",))


def test_a_file_of_a_center_with_transposed_volumes_is_refused_too() -> None:
    with pytest.raises(ValueError, match="transposed convolution of volumes"):
        to_named_tflite(PaddedVolume(nn.ConvTranspose3d(2, 2, 2)), {"x": torch.randn(1, 2, 3, 3, 3)})
