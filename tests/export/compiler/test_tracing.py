"""What cannot become a training program is refused by name, before anything is sent to a device."""

from __future__ import annotations

import pytest
from torch import nn

from edge_client.errors import ProgramRefused
from export.compiler.forward_pass import ForwardPasses
from export.compiler.program import make_source
from export.compiler.tracing import trace_function


def refusal(module: nn.Module, *, input: tuple[int, ...] = (1, 8, 8)) -> str:  # noqa: A002 - the manifest's word
    source = make_source(module, input=input)
    with pytest.raises(ProgramRefused) as refused:
        trace_function(ForwardPasses(source), "step", batch=4, dynamic=False)
    return str(refused.value)


def test_dropout_with_probability_zero_is_no_dropout() -> None:
    source = make_source(nn.Sequential(nn.Flatten(), nn.Dropout(0.0), nn.Linear(64, 4)), input=(1, 8, 8))
    trace_function(ForwardPasses(source), "step", batch=4, dynamic=True)


def test_unequal_windows_of_an_adaptive_maximum_are_refused_with_their_layer_and_what_to_do() -> None:
    text = refusal(nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Linear(32, 4)))
    assert "layer 1 (AdaptiveMaxPool2d)" in text
    assert "[6, 6] does not divide into [4, 4] equal windows; choose sizes that do" in text
