"""Freed memory stays with the process. glibc gives large blocks back at once, and every step takes them anew.

Taking a page costs the system more than torch needs to fill it: a third of a small CNN's step went there.
"""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
KEPT_BYTES = 1 << 29
LARGEST_BYTES = 1 << 25  # blocks above go back as before; glibc accepts no larger limit


def keep_freed_memory() -> bool:
    """Keep up to half a gigabyte for the blocks to come; False where malloc is not glibc's, which changes nothing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library; Windows has no handle of its own program
        return False
    return bool(mallopt(TRIM_THRESHOLD, KEPT_BYTES)) and bool(mallopt(MMAP_THRESHOLD, LARGEST_BYTES))
