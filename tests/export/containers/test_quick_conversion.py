"""Tracing makes fewer of torch's fake tensors, and the files are the same to the last byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from export.compiler.program import compile_program
from export.containers import quick_conversion


class Halves(nn.Module):
    """[batch, 2, 4] -> [batch, 3] by views, broadcasts and several results of one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.unbind(1)
        scores: Tensor = self.last(torch.stack([first.exp(), second.t().t() * first.mean(-1, keepdim=True)], 1).amax(1))
        return scores


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    """What torch's fake tensors remember is of the whole process."""
    FakeTensorMode.cache_clear()
    yield
    FakeTensorMode.cache_clear()


def written(patch: pytest.MonkeyPatch) -> tuple[set[str], int]:
    """Of one small program for torch and ONNX: the hashes of its files, and how often a tensor is made from a shape."""
    FakeTensorMode.cache_clear()
    made = list[object]()
    own = FakeTensorMode._output_from_cache_entry

    def counted(mode: FakeTensorMode, *given: object) -> object:
        made.append(given)
        return own(mode, *given)  # type: ignore[arg-type]  # whatever torch gives

    patch.setattr(FakeTensorMode, "_output_from_cache_entry", counted)
    torch.manual_seed(0)
    return set(compile_program(Halves(), (2, 4), engines=("pt2", "onnx")).files), len(made)


def test_results_of_known_keys_are_made_once_for_the_same_files() -> None:
    with pytest.MonkeyPatch.context() as patch:
        files, made = written(patch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quick_conversion, "_known_keys_not_tried", nullcontext)
        slow_files, slow_made = written(patch)
    assert files == slow_files
    assert made < 0.8 * slow_made
