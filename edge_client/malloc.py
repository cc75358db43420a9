"""What glibc's malloc does with freed memory: kept for the next step, or given back.

By default it returns large blocks at once, and every step of torch allocates them again: mapping a page takes longer
than torch needs to fill it, a third of a small CNN's step. And the first large block that is freed raises the size from
which blocks are mapped on their own, up to 32 MiB; later ones come from the heap, where what is allocated behind them
keeps their place after they are freed.
"""

from __future__ import annotations

import ctypes

# M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_ARENA_MAX of malloc.h
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
MAX_KEPT_BYTES = 1 << 29
MAPPED_FROM_BYTES = 1 << 18
MAX_HEAP_BLOCK_BYTES = 1 << 25  # larger blocks are still returned; glibc accepts no larger limit


def keep_freed_memory() -> bool:
    """Keep up to half a gigabyte of freed memory. Returns False, without effect, where malloc is not glibc's."""
    return _set(TRIM_THRESHOLD, MAX_KEPT_BYTES) and _set(MMAP_THRESHOLD, MAX_HEAP_BLOCK_BYTES)


def give_back_large_blocks() -> bool:
    """From now on blocks of 256 KiB or more leave the process when they are freed. Returns False as above.

    For a process that runs for months, or on a board: a coordinator's memory rose in steps, and a device with LiteRT
    kept 15 MB of an interpreter that was gone, beside the next one.
    """
    return _set(MMAP_THRESHOLD, MAPPED_FROM_BYTES)


def share_one_heap() -> bool:
    """From now on all threads allocate from one heap. Returns False as above.

    By default a thread has a heap of its own, which leaves what imports freed in the first one unused.
    """
    return _set(ARENA_MAX, 1)


def _set(option: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None).mallopt(option, value))
    except (AttributeError, OSError, TypeError):  # another C library; Windows has no handle of its own program
        return False


def trim_heap() -> None:
    """Return free memory between used blocks to the system, with glibc."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # as above
        return
