"""Random small architectures compile into what torch does, or are refused by name. `make architectures` tries many."""

from __future__ import annotations

from hypothesis import Phase, given, settings

from tests.figures.architectures import GOOD, judge
from tests.support.random_architectures import Architecture, architectures


@settings(max_examples=2, phases=[Phase.generate])  # each one compiles, for seconds: no time to shrink
@given(one=architectures(most=3))
def test_a_random_architecture_matches_torch_or_is_refused_by_name(one: Architecture) -> None:
    verdict, said = judge(one, "onnx")
    assert verdict in GOOD, said


def test_an_operator_that_no_device_shares_is_refused_with_its_layer() -> None:
    one = Architecture((("linear", (4, 5)), ("alien", ()), ("linear", (5, 3))), (4,), 0)
    verdict, said = judge(one, "onnx")
    assert verdict == "refused"
    assert "aten.special_i0e" in said
    assert "layer 1 (Alien)" in said
