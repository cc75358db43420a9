"""How glibc's malloc gives the memory of a coordinator back, which runs for months.

By default the first large block that is freed raises the size from which blocks are mapped on their own, up to 32 MiB.
From then on the large blocks of each round come from the heap, and what is allocated behind them keeps their place
after they are freed: resident memory moved by 4 MB from round to round and rose in steps, while the blocks in use did
not (`make soak`). With a fixed size they are mapped, and given back at once.
"""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD = -3  # malloc.h
MAPPED_FROM_BYTES = 256 * 2**10


def give_back_large_blocks() -> bool:
    """From now on blocks of MAPPED_FROM_BYTES or more leave the process when they are freed.

    -> whether malloc was told; False with another C library than glibc, which has no such setting.
    """
    try:
        tell = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(tell(M_MMAP_THRESHOLD, MAPPED_FROM_BYTES))
