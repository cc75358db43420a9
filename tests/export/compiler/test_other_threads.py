"""While one thread compiles a model, others go on with torch as it is, and a second compilation waits."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from export.compiler.forward_pass import tracing_context, uncompiled
from export.compiler.graph_passes.vmap_levels import no_gradients
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


def test_a_search_for_the_order_of_an_einsum_that_the_user_turned_off_stays_off() -> None:
    """Torch's own context, entered where it is off, ends in a ValueError."""
    with torch.backends.opt_einsum.flags(enabled=False):
        with tracing_context():
            pass
        assert not torch.backends.opt_einsum.enabled
