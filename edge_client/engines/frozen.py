"""The frozen tensors of a program on this device: one file, mapped into memory, for every engine of the process.

A file in float32 is read where it lies: its pages are the disk's cache, and a step needs no second copy. Float16 and
int8 are decoded once, when the first engine opens the file.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from weakref import WeakValueDictionary

from edge_client.engines.base import unfit
from edge_client.errors import Malformed
from edge_client.protocol.codecs import decode_frozen
from edge_client.protocol.program import FROZEN, Program
from edge_client.protocol.task import Array, Tensors


class FrozenTensors(Mapping[str, Array]):
    """Input `frozen/<name>` -> array, in the program's order."""

    def __init__(self, arrays: Tensors) -> None:
        self._arrays = arrays

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


_OPEN: WeakValueDictionary[tuple[Path, int, str, str], FrozenTensors] = WeakValueDictionary()


def open_frozen(program: Program, files: Mapping[str, Path]) -> Tensors:
    """The tensors of the file under FROZEN, none without such a file. An open file is opened once.

    Raises ProgramRefused for a file that does not hold the program's tensors.
    """
    if FROZEN not in files or program.frozen is None:
        return {}
    path = files[FROZEN]
    key = (path, path.stat().st_ino, program.frozen.sha256, program.dtype)  # its time changes with every use
    found = _OPEN.get(key)
    if found is None:
        try:
            with path.open("rb") as file:  # private to the process: nothing that is written there reaches the disk
                held = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
            arrays = decode_frozen(held, program.frozen, program.dtype)
        except (Malformed, ValueError) as wrong:
            raise unfit(f"{path.name}: {wrong}") from wrong
        _OPEN[key] = found = FrozenTensors({f"{FROZEN}/{name}": array for name, array in arrays.items()})
    return found
