"""What a process holds of glibc's heap, told to a file: resident memory also has what glibc keeps free for later."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path

HEAP_FILE = "coordinator.heap"
NOTE_S = 5.0
FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Heap(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def heap_use() -> _Heap | None:
    """What malloc says of all arenas; None where malloc is not glibc 2.33 or newer."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # another C library
        return None
    ask.restype = _Heap
    found: _Heap = ask()
    return found


def used_bytes() -> int | None:
    """What malloc has given out and not got back; None where malloc cannot be asked."""
    heap = heap_use()
    return None if heap is None else int(heap.uordblks + heap.hblkhd)


def note_heap_use(file: Path) -> None:
    """From now on write `used_bytes` to the file every few seconds, where it exists and malloc can be asked."""

    def note() -> None:
        while (found := used_bytes()) is not None:
            draft = file.with_suffix(".draft")
            draft.write_text(str(found))
            draft.replace(file)
            time.sleep(NOTE_S)

    if file.exists():
        threading.Thread(target=note, daemon=True).start()
