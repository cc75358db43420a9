"""Freed memory stays with the process. glibc gives large blocks back at once, and every step takes them anew.

Taking a page costs the system more than torch needs to fill it: a third of a small CNN's step went there.
"""

from __future__ import annotations

import ctypes
import gc

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
MAX_KEPT_BYTES = 1 << 29
MAX_HEAP_BLOCK_BYTES = 1 << 25  # blocks above go back as before; glibc accepts no larger limit


def keep_freed_memory() -> bool:
    """Keep up to half a gigabyte for the blocks to come; False where malloc is not glibc's, which changes nothing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library; Windows has no handle of its own program
        return False
    return bool(mallopt(TRIM_THRESHOLD, MAX_KEPT_BYTES)) and bool(mallopt(MMAP_THRESHOLD, MAX_HEAP_BLOCK_BYTES))


def trim_heap() -> None:
    """Give back what lies between the blocks in use: a recording leaves 20 MB of cycles behind. Only glibc can."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # as above
        return
