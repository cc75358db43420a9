"""While one thread compiles a model, others go on with torch as it is, and a second compilation waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's custom

from edge_client.errors import ProgramRefused
from export.compiler import forward_overrides
from export.compiler.forward_pass import tracing_context, uncompiled
from export.compiler.graph_passes.vmap_levels import no_gradients
from export.compiler.program import compile_program
from export.compiler.signatures.lasting_state import hooks_on_gradients


def trained_in_half_precision() -> torch.dtype:
    """One step's gradient of a weight, with a hook; -> what the forward pass computed in."""
    weight, seen = torch.ones(2, 2, requires_grad=True), list[torch.Tensor]()
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.ones(2, 2) @ weight
    out.register_hook(seen.append)  # type: ignore[no-untyped-call]
    out.sum().backward()  # type: ignore[no-untyped-call]
    assert len(seen) == 1
    return out.dtype


def test_another_thread_trains_as_ever_while_a_forward_pass_is_traced() -> None:
    with ThreadPoolExecutor(1) as other, tracing_context(), no_gradients():
        assert other.submit(trained_in_half_precision).result(60) is torch.bfloat16


def test_another_thread_has_torchs_linear_layer_while_attention_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, callers = forward_overrides.INSIDE_ATTENTION["linear"], set[int]()
    attention, x = nn.MultiheadAttention(4, 1), torch.ones(3, 2, 4)

    def linear(*args: torch.Tensor) -> torch.Tensor:
        callers.add(threading.get_ident())
        other.submit(F.linear, torch.ones(1, 2), torch.ones(1, 2)).result(60)
        return cast("torch.Tensor", ours(*args))

    monkeypatch.setitem(forward_overrides.INSIDE_ATTENTION, "linear", linear)
    with ThreadPoolExecutor(1) as other, tracing_context():
        attention(x, x, x)
    assert callers == {threading.get_ident()}


def test_another_threads_hooks_are_called_while_those_of_a_model_are_looked_for() -> None:
    class Trains(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found.append(other.submit(trained_in_half_precision).result(60))
            return super().forward(x)

    found = list[torch.dtype]()
    with ThreadPoolExecutor(1) as other:
        assert not hooks_on_gradients(Trains(2, 2), torch.ones(1, 2))
    assert found == [torch.bfloat16]


def test_two_threads_that_compile_leave_torch_as_it_was() -> None:
    """The second one begins while the first is at work; the first, were it not alone, would put back too early."""
    began, asked = threading.Event(), threading.Event()
    before = torch.autocast.__enter__, torch._C._get_nnpack_enabled(), torch._C._get_mkldnn_enabled()
    order = list[str]()

    def first() -> None:
        with uncompiled(), tracing_context():
            began.set()
            asked.wait(60)
            order.append("first ends")

    def second() -> None:
        began.wait(60)
        asked.set()
        with uncompiled(), tracing_context():
            order.append("second begins")

    with ThreadPoolExecutor(2) as both:
        for done in [both.submit(first), both.submit(second)]:
            done.result(60)
    assert order == ["first ends", "second begins"]
    assert before == (torch.autocast.__enter__, torch._C._get_nnpack_enabled(), torch._C._get_mkldnn_enabled())


class Filled(nn.Linear):
    """Makes a tensor without a dtype; fails where it is told to."""

    fails_from = 99

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails_from <= x.shape[0]:
            raise RuntimeError("no such batch")
        return super().forward(x + torch.ones(self.in_features))


def switches() -> list[object]:
    found = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    usual = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    return [*found, torch.is_anomaly_enabled(), *usual]


@contextmanager
def usual_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "around",
    [
        torch.no_grad,
        torch.inference_mode,
        partial(torch.autocast, "cpu", torch.bfloat16),
        torch.autograd.detect_anomaly,
        partial(usual_dtype, torch.float64),
        partial(torch.device, "meta"),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_switches_of_torch_around_a_compilation_count_for_nothing_and_stay(
    around: Callable[[], AbstractContextManager[object]],
) -> None:
    with around():
        before, module = switches(), Filled(4, 3, device="cpu")
        assert compile_program(module, (4,), engines=("onnx",)).program.parity["onnx"] < 1e-5
        assert switches() == before
        module.fails_from = 13  # no batch of the checks, but that of the trace
        with pytest.raises(ProgramRefused, match="no such batch"):
            compile_program(module, (4,), engines=("onnx",))
        assert switches() == before


def test_a_search_for_the_order_of_an_einsum_that_the_user_turned_off_stays_off() -> None:
    """Torch's own context, entered where it is off, ends in a ValueError."""
    with torch.backends.opt_einsum.flags(enabled=False):
        with tracing_context():
            pass
        assert not torch.backends.opt_einsum.enabled
