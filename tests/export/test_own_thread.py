"""What one thread replaces in torch is replaced for it alone, whatever other threads replace meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from threading import Event, Thread

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's custom

from emulator.api.models import make_module
from export.compiler.forward_overrides import ForwardOverrides
from export.one_value_norm import batch_norm_of_one_value
from export.own_thread import ONE_AT_A_TIME, replaced_here


class Trainer:
    """A thread that begins and ends to train on batches of one value when it is told to."""

    def __init__(self) -> None:
        self._thread, self._held = ThreadPoolExecutor(1), ExitStack()

    def begin(self) -> None:
        self._thread.submit(self._held.enter_context, batch_norm_of_one_value()).result(60)

    def end(self) -> None:
        self._thread.submit(self._held.close).result(60)

    def takes_one_value(self) -> bool:
        return self._thread.submit(one_value_is_taken).result(60)

    def stop(self) -> None:
        self._thread.shutdown()


def one_value_is_taken() -> bool:
    try:
        nn.BatchNorm1d(2).train()(torch.ones(1, 2))
    except ValueError:
        return False
    return True


@pytest.fixture
def trainers() -> Iterator[tuple[Trainer, Trainer]]:
    both = Trainer(), Trainer()
    yield both
    for trainer in both:
        trainer.stop()


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_torch_refuses_one_value_again_after_two_threads_that_overlap(
    trainers: tuple[Trainer, Trainer], first_to_end: int
) -> None:
    own, early, late = F.batch_norm, trainers[first_to_end], trainers[1 - first_to_end]
    for trainer in trainers:
        trainer.begin()
    assert [trainer.takes_one_value() for trainer in trainers] == [True, True]
    assert not one_value_is_taken()
    early.end()
    assert (early.takes_one_value(), late.takes_one_value()) == (False, True)
    late.end()
    assert not late.takes_one_value()
    assert F.batch_norm is own


def test_the_innermost_of_one_threads_replacements_counts_and_an_exception_ends_it() -> None:
    with replaced_here(F, "relu", lambda _: "outer"):
        with suppress(RuntimeError), replaced_here(F, "relu", lambda _: "inner"):
            assert F.relu(torch.ones(1)) == "inner"
            raise RuntimeError
        assert F.relu(torch.ones(1)) == "outer"
    assert F.relu(torch.ones(1)) == 1


def test_a_later_thread_does_not_get_what_a_dead_one_left_replaced() -> None:
    left, found = replaced_here(F, "relu", lambda _: "dead"), list[object]()
    for call in (left.__enter__, lambda: found.append(F.relu(torch.ones(1)))):
        thread = Thread(target=call)  # the second one gets the number of the first
        thread.start()
        thread.join(60)
    assert found == [1]
    left.__exit__(None, None, None)
    assert F.relu(torch.ones(1)) == 1


def test_of_two_replacements_the_outer_one_may_end_first() -> None:
    outer, inner = (replaced_here(F, "relu", lambda _, word=word: word) for word in ("outer", "inner"))
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert F.relu(torch.ones(1)) == "inner"
    inner.__exit__(None, None, None)
    assert F.relu(torch.ones(1)) == 1


def test_attention_is_recorded_while_another_thread_has_replaced_what_it_calls() -> None:
    attention, x = nn.MultiheadAttention(4, 2, batch_first=True).eval(), torch.ones(2, 3, 4)
    with ThreadPoolExecutor(1) as other, ExitStack() as held:
        other.submit(held.enter_context, replaced_here(F, "linear", lambda *_: None)).result(60)
        with ForwardOverrides():
            out, _ = attention(x, x, x)
        other.submit(held.close).result(60)
    assert torch.allclose(out, attention(x, x, x)[0], atol=1e-6)


def test_a_seed_draws_the_same_first_weights_whatever_other_threads_draw() -> None:
    """torch has one generator: a run's first weights were drawn from the seed of a run in another thread."""
    told, drawn = Event(), Event()

    def other() -> nn.Module:
        told.set()
        drawn.wait()
        return nn.Linear(4, 4)

    def second() -> None:
        if ONE_AT_A_TIME.acquire(blocking=False):
            ONE_AT_A_TIME.release()
        else:
            told.set()  # it waits until the first has drawn
        make_module(other, 1)

    def first() -> nn.Module:
        thread.start()
        told.wait()
        made = nn.Linear(4, 4)
        drawn.set()
        return made

    alone = make_module(lambda: nn.Linear(4, 4), 0).state_dict()
    before, thread = torch.get_rng_state(), Thread(target=second)
    beside = make_module(first, 0).state_dict()
    thread.join()
    assert all(torch.equal(alone[name], value) for name, value in beside.items())
    assert torch.equal(torch.get_rng_state(), before)
