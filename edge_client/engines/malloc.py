"""Keep freed memory in the process. By default glibc returns large blocks at once, and every step allocates them again.

Mapping a page takes longer than torch needs to fill it: a third of a small CNN's step.
"""

from __future__ import annotations

import ctypes
import gc

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
MAX_KEPT_BYTES = 1 << 29
MAX_HEAP_BLOCK_BYTES = 1 << 25  # larger blocks are still returned; glibc accepts no larger limit


def keep_freed_memory() -> bool:
    """Keep up to half a gigabyte of freed memory. Returns False, without effect, where malloc is not glibc's."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library; Windows has no handle of its own program
        return False
    return bool(mallopt(TRIM_THRESHOLD, MAX_KEPT_BYTES)) and bool(mallopt(MMAP_THRESHOLD, MAX_HEAP_BLOCK_BYTES))


def trim_heap() -> None:
    """Return free memory between used blocks to the system, with glibc: a recording leaves 20 MB of cycles behind."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # as above
        return
