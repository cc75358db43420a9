"""Work that runs out of a GPU's memory is done again in halves: the plan is an estimate, and others use the GPU too."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

import torch

from edge_client.errors import RuntimeMissing

Found = TypeVar("Found")
log = logging.getLogger(__name__)


def run_in_parts(
    total: int,
    size: int,
    run: Callable[[int, int], Found],
    *,
    what: str,
    halved: Callable[[int], None] = lambda _: None,
) -> Iterator[Found]:
    """`run(first, last)` over 0..total in parts of at most `size`; what runs out of memory is run again in halves.

    `run` keeps nothing of a part that failed. `halved` is told the new size, before the memory is given back, for what
    else can be freed and for later calls. Raises RuntimeMissing where there is no memory for one.
    """
    at = 0
    while at < total:
        last = min(at + size, total)
        found = _run_or_none(run, at, last)
        if found is not None:
            yield found[0]
            at = last
            continue
        if last - at == 1:
            raise RuntimeMissing(
                f"the GPU has no memory for 1 {what} at once",
                hint="use the engine lean, a smaller batch, or a GPU that no other program uses",
            )
        size = (last - at) // 2
        log.warning("the GPU has no memory for %d %s at once: %d from now on", last - at, what, size)
        halved(size)
        release_memory()


def _run_or_none(run: Callable[[int, int], Found], first: int, last: int) -> tuple[Found] | None:
    """The result, or None for want of memory. The error, whose frames hold tensors, is gone when this returns."""
    try:
        return (run(first, last),)
    except RuntimeError as wrong:
        if not is_out_of_memory(wrong):
            raise
        return None


def is_out_of_memory(wrong: BaseException | None) -> bool:
    """Whether this error, or one that it came from, is torch's: a recording that ends early raises one of its own."""
    while wrong is not None:
        if isinstance(wrong, torch.OutOfMemoryError):
            return True
        wrong = wrong.__cause__ or wrong.__context__
    return False


def release_memory() -> None:
    """Give what torch keeps for later back to the GPU. A GPU that is broken has nothing to give back."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
