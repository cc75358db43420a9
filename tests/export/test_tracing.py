"""What cannot become a training program is refused by name, before anything is sent to a device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from edge_client.errors import ProgramRefused
from export.program import compile_program, source_of
from export.tracing import trace


def refusal(module: nn.Module, *, input: tuple[int, ...] = (1, 8, 8)) -> str:  # noqa: A002 - the manifest's word
    source = source_of(module, name="mine", input=input, classes=4)
    with pytest.raises(ProgramRefused) as refused:
        trace(source, "step", batch=4, dynamic=False)
    return str(refused.value)


def test_dropout_is_refused_with_its_layer_and_what_to_do() -> None:
    text = refusal(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 4)))
    assert "layer 2 (Dropout)" in text
    assert "random" in text
    assert "hint: " in text
    assert "p = 0" in text


def test_dropout_is_refused_even_where_only_inference_is_traced() -> None:
    source = source_of(
        nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 4)), name="mine", input=(1, 8, 8), classes=4
    )
    with pytest.raises(ProgramRefused, match="Dropout"):
        trace(source, "infer", batch=4, dynamic=False)


def test_dropout_with_probability_zero_is_no_dropout() -> None:
    source = source_of(
        nn.Sequential(nn.Flatten(), nn.Dropout(0.0), nn.Linear(64, 4)), name="mine", input=(1, 8, 8), classes=4
    )
    trace(source, "step", batch=4, dynamic=True)


def test_overlapping_max_pooling_is_refused_with_its_layer() -> None:
    text = refusal(nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(3, 1), nn.Flatten(), nn.Linear(32, 4)))
    assert "layer 1 (MaxPool2d)" in text
    assert "overlapping" in text


def test_a_transposed_convolution_is_refused_with_its_layer() -> None:
    text = refusal(nn.Sequential(nn.ConvTranspose2d(1, 1, 2), nn.Flatten(), nn.Linear(81, 4)))
    assert "layer 0 (ConvTranspose2d)" in text
    assert "transposed" in text


class Sorting(nn.Module):
    """An operator that inference runtimes do not share."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sort(x.flatten(1))[0])  # type: ignore[no-any-return]


def test_an_unknown_operator_is_refused_by_its_name() -> None:
    assert "aten.sort" in refusal(Sorting())


class Branching(nn.Module):
    """Looks at values to decide what to do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1) if x.sum() > 0 else -x.flatten(1))  # type: ignore[no-any-return]


def test_a_branch_on_values_is_refused_and_not_baked_in() -> None:
    assert "cannot be traced" in refusal(Branching())


def test_tracing_leaves_torchs_global_generator_as_it_was() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 4))
    before = torch.random.get_rng_state()
    refusal(module)
    assert torch.equal(torch.random.get_rng_state(), before)


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "conv": lambda c: nn.Conv2d(c, c, 3, padding=1),
    "strided": lambda c: nn.Conv2d(c, c, 3, stride=2, padding=1),
    "depthwise": lambda c: nn.Conv2d(c, c, 3, padding=1, groups=c),
    "batch-norm": nn.BatchNorm2d,
    "group-norm": lambda c: nn.GroupNorm(2, c),
    "relu": lambda _: nn.ReLU(),
    "gelu": lambda _: nn.GELU(),
    "silu": lambda _: nn.SiLU(),
    "tanh": lambda _: nn.Tanh(),
    "max-pool": lambda _: nn.MaxPool2d(2),
    "avg-pool": lambda _: nn.AvgPool2d(2),
    "overlap": lambda _: nn.MaxPool2d(3, 1),
    "dropout": lambda _: nn.Dropout2d(),
}
REFUSED = {"overlap", "dropout"}


@settings(max_examples=10)
@given(names=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=3), channels=st.sampled_from([2, 4]))
def test_a_random_architecture_either_matches_torch_or_is_refused_by_name(names: list[str], channels: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Conv2d(1, channels, 1), *(LAYERS[name](channels) for name in names), nn.Flatten())
        width = body.eval()(torch.zeros(1, 1, 16, 16)).shape[1]
        module = nn.Sequential(body, nn.Linear(width, 4))
    expected = pytest.raises(ProgramRefused, match=r"layer 0\.") if REFUSED & set(names) else nullcontext()
    with expected:  # compiling measures every function of the written file against torch, and refuses what differs
        compile_program(module, name="drawn", input=(1, 16, 16), classes=4, engines=("pt2",))
